"""Findings as one HTML page with plots: a single file without scripts or network access, in light and dark colours.

>>> from headwise_textbook.claims import choose, run, write_page
>>> write_page(run(choose()), "claims.html")                               # doctest: +SKIP
PosixPath('claims.html')
"""

import os
from collections.abc import Sequence
from pathlib import Path

from headwise.base import write_text
from headwise.errors import ConfigError
from headwise.wording import language_of
from headwise_textbook.claims.claim import Finding
from headwise_textbook.claims.html import claims_page
from headwise_textbook.claims.show import by_group, summary


def write_page(findings: Sequence[Finding], path: str | os.PathLike[str], *, lang: str | None = None) -> Path:
    """Write the page to `path` and return the path. lang: "en" or "zh"; None for the locale's.

    Raises:
        ConfigError: if `path` is a folder.
        CheckpointError: if the file cannot be written; an existing file is then unchanged.
    """
    if Path(path).is_dir():
        raise ConfigError(f"{os.fspath(path)!r} is a folder; expected a file name, such as claims.html")
    write_text(path, to_html(findings, lang))
    return Path(path)


def to_html(findings: Sequence[Finding], lang: str | None = None) -> str:
    """The whole page: a summary, then a table and the plots of each group."""
    return claims_page(by_group(findings), summary(findings), language_of(lang))
