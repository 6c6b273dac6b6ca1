"""A topic of the guide: its prose in both languages, its code, its picture, its claims and its exercises."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headwise.errors import ConfigError
from headwise.reports.curves import Picture
from headwise.textbook.guide.grading.draw import Draw
from headwise.textbook.texts import everything
from headwise.wording import Bilingual

TOLERANCE = 1e-4  # of numbers in float32
EXERCISES = 3  # of a topic
CITED = Bilingual(
    "Numbers such as ({number}) are equations of the *{text}*, one of the five texts whose claims are tested; "
    '`headwise tour "({number})"` finds each.',
    "像 ({number}) 这样的编号，是“{text}”中公式的编号，该文是论断检验所涉及的五篇文章之一；"
    '用 `headwise tour "({number})" --lang zh` 可找到对应的主题。',
)


@dataclass(frozen=True)
class Exercise:
    """A function that readers write themselves.

    Attributes:
        task: what the function computes. ours: our own function, whose name and arguments the reader's has.
        inputs: random arguments. tolerance: relative and absolute.
    """

    task: Bilingual
    ours: Callable[..., Any] = field(repr=False)
    inputs: Callable[[Draw], tuple[Any, ...]] = field(repr=False)
    tolerance: float = TOLERANCE

    @property
    def function(self) -> str:
        """The name of the function."""
        return self.ours.__name__

    @property
    def name(self) -> str:
        """The name of the exercise on the command line."""
        return self.function.replace("_", "-")

    @property
    def signature(self) -> str:
        """The first line of the function, such as "def split_heads(x: Tensor, num_heads: int) -> Tensor:"."""
        written = inspect.signature(self.ours)
        return f"def {self.function}{written}:".replace("torch.Tensor", "Tensor")

    @property
    def skeleton(self) -> str:
        """The beginning of a reader's file: what the first line of the function needs, and that line."""
        return ("from torch import Tensor\n\n" if "Tensor" in self.signature else "") + self.signature


def exercise(
    en: str, zh: str, inputs: Callable[[Draw], tuple[Any, ...]], *, tolerance: float = TOLERANCE
) -> Callable[[Callable[..., Any]], Exercise]:
    """Decorate our own solution of an exercise.

    Args:
        en, zh: the task. inputs: random arguments, from a `Draw`.
    """
    return lambda ours: Exercise(Bilingual(en, zh), ours, inputs, tolerance)


@dataclass(frozen=True)
class Topic:
    """One page of the guide.

    Attributes:
        place: topics are in the order of this number. title: of the page.
        formula: in LaTeX. plain: the same in plain characters, for the terminal. Bilingual if there are words in them.
        intro: prose before the code. code: at most some ten lines of Python, or one `headwise` command, in which
            {lang} becomes --lang zh in Chinese. reading: prose after its output.
        picture: the data of a picture. caption: below it.
        claims: ids of the claims that belong to the topic. exercises: three of them.
        slow: whether the code takes more than two seconds. name: of the topic, that of its module.
    """

    place: float
    title: Bilingual
    formula: str
    plain: str
    intro: Bilingual
    code: str
    reading: Bilingual
    picture: Callable[[], Picture] = field(repr=False)
    caption: Bilingual
    claims: tuple[str, ...]
    exercises: tuple[Exercise, ...]
    slow: bool = False
    name: str = ""

    @property
    def is_command(self) -> bool:
        """Whether the code is a command."""
        return self.code.lstrip().startswith("headwise ")

    @property
    def introduction(self) -> Bilingual:
        """The prose before the code: `intro`, and the name of the text whose equations the page cites by number."""
        prose = "\n".join((self.intro, self.code, self.reading, *(one.task for one in self.exercises)))
        numbers = re.findall(r"\((\d+(?:\.\d+)+)\)", prose)
        for text, _, kind, number in everything():
            if kind == "equation" and numbers[:1] == [number]:
                said = CITED.format(number=number, text=text.title), CITED.zh.format(number=number, text=text.title.zh)
                return Bilingual(f"{self.intro}\n\n{said[0]}", f"{self.intro.zh}\n\n{said[1]}")
        return self.intro

    def code_in(self, lang: str) -> str:
        """The code as a reader of that language runs it."""
        code = self.code.strip()
        return code.replace("{lang}", " --lang zh" if lang == "zh" else "") if self.is_command else code

    def named(self, name: str) -> "Topic":
        """The topic under a name. ConfigError if a part of it is missing."""
        for part in ("title", "intro", "reading", "caption"):
            value = getattr(self, part)
            if not isinstance(value, Bilingual) or not value.strip() or not value.zh.strip():
                raise ConfigError(f"topic {name!r}: {part} is empty; expected a Bilingual with text in both languages")
        if len(self.exercises) != EXERCISES:
            raise ConfigError(f"topic {name!r}: {len(self.exercises)} exercises, expected {EXERCISES}")
        return replace(self, name=name)
