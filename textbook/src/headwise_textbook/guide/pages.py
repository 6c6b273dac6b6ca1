"""Topics read from their pages: docs/guide in the repository, `pages` in the package; Markdown in both languages.

A page has a title, links, prose, a formula, code, what it prints, prose, a picture, claims and exercises. The index
lists the topics in their order, each with its formula in plain characters.
"""

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from headwise.errors import ConfigError
from headwise.wording import Bilingual, in_language
from headwise_textbook.claims import choose
from headwise_textbook.guide.exercises import SOLUTIONS
from headwise_textbook.guide.topic import Topic

LANGUAGES = ("en", "zh")
WORDS = {
    "topic": Bilingual("topic", "主题"),
    "claims": Bilingual("What the claim check says", "论断检验的结果"),
    "exercises": Bilingual("Exercises", "练习"),
}
_LISTED = re.compile(r"^\| (\d+) \| \[.*\]\((\w+)\.md\) \| `(.*)` \|$", re.MULTILINE)
_OUTPUT = re.compile(r"(<!-- output of )(\w+)( -->\n```text\n)(.*?)(\n?```\n)", re.DOTALL)
_PARTS = re.compile(
    r"# (?P<title>[^\n]+)\n\n[^\n]+\n\n(?P<intro>.*?)\n\n\$\$\n.*?\n\$\$\n\n## [^\n]+\n\n"
    r"```(?:python|console)\n(?:\$ )?(?P<code>.*?)\n```\n\n[^\n]+\n\n<!-- output of .*?\n```\n\n"
    r"(?P<reading>.*?)\n\n!\[",
    re.DOTALL,
)


def page(name: str, lang: str) -> str:
    """The text of a page."""
    return files("headwise_textbook").joinpath("pages", lang, f"{name}.md").read_text(encoding="utf-8")


def own_topics() -> Iterator[Topic]:
    """The topics that the index lists."""
    english, chinese = (_LISTED.findall(page("index", lang)) for lang in LANGUAGES)
    for (place, name, plain), (_, _, zh) in zip(english, chinese, strict=True):
        yield _topic(float(place), name, Bilingual(plain, zh))


def stored_output(text: str) -> tuple[str, str]:
    """The hash of the code and its output in a page. ConfigError if there is none."""
    found = _OUTPUT.search(text)
    if found is None:
        raise ConfigError("page: expected <!-- output of … --> and a block of text")
    return found[2], found[4]


def with_output(text: str, made_of: str, printed: str) -> str:
    """The page with another output of its code. made_of: the hash of the code."""
    return _OUTPUT.sub(lambda old: f"{old[1]}{made_of}{old[3]}{printed}\n```\n", text, count=1)


def claims_of(topic: Topic, lang: str) -> list[tuple[str, str, str]]:
    """Id, statement and verdict of each claim of a topic."""
    return [
        (one.id, in_language(one.statement, lang), in_language(one.expected.words, lang))
        for one in choose(topic.claims)
    ]


def cell(text: str) -> str:
    """A text within a Markdown table, where | ends a cell."""
    return text.replace("|", "\\|")


def _topic(place: float, name: str, plain: Bilingual) -> Topic:
    en, zh = (_read(name, lang) for lang in LANGUAGES)
    both = {part: Bilingual(en[part], zh[part]) for part in ("title", "intro", "code", "reading")}
    exercises = tuple(SOLUTIONS[one](Bilingual(task, zh["tasks"][one])) for one, task in en["tasks"].items())
    shown = Bilingual(*(text.replace("\\|", "|") for text in (plain, plain.zh)))
    return Topic(place, plain=shown, claims=en["claims"], exercises=exercises, **both).named(name)


def _read(name: str, lang: str) -> dict[str, Any]:
    """The parts of a page. ConfigError if it has another form."""
    text = page(name, lang)
    found = _PARTS.match(text)
    if found is None:
        raise ConfigError(f"{lang}/{name}.md: expected title, links, prose, formula, code, output, prose and picture")
    tasks = dict(re.findall(r"^\d\. \*\*([\w-]+)\*\*(?:: |：)(.+)$", text, re.MULTILINE))
    claims = tuple(re.findall(r"^\| \*\*([\w-]+)\*\* ", text, re.MULTILINE))
    return {**found.groupdict(), "claims": claims, "tasks": tasks}
