"""Text that people read, in English and in Chinese, and amounts in words.

>>> Bilingual("two heads", "两个头"), in_language(Bilingual("two heads", "两个头"), "zh")
('two heads', '两个头')

Amounts have three significant figures and a decimal prefix; what is in a text is counted.

>>> scaled(25_056), scaled(3_830_000), scaled(1.5e9, "B"), scaled(12)
('25.1 k', '3.83 M', '1.50 GB', '12')
>>> counted("token", 1), counted("token", 1200), counted("token", 1200).zh
('1 token', '1,200 tokens', '1,200 个词元')
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headwise.errors import ConfigError

__all__ = ["Bilingual", "Message", "breaks", "in_language", "joined", "language", "language_of"]

LANGUAGES = ("en", "zh")
_WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f“”‘’"
_MARKS = "，。、；：？！）》」』”’"  # no line begins with one
_OPENING = "（《「『“‘"  # no line ends with one
_PIECES = re.compile(rf"(?:[{_OPENING}]*(?:[{_WIDE}]|[^\s{_WIDE}]+)[{_MARKS}]*)\s*|\s+")
_chosen: list[str] = []  # by the command line; the last one counts


def check_language(lang: str) -> None:
    """Raise ConfigError unless `lang` is "en" or "zh"."""
    if lang not in LANGUAGES:
        raise ConfigError(
            f"lang={lang!r}: expected {' or '.join(map(repr, LANGUAGES))}",
            f"lang={lang!r}：应为 {' 或 '.join(map(repr, LANGUAGES))}",
        )


def language(environment: Mapping[str, str] | None = None) -> str:
    """The user's language, "en" or "zh": what `--lang` chose, else HEADWISE_LANG, else by the locale.

    Args:
        environment: the variables to read; None for those of the process.
    Raises:
        ConfigError: if HEADWISE_LANG is another language.

    >>> language({"LANG": "zh_CN.UTF-8"}), language({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"})
    ('zh', 'en')
    """
    if _chosen:
        return _chosen[-1]
    environment = os.environ if environment is None else environment
    if chosen := environment.get("HEADWISE_LANG"):
        if chosen not in LANGUAGES:
            raise ConfigError(
                f"HEADWISE_LANG={chosen!r}: expected {' or '.join(map(repr, LANGUAGES))}",
                f"HEADWISE_LANG={chosen!r}：应为 {' 或 '.join(map(repr, LANGUAGES))}",
            )
        return chosen
    locale = next(filter(None, map(environment.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if locale.lower().startswith(("zh", "chinese")) else "en"


def language_of(lang: str | None) -> str:
    """The language of an argument `lang`: None for `language()`. ConfigError unless it is "en", "zh" or None."""
    if lang is None:
        return language()
    check_language(lang)
    return lang


@contextmanager
def speaking(lang: str | None) -> Iterator[None]:
    """Within the block, `language()` is this one; None changes nothing. For command lines, which speak to one user."""
    if lang is None:
        yield
        return
    check_language(lang)
    _chosen.append(lang)
    try:
        yield
    finally:
        _chosen.pop()


class Bilingual(str):
    """An English string with its Chinese version in `zh`."""

    zh: str

    def __new__(cls, en: str, zh: str) -> "Bilingual":
        """The string `en` with the attribute `zh`."""
        made = super().__new__(cls, en)
        made.zh = zh
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.zh


class Message(Bilingual):
    """A sentence with a code that identifies it and the values in it.

    code: the name of the sentence. en, zh: templates of `str.format`. values: what they are filled with.

    >>> Message("many", "There are {count:,} heads.", "共有 {count:,} 个头。", count=1200).zh
    '共有 1,200 个头。'
    """

    code: str
    values: Mapping[str, int | float | str]

    def __new__(cls, code: str, en: str, zh: str, /, **values: int | float | str) -> "Message":
        """Format both templates with `values`, as str.format does; bilingual values appear in the same language."""
        chinese = {name: in_language(x, "zh") if isinstance(x, str) else x for name, x in values.items()}
        made = str.__new__(cls, en.format(**values))
        made.zh, made.code, made.values = zh.format(**chinese), code, values
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.code, *(part.replace("{", "{{").replace("}", "}}") for part in (str(self), self.zh))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: text, zh, code and values, which may be messages themselves."""
        values = {name: x.to_dict() if isinstance(x, Message) else x for name, x in self.values.items()}
        return {"text": str(self), "zh": self.zh, "code": self.code, "values": values}


def in_language(text: str, lang: str) -> str:
    """The text in that language if it has a version in it, otherwise the text itself."""
    return text.zh if lang == "zh" and isinstance(text, Bilingual) else text


def joined(parts: Iterable[str], en: str = ", ", zh: str = "，") -> Bilingual:
    """Texts in one, separated by `en` in English and by `zh` in Chinese.

    Args:
        parts: the texts. en, zh: what stands between them.
    Returns:
        All of them in both languages.
    """
    every = list(parts)
    return Bilingual(en.join(every), zh.join(in_language(part, "zh") for part in every))


def breaks(text: str, width: int, fold: bool = False) -> list[int]:
    """Where a line is to be broken so that its parts have at most `width` columns.

    Chinese breaks between any two characters, but for marks that open or close something.

    Args:
        text: one line. width: in columns of a terminal, of which a Chinese character has two.
        fold: whether words that are longer than a line are broken too.
    Returns:
        The indices of the characters that begin another line.
    """
    from rich.cells import cell_len

    found, used = [], 0
    for piece in _PIECES.finditer(text):
        word = piece[0].rstrip()
        if used and used + cell_len(word) > width:
            found.append(piece.start())
            used = 0
        for at, sign in enumerate(word if fold and cell_len(word) > width else ""):
            if used + cell_len(sign) > width:
                found.append(piece.start() + at)
                used = 0
            used += cell_len(sign)
            word = ""
        used += cell_len(word) + len(piece[0]) - len(piece[0].rstrip())
    return found


PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
COUNTED = {"character": "个字符", "token": "个词元", "window": "个窗口", "file": "个文件"}


def scaled(value: float, unit: str = "") -> str:
    """Format an amount with three significant figures, a decimal prefix and a unit, such as "B", "FLOP/s", or "" for a
    count; whole ones below 1000 as they are."""
    step = 0
    while abs(value) >= 999.5 and step < len(PREFIXES) - 1:
        value, step = value / 1000, step + 1
    if not step and value == int(value):
        return f"{value:.0f} {unit}".rstrip()
    return f"{three_figures(value)} {PREFIXES[step]}{unit}".rstrip()


def three_figures(value: float) -> str:
    """Format a number from 0 to 1000 with three significant figures: 1.50, 12.3, 512."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def counted(what: str, count: int) -> Bilingual:
    """Format a number of characters, tokens, windows or files; what: one of COUNTED."""
    return Bilingual(f"{count:,} {what}{'s' * (count != 1)}", f"{count:,} {COUNTED[what]}")
