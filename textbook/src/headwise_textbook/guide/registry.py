"""All topics and exercises. A topic is a page of the guide; packages of others call `register`.

>>> find_topic("splitting").name
'splitting'
>>> find_exercise("split-heads").function
'split_heads'
"""

from functools import cache

from headwise.errors import ConfigError, unknown_name
from headwise_textbook.guide.exercises import Exercise
from headwise_textbook.guide.pages import own_topics
from headwise_textbook.guide.topic import Topic

_registered: dict[str, Topic] = {}


def register(name: str, topic: Topic) -> None:
    """Add a topic of another package. ConfigError if the name, or that of an exercise, is taken."""
    named = topic.named(name)
    if name in topics():
        raise ConfigError(f"topic {name!r} exists already; choose another name")
    for one in named.exercises:
        if one.name in exercises():
            raise ConfigError(f"topic {name!r}: exercise {one.name!r} exists already; choose another name")
    _registered[name] = named


def topics() -> dict[str, Topic]:
    """All topics by name, in the order of the guide."""
    every = {**_own(), **_registered}
    return dict(sorted(every.items(), key=lambda item: item[1].place))


def exercises() -> dict[str, Exercise]:
    """All exercises by name, in the order of the guide."""
    return {one.name: one for topic in topics().values() for one in topic.exercises}


def find_topic(name: str) -> Topic:
    """The topic of that name. ConfigError with the closest names if there is none."""
    if name not in topics():
        raise unknown_name("topic", name, topics())
    return topics()[name]


def find_exercise(name: str) -> Exercise:
    """The exercise of that name, with hyphens or underscores. ConfigError with the closest names if there is none."""
    written = name.replace("_", "-")
    if written not in exercises():
        raise unknown_name(
            "exercise", name, exercises(), listed="`headwise check` lists all", zh="`headwise check` 列出全部"
        )
    return exercises()[written]


def topic_of(exercise: Exercise) -> Topic:
    """The topic that an exercise belongs to."""
    return next(topic for topic in topics().values() if exercise in topic.exercises)


@cache
def _own() -> dict[str, Topic]:
    return {topic.name: topic for topic in own_topics()}
