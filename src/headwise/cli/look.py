"""The commands see, trace and measures."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headwise.cli.given import AnyModel, check_file, progress
from headwise.errors import ConfigError
from headwise.outputs import check_writable, taken

WIDE = 110  # terminal columns from which on all columns of the list of measures fit side by side
SAMPLE = (
    "话说鲁智深回到丛林选佛场中禅床上扑倒头便睡。上下肩两个禅和子推他起来，说道：“使不得，既要出家，如何不学坐禅？”"
    "智深道：“洒家自睡，干你甚事？”禅和子道：“善哉！”智深裸袖道：“团鱼洒家也吃，甚么‘鳝哉’？”"
    "禅和子道：“却是苦也！”智深便道：“团鱼大腹，又肥甜了，好吃，那得‘苦也’？”"
)


def see(
    text: Annotated[str | None, typer.Argument(help="The text; default: a passage of Water Margin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the text from a UTF-8 file.")] = None,
    model: AnyModel = None,
    out: Annotated[Path, typer.Option("--out", help="HTML report to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option("--png", help="Also write PNG heat maps to this folder.")] = None,
    sort: Annotated[str | None, typer.Option("--sort", help="Sort the table by this statistic.")] = None,
    cells: Annotated[
        int, typer.Option("--cells", min=8, max=1024, help="Longer texts are pooled to this many cells per axis.")
    ] = 384,
    lang: Annotated[str, typer.Option("--lang", help="Language of the report: en or zh.")] = "en",
) -> None:
    """Show what every head attends to in a text, as a table and an HTML report."""
    from headwise.lm.loading import open_subject
    from headwise.lm.text_files import read_text
    from headwise.reports.figure import figure_class
    from headwise.reports.html import write_report
    from headwise.reports.see import see as look
    from headwise.reports.terminal import print_report
    from headwise.reports.words import LANGUAGES

    if lang not in LANGUAGES:
        raise ConfigError(f"lang={lang!r}: expected {' or '.join(map(repr, LANGUAGES))}")
    if text is not None and file is not None:
        raise ConfigError("give a text or --file, not both")
    check_file("--out", out, "report.html")
    if png is not None:
        figure_class()  # raises where matplotlib is missing
        check_writable(png, "--png", folder=True)
    with taken(out, "--out"):
        if file is not None:
            text = read_text(file)
        text = SAMPLE if text is None else text
        subject = open_subject(model)
        with progress() as step:
            report = look(text, subject, title=_title(text, file), cells=cells, step=step)
        console = Console()
        print_report(report, console, sort=sort)
        write_report(report, out, lang=lang)
        console.print(f"\nWrote the report to [bold]{out}[/bold]; open it in a browser.", highlight=False)
        if png is not None:
            from headwise.reports.png import write_pngs

            with progress() as step:
                pictures = write_pngs(report, png, step=step)
            console.print(f"Wrote {len(pictures)} heat maps to [bold]{png}[/bold].", highlight=False)


def trace(
    seq: Annotated[int, typer.Option("--seq", help="Sequence length.")] = 4,
    d_model: Annotated[int, typer.Option("--d-model", help="Model width.")] = 8,
    num_heads: Annotated[int, typer.Option("--num-heads", help="Query heads.")] = 2,
    num_kv_heads: Annotated[int | None, typer.Option("--num-kv-heads", help="KV heads.")] = None,
    design: Annotated[str, typer.Option("--design", help="An attention design, for example latent.")] = "multi_head",
    options: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the design: --set latent_dim=4.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences.")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Causal or full attention.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    lang: Annotated[str, typer.Option("--lang", help="Language: en or zh.")] = "en",
) -> None:
    """Print every step of an attention design with shapes and numbers."""
    from headwise.nn.named import read_options
    from headwise.textbook.trace import print_trace, trace as follow

    steps = follow(
        seq, d_model, num_heads, design=design, num_kv_heads=num_kv_heads, options=read_options(options or []),
        batch=batch, causal=causal, seed=seed, lang=lang,
    )  # fmt: skip
    print_trace(steps, Console())


def measures() -> None:
    """List all statistics with unit, range and source."""
    from rich.table import Table
    from rich.text import Text

    from headwise.stats import GIVEN, MEASURES

    console = Console()
    wide = console.width >= WIDE
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("name", "unit", "range") if wide else ("name",):
        table.add_column(column, no_wrap=True)
    for column in ("description", "source") if wide else ("description; unit, range; source",):
        table.add_column(column, overflow="fold")
    kinds: dict[str, Any] = {**MEASURES, **GIVEN}
    for name, kind in kinds.items():
        what = Text(" ".join((kind.__doc__ or "").split("\n\n")[0].split()))
        if wide:
            table.add_row(name, kind.unit, kind.range, what, Text(kind.source, style="dim"))
        else:
            table.add_row(name, what.append(f"\n{kind.unit}, {kind.range}; {kind.source}", style="dim"))
    console.print(table)


def _title(text: str, file: Path | None) -> str:
    if file is not None:
        return file.name
    start = " ".join(text.split())
    return start if len(start) <= 24 else start[:24] + "…"
