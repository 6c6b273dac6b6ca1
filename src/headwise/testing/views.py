"""The check of views."""

import tempfile
from pathlib import Path

import numpy as np

from headwise.reports.data import Passage, Report
from headwise.reports.views import VIEWS, View, write_view
from headwise.table import HeadColumn, HeadTable
from headwise.testing.truth import CheckFailed, check, require

OPEN = "<"
IMAGE = f"{OPEN}img src=x onerror=alert(1)>"  # a page that shows it unescaped runs code
HOSTILE = f"{OPEN}/script>{IMAGE}{OPEN}!-- & \u2028'\"{{{{title}}}}"


@check
def check_view(name: str) -> None:
    """Check that a registered view writes every kind of report, in English and Chinese, and escapes what it shows.

    Reports of one and of several layers, of layers with different numbers of heads, of pooled weights, cross attention
    and unknown statistics, with text that would be a program in a page if it were not escaped.

    Raises:
        CheckFailed: naming the report and what does not hold.
    """
    for what, report in _reports().items():
        for lang in ("en", "zh") if what == "text to escape" else ("en",):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "written"
                try:
                    write_view(report, name, path, lang=lang)
                except Exception as error:
                    raise CheckFailed(f"{name}: {what}, lang={lang!r}: {type(error).__name__}: {error}") from error
                _check_written(f"{name}: {what}, lang={lang!r}", VIEWS[name], path)
                others = [found.name for found in Path(folder).iterdir() if found != path]
                require(not others, name, f"{what}: it leaves {others} beside what it writes")
    report = _reports()["one layer"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_view(report, name, Path(folder) / "none" / "written", lang="en")
        except OSError:
            return
        except Exception as error:
            raise CheckFailed(f"{name}: in a missing folder: expected OSError, got {type(error).__name__}") from error
        written = (Path(folder) / "none" / "written").exists()
        require(written, name, "in a missing folder: no error, and nothing written")


def _check_written(what: str, view: View, path: Path) -> None:
    made = path.is_dir() if view.folder else path.is_file()
    require(made, what, f"it writes no {'folder' if view.folder else 'file'}")
    files = [found for found in path.rglob("*") if found.is_file()] if view.folder else [path]
    require(bool(files) and all(found.stat().st_size for found in files), what, "it writes nothing")
    for found in files:
        text = found.read_bytes().decode("utf-8", errors="ignore")
        require(IMAGE not in text, what, "text of the report becomes part of the page: escape it")


def _reports() -> dict[str, Report]:
    hostile = ["武", "松", HOSTILE, "a\tb"]
    plain = ["a", "b", "c", "d", "e"]
    return {
        "one layer": _report([_passage(plain)], [2]),
        "text to escape": _report([_passage(hostile, layers=2)], [2, 2], title=HOSTILE),
        "layers with 2 heads and 1": _report([_passage(hostile, layers=2)], [2, 1]),
        "one token": _report([_passage(["a"])], [2]),
        "pooled weights": _report([_passage(list("abcdefghi"), cell=2)], [2]),
        "cross attention": _report([_passage(plain, keys=list("xyz"))], [2]),
        "two passages": _report([_passage(plain), _passage(hostile)], [2]),
    }


def _passage(tokens: list[str], *, layers: int = 1, cell: int = 1, keys: list[str] | None = None) -> Passage:
    rows, columns = (-(-len(x) // cell) for x in (tokens, tokens if keys is None else keys))
    scores = np.random.default_rng(5).normal(size=(layers, 2, rows, columns))
    if keys is None:
        scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    exact = np.exp(scores - scores.max(-1, keepdims=True))
    maps = (exact / exact.sum(-1, keepdims=True)).astype(np.float32)
    return Passage("a text", tokens, maps, cell, None if cell == 1 else maps, keys=keys)


def _report(passages: list[Passage], counts: list[int], *, title: str = "A report") -> Report:
    most = max(counts)
    values = [np.where(np.arange(count) == 0, np.nan, 0.5) for count in counts]
    column = HeadColumn(values, unit="nat", description="How widely a head looks.")
    patterns = [["previous 0.91"] * most for _ in counts]
    return Report(title, passages, HeadTable({"entropy": column}), patterns, notes=[HOSTILE])
