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
HEADINGS = {
    "measure": tr("measure"),
    "unit": tr("unit"),
    "mean of heads": tr("mean of heads"),
    "least": tr("least"),
    "largest": tr("largest"),
    "head": tr("head"),
    "layer": tr("layer"),
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
    took = "" if seconds is None else tr(", in {time}", time=duration(seconds))
    model = about["model"] | about["model"].get("zh", {}) if lang == "zh" else about["model"]
    files, tokens, windows = (
        counted(what, count)
        for what, count in (("file", len(about["files"])), ("token", total.tokens), ("window", total.windows))
    )
    heads, measures = len(found.heads), len(found.measures)
    facts = [
        (tr("model"), tr("{name}: {about}", name=model["name"], about=model["about"])),
        (tr("corpus"), tr("{files}, {tokens} in {windows}{took}", files=files, tokens=tokens, windows=windows,
                          took=took)),
        (tr("kernel"), ", ".join(about["kernels"])),
        (tr("table"), tr("{path}: {heads:,} heads × {measures} measures", path=str(found.path), heads=heads,
                         measures=measures)),
    ]  # fmt: skip
    shown = [(in_language(name, lang), in_language(value, lang)) for name, value in facts]
    margin = max(6, *(cell_len(name) for name, _ in shown))
    for name, value in shown:
        console.print(Text(f"{' ' * (margin - cell_len(name))}{name}  ", style="dim") + Text(value), soft_wrap=True)
    console.print()
    header, rows = found.overview()
    rows = [[name, in_language(unit_of(unit), lang), *cells] for name, unit, *cells in rows]
    _print_table(console, _aligned([in_language(HEADINGS[name], lang) for name in header], rows, words=2))
    console.print()
    table = found.table if sort is None else found.table.sort(sort)
    head = [*(in_language(HEADINGS[name], lang) for name in ("layer", "head")), *table]
    cells = zip(*(numbers(column)[:SHOWN] for column in table.values()), strict=True)
    body = [[str(layer), str(at), *row] for (layer, at), row in zip(table.places[:SHOWN], cells, strict=True)]
    fits = _fitting(head, body, console.width, sort)
    _print_table(console, _aligned([head[i] for i in fits], [[row[i] for i in fits] for row in body]))
    rest = [tr("{count:,} more heads", count=heads - SHOWN)] if heads > SHOWN else []
    hidden = [name for i, name in enumerate(head) if i not in fits]
    rest += [joined(hidden, LIST)] if hidden else []
    if rest:
        both = tr("{one} and {other}", one=rest[0], other=rest[1]) if len(rest) == 2 else rest[0]
        console.print(Text(in_language(tr("The table also contains {rest}.", rest=both), lang), style="dim"))
    if total.troubles:
        console.print()
        lost, without = (int(count) for count in total.lost.max(1).values)
        told = tr("NaN or infinity among the values of a head; its weights are finite, and nothing was left out.")
        if lost:
            told = tr(
                "NaN or infinity: up to {rows:,} queries of a head, in {windows:,} windows that were left out for it.",
                rows=lost,
                windows=without,
            )
        console.print(Text(in_language(told, lang), style="bold red"))
    for trouble in total.troubles:
        console.print(Text(f"  {trouble}"), soft_wrap=True)


def _aligned(head: list[str], body: list[list[str]], words: int = 0) -> str:
    """Columns as `as_text` aligns them, by the width of their characters in a terminal."""
    # A sign for each second cell of wide characters makes the length of a text its width.
    filled = [text + _WIDE * (cell_len(text) - len(text)) for text in head]
    return as_text(filled, body, words=words, gap="  ").replace(_WIDE, "")


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
