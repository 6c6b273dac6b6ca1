"""The commands plan, claims and doctor."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwise.cli.options import Estimate, Lang, check_file, is_stream, progress_bar, say, written
from headwise.errors import ConfigError
from headwise.wording import language


def plan(
    config: Annotated[
        str | None,
        typer.Option(help="A published model (--list shows all), a folder with config.json, or a checkpoint."),
    ] = None,
    design: Annotated[str | None, typer.Option(help="An attention design; default: multi_head.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Model width.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="KV heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.")] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--set", help="Another option of the design: --set latent_dim=512; repeatable.")
    ] = None,
    seq: Annotated[int, typer.Option(help="Sequence length.")] = 2048,
    source: Annotated[
        int | None, typer.Option(help="Length of the source of an encoder-decoder; default: --seq.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Mask of a design; a model has its own.")] = True,
    window: Annotated[int | None, typer.Option(help="Sliding window of a design, in keys.")] = None,
    sinks: Annotated[int, typer.Option(help="First keys that are visible beside the window.")] = 0,
    materialised: Annotated[
        bool, typer.Option("--materialised", help="Assume that the n×n scores are stored.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations.")] = "bfloat16",
    cache: Annotated[
        str | None, typer.Option(help="Dtype of the KV cache, for example int8; default: --dtype.")
    ] = None,
    peak: Annotated[float | None, typer.Option(help="Peak FLOP/s of a machine, to compute times.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Memory bandwidth of the machine, in bytes/s.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure peak and bandwidth of this machine.")] = False,
    trade_off: Annotated[
        bool, typer.Option("--trade-off", help="Compare numbers of heads at a fixed d_model.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the trade-off as a PNG.")] = None,
    designs: Annotated[bool, typer.Option("--designs", help="Compare all designs.")] = False,
    devices: Annotated[int | None, typer.Option(help="Also plan the attention over this many devices.")] = None,
    link: Annotated[float | None, typer.Option(help="Bandwidth of each device's link, in bytes/s.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List all models and designs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with unrounded numbers.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    lang: Lang = None,
) -> None:
    """Compute parameters, memory, FLOPs and minimum time of a model or a layer."""
    from headwise.textbook.plan import plan_from_options, plot_trade_off, print_plan, to_json, to_markdown

    if json and markdown:
        raise ConfigError("give --json or --markdown, not both", "--json 与 --markdown 只能给出其一")
    if plot is not None and not trade_off:
        raise ConfigError("--plot requires --trade-off", "--plot 需要 --trade-off")
    check_file("--plot", plot, "heads.png")
    named = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    found = plan_from_options(
        config=config, design=design, sizes=named, more=sizes or [], seq=seq, source=source, batch=batch, causal=causal,
        window=window, sinks=sinks, materialised=materialised, dtype=dtype, cache=cache, peak=peak, bandwidth=bandwidth,
        measure=measure, trade_off=trade_off, designs=designs, listing=listing, devices=devices, link=link,
    )  # fmt: skip
    if plot is not None:
        plot_trade_off(found, plot)
    if json or markdown:
        sys.stdout.write(to_json(found) if json else to_markdown(found, language()))
        return
    console = Console()
    print_plan(found, console)
    if plot is not None:
        say(console, "wrote_plot", path=plot)


def claims(
    only: Annotated[list[str] | None, typer.Option(help="Test only these claims: --only ID,ID; repeatable.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Include the slow claims.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with unrounded numbers.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, as in docs/claims.md.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write an HTML page with plots to this file; - is standard output.")
    ] = None,
    lang: Lang = None,
) -> None:
    """Test textbook claims by measurement. Exits with code 1 if a verdict is unexpected."""
    if as_json and markdown:
        raise ConfigError("give --json or --markdown, not both", "--json 与 --markdown 只能给出其一")
    if only and every:
        raise ConfigError("give --only or --all, not both", "--only 与 --all 只能给出其一")
    check_file("--html", html, "claims.html", stream=not (as_json or markdown))
    from headwise.table.show import duration
    from headwise.textbook.claims import choose, print_findings, run, to_json, to_markdown, write_page
    from headwise.textbook.claims.claim import expected_seconds

    speech = language()
    wanted = choose([name for part in only or [] for name in part.split(",") if name], slow=every or html is not None)
    if (seconds := expected_seconds(wanted)) >= Estimate.LONG:
        say(Console(stderr=True), "claims_take", count=len(wanted), time=duration(seconds, speech))
    with progress_bar() as progress:
        found = run(wanted, progress)
    if as_json or markdown:
        sys.stdout.write(to_json(found, speech) if as_json else to_markdown(found, speech))
    else:
        console = Console(stderr=is_stream(html))
        print_findings(found, console, skipped=0 if only else len(choose(slow=True)) - len(found), lang=speech)
    if html is not None:
        with written(html) as page:
            write_page(found, page, lang=speech)
        if not (as_json or markdown or is_stream(html)):
            say(Console(), "wrote_claims", path=html)
    if not all(finding.agrees for finding in found):
        raise typer.Exit(1)


def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="Also time each compiled target; a few seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
    lang: Lang = None,
) -> None:
    """Report which kernels run on this machine, the compiled library and versions."""
    import json
    from dataclasses import asdict

    from headwise.cli.doctor import examine, print_examination

    if as_json:
        sys.stdout.write(json.dumps(asdict(examine(measure=measure)), indent=2) + "\n")
    else:
        print_examination(examine(measure=measure), Console())
