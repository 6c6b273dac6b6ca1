"""Prose of topics: lines of the source are joined, without a space between Chinese characters; and wrapped again.

>>> wrapped_off("one\\ntwo\\n\\nthree"), wrapped_off("注意力\\n头")
('one two\\n\\nthree', '注意力头')
>>> wrapped_to("每个头都有自己的投影。", 12).splitlines()
['每个头都有自', '己的投影。']
"""

import re
from itertools import pairwise

from headwise.wording import breaks

_WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f“”‘’"
_MARKS = "，。、；：？！）》」』”’"  # no line begins with one
_OPENING = "（《「『“‘"  # no line ends with one


def wrapped_off(text: str) -> str:
    """The text with one line for each paragraph. Lists, tables and code blocks keep their lines."""
    parts = re.split(r"\n\s*\n", text.strip())
    kept = ("```", "|", "-", "1.", "$$")
    return "\n\n".join(_dedented(part) if part.lstrip().startswith(kept) else _joined(part) for part in parts)


def wrapped_to(text: str, width: int) -> str:
    """A text with Chinese characters in lines of at most `width` columns, broken between characters or at spaces."""
    lines = []
    for line in text.split("\n"):
        ends = [0, *breaks(line, width), len(line)]
        lines += [line[start:end].rstrip() for start, end in pairwise(ends)]
    return "\n".join(lines)


def hanging(text: str, width: int, by: int = 4) -> str:
    """A text as by `wrapped_to`, with its first line as it is and the others indented.

    >>> hanging("  name  每个头都有自己的投影。", 16)
    '  name  每个头都\\n    有自己的投\\n    影。'
    """
    first, *others = wrapped_to(text, width).splitlines()
    rest = " ".join(others) if not others else text.strip()[len(first.strip()) :].lstrip()
    return "\n".join([first, *(f"{' ' * by}{line}" for line in wrapped_to(rest, width - by).splitlines() if line)])


def _dedented(part: str) -> str:
    return "\n".join(line.strip() for line in part.strip().splitlines())


def _joined(paragraph: str) -> str:
    """In one line: no space between two wide characters, or beside a wide punctuation mark."""
    text = "\n".join(line.strip() for line in paragraph.strip().splitlines())
    text = re.sub(rf"(?<=[{_WIDE}])\n(?=[{_WIDE}])|(?<=[{_MARKS}])\n|\n(?=[{_OPENING}{_MARKS}])", "", text)
    return text.replace("\n", " ")
