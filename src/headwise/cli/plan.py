"""The command plan: a model, a layer, numbers of heads, designs, and the list of both."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from typer.core import TyperGroup

from headwise.cli.options import Lang, check_file, say
from headwise.errors import ConfigError
from headwise.wording import language, tr

if TYPE_CHECKING:
    from headwise.costs import Machine, Work
    from headwise.plan import Plan

# Options that chose what to plan, before each kind of plan was a command, and the command that they name now; and the
# options whose value is its argument.
KINDS = {"--list": "list", "--designs": "designs", "--trade-off": "trade-off", "--config": "model", "--design": "layer"}
ARGUMENTS = {"model": ("--config",), "layer": ("--design",), "trade-off": ("--config", "--d-model")}


def line_of_today(arguments: Sequence[str]) -> str | None:
    """The command line with the command that its options chose; None if they chose none.

    >>> line_of_today(["--config=llama-3-8b", "--seq", "4096"])
    'headwise plan model llama-3-8b --seq 4096'
    """
    given = [argument.partition("=")[0] for argument in arguments]
    kind = next((kind for option, kind in KINDS.items() if option in given), "layer" if "--d-model" in given else None)
    if kind is None:
        return None
    first: list[str] = []
    rest: list[str] = []
    left = iter(arguments)
    for argument in left:
        name, sign, value = argument.partition("=")
        if name in ARGUMENTS.get(kind, ()):
            first.append(value if sign else next(left, "…"))
        elif KINDS.get(name) != kind:
            rest.append(argument)
    return shlex.join(["headwise", "plan", kind, *first, *rest])


class _Plans(TyperGroup):
    """Without arguments, the help; options that were a kind of plan are an error with the command of today."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not set(args) & set(self.commands) and (line := line_of_today(args)):
            raise ConfigError("each kind of plan is a command: give `{line}`", line=line)
        return super().parse_args(ctx, args or ["--help"])


def _one_form(context: typer.Context, wanted: bool) -> bool:
    if wanted and (context.params.get("json") or context.params.get("markdown")):
        raise ConfigError(tr("give --json or --markdown, not both"))
    return wanted


DModel = Annotated[int, typer.Option(help="Model width.")]
KVHeads = Annotated[int | None, typer.Option(help="KV heads.")]
Seq = Annotated[int, typer.Option(min=1, help="Sequence length.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences.")]
Causal = Annotated[bool, typer.Option("--causal/--full", help="Causal or full attention.")]
Window = Annotated[int | None, typer.Option(help="Sliding window of a design, in keys.")]
Sinks = Annotated[int, typer.Option(help="First keys that are visible beside the window.")]
Materialised = Annotated[bool, typer.Option("--materialised", help="Assume that the n×n scores are stored.")]
Dtype = Annotated[str, typer.Option(help="Dtype of weights and activations.")]
Cache = Annotated[str | None, typer.Option(help="Dtype of the KV cache, for example int8; default: --dtype.")]
Peak = Annotated[float | None, typer.Option(help="Peak FLOP/s of a machine, to compute times.")]
Bandwidth = Annotated[float | None, typer.Option(help="Memory bandwidth of the machine, in bytes/s.")]
Measure = Annotated[bool, typer.Option("--measure", help="Measure peak and bandwidth of this machine.")]
Devices = Annotated[int | None, typer.Option(help="Also plan the attention over this many devices.")]
Link = Annotated[float | None, typer.Option(help="Bandwidth of each device's link, in bytes/s.")]
Json = Annotated[bool, typer.Option("--json", callback=_one_form, help="Print JSON with unrounded numbers.")]
Markdown = Annotated[bool, typer.Option("--markdown", callback=_one_form, help="Print Markdown tables.")]

plan = typer.Typer(
    cls=_Plans, name="plan", help="Compute parameters, memory, FLOPs and minimum time of a model or a layer."
)


@plan.callback()
def _top(lang: Lang = None) -> None:
    """Nothing, but for the option."""


@plan.command()
def model(
    name: Annotated[
        str,
        typer.Argument(help="A published model (`headwise plan list`), a folder with config.json, or a checkpoint."),
    ],
    seq: Seq = 2048,
    source: Annotated[
        int | None, typer.Option(min=1, help="Length of the source of an encoder-decoder; default: --seq.")
    ] = None,
    batch: Batch = 1,
    materialised: Materialised = False,
    dtype: Dtype = "bfloat16",
    cache: Cache = None,
    weights: Annotated[
        str | None, typer.Option(help="How weights are stored: mxfp4, int8 or int4; default: --dtype.")
    ] = None,
    peak: Peak = None,
    bandwidth: Bandwidth = None,
    measure: Measure = False,
    devices: Devices = None,
    link: Link = None,
    json: Json = False,
    markdown: Markdown = False,
    lang: Lang = None,
) -> None:
    """Compute parameters, memory, FLOPs and minimum time of a model."""
    from headwise.costs.model import Load
    from headwise.plan import plan_model, read_config

    load = Load(batch, seq, materialised=materialised, dtype=dtype, cache=cache, source=source, weights=weights)
    machine = _machine(peak, bandwidth, measure, dtype)
    found = plan_model(read_config(name), load, machine=machine, devices=devices, link=link)
    _print(found, json=json, markdown=markdown)


@plan.command()
def layer(
    d_model: DModel,
    design: Annotated[str | None, typer.Argument(help="An attention design; default: multi_head.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    num_kv_heads: KVHeads = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="Another option of the design: --set latent_dim=512; repeatable.")
    ] = None,
    seq: Seq = 2048,
    batch: Batch = 1,
    causal: Causal = True,
    window: Window = None,
    sinks: Sinks = 0,
    materialised: Materialised = False,
    dtype: Dtype = "bfloat16",
    cache: Cache = None,
    peak: Peak = None,
    bandwidth: Bandwidth = None,
    measure: Measure = False,
    devices: Devices = None,
    link: Link = None,
    json: Json = False,
    markdown: Markdown = False,
    lang: Lang = None,
) -> None:
    """Compute parameters, memory, FLOPs and minimum time of one layer of a design."""
    from headwise.nn.registry import STANDARD, sizes_of
    from headwise.plan import plan_design

    design = design or STANDARD
    given = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes: dict[str, Any] = {name: size for name, size in given.items() if size is not None}
    if "num_heads" not in sizes_of(design) and sizes.pop("num_heads", 1) != 1:
        raise ConfigError("{design} has one head; leave out --num-heads", design=design)
    sizes |= typed(design, options or [])
    work = _work(seq, batch, causal, window, sinks, materialised=materialised, dtype=dtype, cache=cache)
    machine = _machine(peak, bandwidth, measure, dtype)
    found = plan_design(design, sizes, work, machine=machine, devices=devices, link=link)
    _print(found, json=json, markdown=markdown)


@plan.command()
def trade_off(
    width: Annotated[str, typer.Argument(help="Model width, or a model that has it: 768, or gpt-2-small.")],
    plot: Annotated[Path | None, typer.Option(help="Write the trade-off as a PNG.")] = None,
    seq: Seq = 2048,
    batch: Batch = 1,
    causal: Causal = True,
    window: Window = None,
    sinks: Sinks = 0,
    dtype: Dtype = "bfloat16",
    cache: Cache = None,
    json: Json = False,
    markdown: Markdown = False,
    lang: Lang = None,
) -> None:
    """Compare numbers of heads at a fixed d_model."""
    check_file("--plot", plot, "heads.png")
    from headwise.plan import plot_trade_off, read_config, trade_off as vary_heads

    d_model = int(width) if width.isdecimal() else read_config(width).d_model
    found = vary_heads(d_model, _work(seq, batch, causal, window, sinks, dtype=dtype, cache=cache))
    if plot is not None:
        plot_trade_off(found, plot)
    _print(found, json=json, markdown=markdown)
    if plot is not None and not (json or markdown):
        say(Console(), tr("\nWrote the plot to [bold]{path}[/bold].", path=plot))


@plan.command()
def designs(
    d_model: DModel,
    num_heads: Annotated[int, typer.Option(help="Query heads.")],
    num_kv_heads: KVHeads = None,
    seq: Seq = 2048,
    batch: Batch = 1,
    causal: Causal = True,
    window: Window = None,
    sinks: Sinks = 0,
    json: Json = False,
    markdown: Markdown = False,
    lang: Lang = None,
) -> None:
    """Compare all designs at one width."""
    from headwise.plan import compare_designs

    work = _work(seq, batch, causal, window, sinks)
    _print(compare_designs(d_model, num_heads, work, num_kv_heads=num_kv_heads), json=json, markdown=markdown)


@plan.command("list")
def listing(json: Json = False, markdown: Markdown = False, lang: Lang = None) -> None:
    """List all models and designs."""
    from headwise.plan import listing as everything

    _print(everything(), json=json, markdown=markdown)


def _print(found: "Plan", *, json: bool, markdown: bool) -> None:
    from headwise.plan import print_plan, to_json, to_markdown

    if json or markdown:
        sys.stdout.write(to_json(found) if json else to_markdown(found, language()))
    else:
        print_plan(found, Console())


def _work(seq: int, batch: int, causal: bool, window: int | None, sinks: int, **stored: Any) -> "Work":
    from headwise.costs import Work

    if window is not None and not causal:
        raise ConfigError(tr("--window requires causal attention; leave out --full"))
    return Work(batch, seq, seq, causal=causal, window=window, sinks=sinks, **stored)


def _machine(peak: float | None, bandwidth: float | None, measure: bool, dtype: str) -> "Machine | None":
    from headwise.costs import Machine
    from headwise.plan import measured_machine

    if measure:
        if peak is not None or bandwidth is not None:
            raise ConfigError(tr("--measure excludes --peak and --bandwidth"))
        return measured_machine(dtype)
    if peak is None and bandwidth is None:
        return None
    if peak is None or bandwidth is None:
        raise ConfigError(tr("--peak and --bandwidth must be given together"))
    return Machine(peak, bandwidth)


def typed(design: str, assigned: Sequence[str]) -> Mapping[str, Any]:
    """Options written as NAME=VALUE, with the types of the design's sizes; unknown names are left to the design."""
    from headwise.nn.registry import kinds_of, read_options

    known, found = kinds_of(design), read_options(assigned)
    for name, value in found.items():
        kinds = get_args(known.get(name)) or (known.get(name, type(value)),)
        if bool in kinds and value in (0, 1):
            found[name] = bool(value)
        elif type(value) not in kinds and not (float in kinds and type(value) is int):
            what = tr("true or false") if bool in kinds else tr("a whole number")
            option = f"--set '{name}={value}'"
            raise ConfigError("{option}: expected {what} for {name}", option=option, what=what, name=name)
    return found
