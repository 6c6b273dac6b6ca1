"""Text that people read: the user's language, texts in it, and amounts in words.

>>> with speaking("zh"):
...     in_language(tr("{count} of {of} KV heads", count=3, of=32), language())
'32 个键值头中的 3 个'

Amounts have three significant figures and a decimal prefix; what is in a text is counted.

>>> scaled(25_056), scaled(3_830_000), scaled(1.5e9, "B"), scaled(12)
('25.1 k', '3.83 M', '1.50 GB', '12')
>>> counted("token", 1), counted("token", 1200), counted("token", 1200).zh
('1 token', '1,200 tokens', '1,200 个词元')
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headwise.errors import ConfigError
from headwise.text import BLANK, COMMA, LIST, Bilingual, Message, in_language, joined, looked_up, tr, trn

__all__ = [
    "BLANK", "COMMA", "LIST", "Bilingual", "Message", "breaks", "in_language", "joined", "language", "language_of",
    "looked_up", "tr", "trn",
]  # fmt: skip

LANGUAGES = {"en": "English", "zh": "中文"}  # as each calls itself
_WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f“”‘’"
_MARKS = "，。、；：？！）》」』”’"  # no line begins with one
_OPENING = "（《「『“‘"  # no line ends with one
_PIECES = re.compile(rf"(?:[{_OPENING}]*(?:[{_WIDE}]|[^\s{_WIDE}]+)[{_MARKS}]*)\s*|\s+")
_chosen: list[str] = []  # by the command line; the last one counts


def check_language(lang: str) -> None:
    """Raise ConfigError unless `lang` is "en" or "zh"."""
    if lang not in LANGUAGES:
        raise ConfigError("lang={lang!r}: expected {known}", lang=lang, known=joined(map(repr, LANGUAGES), tr(" or ")))


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
            known = joined(map(repr, LANGUAGES), tr(" or "))
            raise ConfigError("HEADWISE_LANG={chosen!r}: expected {known}", chosen=chosen, known=known)
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
COUNTED = {
    "character": trn("{count:,} character", "{count:,} characters", count=1),
    "token": trn("{count:,} token", "{count:,} tokens", count=1),
    "window": trn("{count:,} window", "{count:,} windows", count=1),
    "file": trn("{count:,} file", "{count:,} files", count=1),
}


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


def counted(what: str, count: int) -> Message:
    """Format a number of characters, tokens, windows or files; what: one of COUNTED."""
    return COUNTED[what].filled(count=count)
