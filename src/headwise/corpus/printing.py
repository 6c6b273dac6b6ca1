"""The result of a sweep in a terminal: the facts, each measure over the heads, and the first heads."""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from headwise.corpus.result import CorpusMeasures
from headwise.errors import check_choice
from headwise.stats.base import unit_of
from headwise.table.show import as_text, duration, numbers
from headwise.wording import LIST, counted, in_language, joined, language, tr

SHOWN = 12  # heads
_WIDE = "\ue000"  # a sign that no text has
WORDS = {
    "model": tr("model"),
    "model_of": tr("{name}: {about}"),
    "corpus": tr("corpus"),
    "kernel": tr("kernel"),
    "table": tr("table"),
    "took": tr(", in {time}"),
    "corpus_of": tr("{files}, {tokens} in {windows}{took}"),
    "table_of": tr("{path}: {heads:,} heads × {measures} measures"),
    "measure": tr("measure"),
    "unit": tr("unit"),
    "mean of heads": tr("mean of heads"),
    "least": tr("least"),
    "largest": tr("largest"),
    "head": tr("head"),
    "layer": tr("layer"),
    "more_heads": tr("{count:,} more heads"),
    "both": tr("{one} and {other}"),
    "also": tr("The table also contains {rest}."),
    "nonfinite": tr(
        "NaN or infinity: up to {rows:,} queries of a head, in {windows:,} windows that were left out for it."
    ),
    "nonfinite_values": tr(
        "NaN or infinity among the values of a head; its weights are finite, and nothing was left out."
    ),
}


def check_sort(sort: str | None, names: Sequence[str]) -> None:
    """Raise ConfigError if the heads cannot be sorted by this name."""
    if sort is not None:
        check_choice("sort", sort, names)


def print_measures(
    found: CorpusMeasures, console: Console, *, sort: str | None = None, seconds: float | None = None
) -> None:
    """Print facts, a line a measure, and a line each for the first heads, with as many measures as fit. sort: the
    measure to sort by, largest first; by layer and head if None."""
    about, total, lang = found.about, found.total, language()
    took = "" if seconds is None else _said("took", time=duration(seconds))
    model = about["model"] | about["model"].get("zh", {}) if lang == "zh" else about["model"]
    counts = {"files": len(about["files"]), "tokens": total.tokens, "windows": total.windows}
    corpus = _said("corpus_of", **{name: counted(name[:-1], n) for name, n in counts.items()}, took=took)
    facts = [
        ("model", _said("model_of", **{key: model[key] for key in ("name", "about")})),
        ("corpus", corpus),
        ("kernel", ", ".join(about["kernels"])),
        ("table", _said("table_of", path=str(found.path), heads=len(found.heads), measures=len(found.measures))),
    ]
    margin = max(6, *(cell_len(_said(name)) for name, _ in facts))
    for code, value in facts:
        name = _said(code)
        console.print(Text(f"{' ' * (margin - cell_len(name))}{name}  ", style="dim") + Text(value), soft_wrap=True)
    console.print()
    header, rows = found.overview()
    rows = [[name, in_language(unit_of(unit), lang), *cells] for name, unit, *cells in rows]
    _print_table(console, _aligned([_said(name) for name in header], rows, words=2))
    console.print()
    table = found.table if sort is None else found.table.sort(sort)
    head = [_said("layer"), _said("head"), *table]
    cells = zip(*(numbers(column)[:SHOWN] for column in table.values()), strict=True)
    body = [[str(layer), str(at), *row] for (layer, at), row in zip(table.places[:SHOWN], cells, strict=True)]
    fits = _fitting(head, body, console.width, sort)
    _print_table(console, _aligned([head[i] for i in fits], [[row[i] for i in fits] for row in body]))
    rest = [_said("more_heads", count=len(found.heads) - SHOWN)] if len(found.heads) > SHOWN else []
    hidden = [name for i, name in enumerate(head) if i not in fits]
    rest += [in_language(joined(hidden, LIST), lang)] if hidden else []
    if rest:
        console.print(
            Text(
                _said("also", rest=_said("both", one=rest[0], other=rest[1]) if len(rest) == 2 else rest[0]),
                style="dim",
            )
        )
    _print_troubles(found, console)


def _said(code: str, /, **values: int | str) -> str:
    """One of WORDS in the user's language."""
    return in_language(WORDS[code].filled(code, **values), language())


def _aligned(head: list[str], body: list[list[str]], words: int = 0) -> str:
    """Columns as `as_text` aligns them, by the width of their characters in a terminal."""
    lines = as_text([_filled(cell) for cell in head], body, words=words, gap="  ")
    return lines.replace(_WIDE, "")


def _filled(text: str) -> str:
    """A text with a sign for each second cell of wide characters, which makes its length its width."""
    return text + _WIDE * (cell_len(text) - len(text))


def _fitting(head: list[str], body: list[list[str]], width: int, sort: str | None) -> list[int]:
    """The columns that fit: layer, head, the measure that is sorted by, then the others in their order."""
    widths = [max(map(cell_len, column)) + 2 for column in zip(head, *body, strict=True)]
    order = sorted(range(2, len(head)), key=lambda i: head[i] != sort)
    taken, room = [0, 1], width + 2 - widths[0] - widths[1]
    for i in order:
        room -= widths[i]
        if room < 0:
            break
        taken.append(i)
    return sorted(taken)


def _print_table(console: Console, text: str) -> None:
    first, _, rest = text.partition("\n")
    console.print(Text(first, style="bold"), soft_wrap=True)
    console.print(Text(rest), soft_wrap=True)


def _print_troubles(found: CorpusMeasures, console: Console) -> None:
    rows, windows = (int(count) for count in found.total.lost.max(1).values)
    if not found.total.troubles:
        return
    console.print()
    told = _said("nonfinite", rows=rows, windows=windows) if rows else _said("nonfinite_values")
    console.print(Text(told, style="bold red"))
    for trouble in found.total.troubles:
        console.print(Text(f"  {trouble}"), soft_wrap=True)
