"""A topic of the guide: a page in each language, whose code runs, with claims and exercises."""

from dataclasses import dataclass, replace

from headwise.errors import ConfigError
from headwise.wording import Bilingual, in_language
from headwise_textbook.guide.exercises import Exercise

EXERCISES = 3  # of a topic


@dataclass(frozen=True)
class Topic:
    """One page of the guide.

    Attributes:
        place: topics are in the order of this number. title: of the page.
        plain: the formula in plain characters, for the terminal. Bilingual if there are words in it.
        intro: prose before the code. code: at most some ten lines of Python, or one `headwise` command, which is
            Bilingual. reading: prose after its output.
        claims: ids of the claims that belong to the topic. exercises: three of them. name: of the topic and its page.
    """

    place: float
    title: Bilingual
    plain: str
    intro: Bilingual
    code: str
    reading: Bilingual
    claims: tuple[str, ...]
    exercises: tuple[Exercise, ...]
    name: str = ""

    @property
    def is_command(self) -> bool:
        """Whether the code is a command."""
        return self.code.lstrip().startswith("headwise ")

    def code_in(self, lang: str) -> str:
        """The code as a reader of that language runs it."""
        return in_language(self.code, lang).strip()

    def named(self, name: str) -> "Topic":
        """The topic under a name. ConfigError if a part of it is missing."""
        for part in ("title", "intro", "reading"):
            value = getattr(self, part)
            if not isinstance(value, Bilingual) or not value.strip() or not value.zh.strip():
                raise ConfigError(f"topic {name!r}: {part} is empty; expected a Bilingual with text in both languages")
        if len(self.exercises) != EXERCISES:
            raise ConfigError(f"topic {name!r}: {len(self.exercises)} exercises, expected {EXERCISES}")
        return replace(self, name=name)
