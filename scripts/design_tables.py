"""Write the tables of docs/designs.md anew, from what the designs say of themselves: python scripts/design_tables.py"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from headwise.base.files import write_text
from headwise.costs import Work
from headwise.errors import ConfigError
from headwise.nn.registry import DESIGNS
from headwise.plan.compare import compare_designs
from headwise.plan.tables import markdown_table
from headwise.wording import in_language

PAGE = Path(__file__).parent.parent / "docs" / "designs.md"
TITLES = {
    "en": ("design", "class", "what it is", "use it when", "source"),
    "zh": ("设计", "类", "说明", "适用场合", "出处"),
}
D_MODEL, HEADS, TOKENS = 768, 12, 2048  # of the comparison


def which(lang: str) -> str:
    """All designs: class, description, when to use it, and source."""
    if lang not in TITLES:
        raise ConfigError(f"lang={lang!r}: expected {' or '.join(map(repr, TITLES))}")
    rows = []
    for name, design in DESIGNS.items():
        notes = design.notes
        words = in_language(notes.summary, lang), in_language(notes.use, lang)
        rows.append((f"`{name}`", f"`{design.__name__}`", *words, notes.source))
    return _table(TITLES[lang], rows)


def takes() -> str:
    """All designs: parameters, work and cache as formulas."""
    rows = [(f"`{name}`", d.notes.parameters, d.notes.work, d.notes.cache) for name, d in DESIGNS.items()]
    return _table(("design", "parameters", "multiply-adds compared with MHA", "cache"), rows)


def compared() -> str:
    """All designs at one width, as counted by `headwise plan designs`."""
    return markdown_table(compare_designs(D_MODEL, HEADS, Work(1, TOKENS, TOKENS)).tables[0], "en")


def limits() -> str:
    """What designs do not support, and why."""
    rows = [
        (f"`{name}`", what, because)
        for name, design in DESIGNS.items()
        for what, because in {**design.takes_none_as, **design.notes.limits}.items()
    ]
    return _table(("design", "does not support", "because"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "which": partial(which, "en"),
    "takes": takes,
    "compared": compared,
    "limits": limits,
}


def filled(page: str) -> str:
    """Return the page with every table, from `<!-- table: NAME -->` to `<!-- end -->`, replaced by a new one.

    Raises:
        ConfigError: if the place of a table is missing.
    """
    for name, table in TABLES.items():
        opening = f"<!-- table: {name} -->\n"
        pattern = re.compile(re.escape(opening) + ".*?<!-- end -->", re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ConfigError(f"page: expected {opening.strip()} … <!-- end --> once")
        made = f"{opening}{table()}<!-- end -->"
        page = pattern.sub(lambda _, made=made: made, page)  # type: ignore[misc]
    return page


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8")))
