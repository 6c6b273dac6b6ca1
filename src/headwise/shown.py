"""What notebooks show of an object. `reports.notebook` draws; it is imported when the first object is shown.

    class Table(Shown): ...
    register(Table, draw)        # draw(table, lang) returns HTML

Looked up by class, along its bases. `_repr_html_` is what Jupyter, VS Code and Colab call.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from headwise.wording import language

DRAWN_IN = "headwise.reports.notebook"  # its modules call `register`; it imports much, so only when it is needed
Draw = Callable[[Any, str], str]
DRAWN: dict[type, Draw] = {}


class Shown:
    """A class whose objects are drawn in notebooks."""

    def _repr_html_(self) -> str:
        return html_of(self)


def register(kind: type, draw: Draw) -> None:
    """Draw objects of this class, and of classes that inherit from it, by `draw(thing, lang)`."""
    DRAWN[kind] = draw


def html_of(thing: Any, lang: str | None = None) -> str:
    """The HTML of an object of a registered class. lang: "en" or "zh", None for `wording.language()`."""
    import_module(DRAWN_IN)
    draw = next(DRAWN[kind] for kind in type(thing).__mro__ if kind in DRAWN)
    return draw(thing, language() if lang is None else lang)
