"""Views: ways to write a `Report`, by name. A view is a class in a file of its own and a line that registers it.

class Arcs(View):
    name, about = "arcs", "the strongest key of each query, as arcs (SVG)"

    def write(self, report, path, *, lang): ...

register(Arcs())                            # hw.reports.write_view(report, "arcs", "arcs.svg"), see --view arcs=…
"""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from headwise.errors import ConfigError, check_declared
from headwise.reports.data import Report
from headwise.reports.html import write_report
from headwise.reports.png import write_pngs
from headwise.wording import language_of


class View(ABC):
    """One way to write a report.

    Attributes:
        name: by which it is requested. about: what it writes, for lists of views.
        folder: whether it writes a folder instead of a file.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    folder: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_declared(cls, View, {
            "name": "by which it is requested", "about": "what it writes", "write": "how it writes a report",
        })  # fmt: skip

    @abstractmethod
    def write(self, report: Report, path: Path, *, lang: str) -> None:
        """Write the report to the path, whole or not at all. lang: "en" or "zh"."""


VIEWS: dict[str, View] = {}


def register(view: View) -> View:
    """Make a view known by its name; returns it.

    Raises:
        ConfigError: if it is not a `View`, or another view has the same name.
    """
    if not isinstance(view, View):
        raise ConfigError(f"register({view!r}): expected a headwise.reports.views.View")
    if type(VIEWS.get(view.name, view)) is not type(view):
        raise ConfigError(f"register({type(view).__name__}): there is another view {view.name!r}; give it another name")
    VIEWS[view.name] = view
    return view


def view_of(name: str) -> View:
    """The view of that name; ConfigError with the known views if there is none."""
    if name not in VIEWS:
        known = "; ".join(f"{view.name}: {view.about}" for view in VIEWS.values())
        raise ConfigError(
            f"view={name!r}: no such view. Known: {known}", f"view={name!r}：没有这种视图。现有：{'；'.join(VIEWS)}"
        )
    return VIEWS[name]


def write_view(report: Report, name: str, path: str | os.PathLike[str], *, lang: str | None = None) -> Path:
    """Write a report by the view of that name, in the language `lang` ("en" or "zh"; None for the
    locale's). Returns the path.

    Raises:
        ConfigError: for an unknown view or language. OSError: where the path cannot be written.
    """
    lang = language_of(lang)
    view_of(name).write(report, Path(path), lang=lang)
    return Path(path)


class _Page(View):
    name, about = "html", "one HTML page with every map, statistic and role"

    def write(self, report: Report, path: Path, *, lang: str) -> None:
        write_report(report, path, lang=lang)


class _Pictures(View):
    name, about, folder = "png", "a folder with a heat map of each head", True

    def write(self, report: Report, path: Path, *, lang: str) -> None:
        write_pngs(report, path, lang=lang)


for _view in (_Page(), _Pictures()):
    register(_view)
