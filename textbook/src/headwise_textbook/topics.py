"""The topics of the guide, each a page in each language with code that runs, and their exercises.

The pages are docs/guide in the repository, `pages` in the package: Markdown with a title, links, prose, a formula,
code, what it prints, prose, a picture, claims and exercises. The index lists the topics in their order, each with its
formula in plain characters. Packages of others call `register`.

>>> find_topic("splitting").name
'splitting'
>>> find_exercise("split-heads").function
'split_heads'
"""

import contextlib
import hashlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from headwise.errors import ConfigError, unknown_name
from headwise.wording import Bilingual, in_language, tr
from headwise_textbook.claims import choose
from headwise_textbook.exercises import CLASS, SOLUTIONS, Exercise
from headwise_textbook.trace import seeded

LANGUAGES = ("en", "zh")
EXERCISES = 3  # of a topic that has some; a page on a listing points at those of others
COLUMNS = 100
WORDS = {
    "topic": tr("topic"),
    "claims": tr("What the claim check says"),
    "exercises": tr("Exercises"),
}
_LISTED = re.compile(r"^\| (\d+) \| \[.*\]\((\w+)\.md\) \| `(.*)` \|$", re.MULTILINE)
_OUTPUT = re.compile(r"(<!-- output of )(\w+)( -->\n```text\n)(.*?)(\n?```\n)", re.DOTALL)
_PARTS = re.compile(
    r"# (?P<title>[^\n]+)\n\n[^\n]+\n\n(?P<intro>.*?)\n\n\$\$\n.*?\n\$\$\n\n## [^\n]+\n\n"
    r"```(?:python|console)\n(?:\$ )?(?P<code>.*?)\n```\n\n[^\n]+\n\n<!-- output of .*?\n```\n\n"
    r"(?P<reading>.*?)\n\n!\[",
    re.DOTALL,
)


@dataclass(frozen=True)
class Topic:
    """One page of the guide."""

    place: float  # topics are in the order of this number
    title: Bilingual
    plain: str  # the formula in plain characters, for the terminal; Bilingual if there are words in it
    intro: Bilingual  # prose before the code
    code: str  # at most some ten lines of Python, or one `headwise` command, which is Bilingual
    reading: Bilingual  # prose after its output
    claims: tuple[str, ...]  # ids
    exercises: tuple[Exercise, ...]  # three of them, or none
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
        if len(self.exercises) not in (0, EXERCISES):
            raise ConfigError(f"topic {name!r}: {len(self.exercises)} exercises, expected {EXERCISES} or none")
        return replace(self, name=name)


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
    return dict(sorted({**_own(), **_registered}.items(), key=lambda item: item[1].place))


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
        raise unknown_name("exercise", name, [*exercises(), CLASS], listed=tr("`headwise check` lists all"))
    return exercises()[written]


@cache
def _own() -> dict[str, Topic]:
    """The topics that the index lists, read from their pages."""
    english, chinese = (_LISTED.findall(page("index", lang)) for lang in LANGUAGES)
    found = {}
    for (place, name, plain), (_, _, zh_plain) in zip(english, chinese, strict=True):
        en, zh = (_read(name, lang) for lang in LANGUAGES)
        both = {part: Bilingual(en[part], zh[part]) for part in ("title", "intro", "code", "reading")}
        tasks = tuple(SOLUTIONS[one](Bilingual(task, zh["tasks"][one])) for one, task in en["tasks"].items())
        shown = Bilingual(*(text.replace("\\|", "|") for text in (plain, zh_plain)))
        found[name] = Topic(float(place), plain=shown, claims=en["claims"], exercises=tasks, **both).named(name)
    return found


def _read(name: str, lang: str) -> dict[str, Any]:
    """The parts of a page. ConfigError if it has another form."""
    text = page(name, lang)
    found = _PARTS.match(text)
    if found is None:
        raise ConfigError(f"{lang}/{name}.md: expected title, links, prose, formula, code, output, prose and picture")
    tasks = dict(re.findall(r"^\d\. \*\*([\w-]+)\*\*(?:: |：)(.+)$", text, re.MULTILINE))
    claims = tuple(re.findall(r"^\| \*\*([\w-]+)\*\* ", text, re.MULTILINE))
    return {**found.groupdict(), "claims": claims, "tasks": tasks}


def page(name: str, lang: str) -> str:
    """The text of a page."""
    return files("headwise_textbook").joinpath(f"pages/{lang}/{name}.md").read_text(encoding="utf-8")


def stored_output(text: str) -> tuple[str, str]:
    """The hash of the code and its output in a page. ConfigError if there is none."""
    found = _OUTPUT.search(text)
    if found is None:
        raise ConfigError("page: expected <!-- output of … --> and a block of text")
    return found[2], found[4]


def with_output(text: str, made_of: str, printed: str) -> str:
    """The page with another output of its code. made_of: the hash of the code."""
    return _OUTPUT.sub(lambda old: f"{old[1]}{made_of}{old[3]}{printed}\n```\n", text, count=1)


def code_hash(code: str) -> str:
    """Identifies the code of which a page shows the output."""
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def cell(text: str) -> str:
    """A text within a Markdown table, where | ends a cell."""
    return text.replace("|", "\\|")


def claims_of(topic: Topic, lang: str) -> list[tuple[str, str, str]]:
    """Id, statement and verdict of each claim of a topic."""
    return [
        (one.id, in_language(one.statement, lang), in_language(one.expected.words, lang))
        for one in choose(topic.claims)
    ]


def output(topic: Topic, lang: str, *, columns: int = COLUMNS) -> str:
    """What the code of a topic prints: Python in this process, a command in one of its own with so many columns.

    ConfigError if the code fails, with its last line. Random numbers start from the same seed each time. There are no
    colours, no spaces at the ends of lines and no empty lines at both ends.
    """
    code = topic.code_in(lang)
    if topic.is_command:
        environment = {**os.environ, "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}
        with tempfile.TemporaryDirectory(prefix="headwise-guide-") as folder:
            done = subprocess.run(
                [sys.executable, "-m", "headwise", *shlex.split(code)[1:]], capture_output=True, text=True,
                encoding="utf-8", env=environment, cwd=folder, check=False,
            )  # fmt: skip
        if done.returncode:
            raise ConfigError(f"`{code}` fails with code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
        printed = done.stdout
    else:
        said = io.StringIO()
        names: dict[str, Any] = {"__name__": "guide"}
        with seeded(0), contextlib.redirect_stdout(said):
            try:
                exec(compile(code, f"guide, {topic.name}", "exec"), names)
            except Exception as error:
                raise ConfigError(f"topic {topic.name!r}: its code fails: {type(error).__name__}: {error}") from error
        printed = said.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    return "\n".join(line.rstrip() for line in plain.splitlines()).strip("\n")
