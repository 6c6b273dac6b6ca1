"""Commands that count, measure and examine: plans, claims, this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwise.cli.given import check_file, progress
from headwise.errors import ConfigError


def plan(
    config: Annotated[str | None, typer.Option("--config", help="A published model; --list shows all.")] = None,
    design: Annotated[str | None, typer.Option("--design", help="A head design; multi_head if left out.")] = None,
    d_model: Annotated[int | None, typer.Option("--d-model")] = None,
    num_heads: Annotated[int | None, typer.Option("--num-heads")] = None,
    num_kv_heads: Annotated[int | None, typer.Option("--num-kv-heads")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim")] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--set", help="Another size of the design: --set latent_dim=512.")
    ] = None,
    seq: Annotated[int, typer.Option("--seq", help="Tokens n.")] = 2048,
    batch: Annotated[int, typer.Option("--batch")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Of a design; models know theirs.")] = True,
    window: Annotated[int | None, typer.Option("--window", help="Keys that a query sees, of a design.")] = None,
    sinks: Annotated[int, typer.Option("--sinks", help="First keys that it sees beside the window.")] = 0,
    materialised: Annotated[bool, typer.Option("--materialised", help="The n×n scores are stored.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and activations.")] = "bfloat16",
    cache: Annotated[str | None, typer.Option("--cache", help="Of keys and values kept; int8, for example.")] = None,
    peak: Annotated[float | None, typer.Option("--peak", help="FLOP/s of a machine, for times.")] = None,
    bandwidth: Annotated[float | None, typer.Option("--bandwidth", help="Its bytes/s.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure both on this machine.")] = False,
    trade_off: Annotated[bool, typer.Option("--trade-off", help="h against d_k at one d_model.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="The trade-off as a PNG.")] = None,
    designs: Annotated[bool, typer.Option("--designs", help="All designs beside one another.")] = False,
    devices: Annotated[int | None, typer.Option("--devices", help="Also: the attention over so many.")] = None,
    link: Annotated[float | None, typer.Option("--link", help="Bytes/s that each of them sends.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="All models and designs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Numbers, not rounded.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown")] = False,
) -> None:
    """What a model or a layer takes: parameters, memory, FLOPs, and the least time on a machine."""
    from headwise.textbook.plan import answer, plot_trade_off, print_plan, to_json, to_markdown

    if json and markdown:
        raise ConfigError("give --json or --markdown, not both")
    if plot is not None and not trade_off:
        raise ConfigError("--plot draws the trade-off: give --trade-off too")
    check_file("--plot", plot, "heads.png")
    named = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    found = answer(
        config=config, design=design, sizes=named, more=sizes or [], seq=seq, batch=batch, causal=causal, window=window,
        sinks=sinks, materialised=materialised, dtype=dtype, cache=cache, peak=peak, bandwidth=bandwidth,
        measure=measure, trade_off=trade_off, designs=designs, listing=listing, devices=devices, link=link,
    )  # fmt: skip
    if plot is not None:
        plot_trade_off(found, plot)
    if json or markdown:
        sys.stdout.write(to_json(found) if json else to_markdown(found))
        return
    console = Console()
    print_plan(found, console)
    if plot is not None:
        console.print(f"\n[bold]{plot}[/bold] shows the same as lines.", highlight=False)


def claims(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="These claims: --only ID, again for more, or ID,ID.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Those that take longer too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Numbers, not rounded.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/claims.md has it.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with plots here, of all claims or of --only.")
    ] = None,
) -> None:
    """Measure what the texts claim; 1 is the exit code if a verdict is not the expected one."""
    if as_json and markdown:
        raise ConfigError("give --json or --markdown, not both")
    if only and every:
        raise ConfigError("give --only or --all, not both")
    check_file("--html", html, "claims.html")
    from headwise.textbook.claims import choose, print_findings, run, to_json, to_markdown, write_page

    wanted = choose([name for part in only or [] for name in part.split(",") if name], slow=every or html is not None)
    with progress() as step:
        found = run(wanted, step)
    if as_json or markdown:
        sys.stdout.write(to_json(found) if as_json else to_markdown(found))
    else:
        print_findings(found, Console(), skipped=0 if only else len(choose(slow=True)) - len(found))
    if html is not None:
        write_page(found, html)
        if not (as_json or markdown):
            Console().print(f"\n[bold]{html}[/bold] shows the same with plots; open it in a browser.", highlight=False)
    if not all(finding.agrees for finding in found):
        raise typer.Exit(1)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for a bug report.")] = False,
) -> None:
    """What runs on this machine: kernels and which is picked when, the compiled library, versions."""
    import json
    from dataclasses import asdict

    from headwise.doctor import examine, print_examination

    if as_json:
        sys.stdout.write(json.dumps(asdict(examine()), indent=2) + "\n")
    else:
        print_examination(examine(), Console())
