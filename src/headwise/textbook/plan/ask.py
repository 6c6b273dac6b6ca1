"""From what was asked on a command line to the plan that answers it: which one, of what, and are the options for it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, get_args

from headwise.costs import Counts, Machine, Work
from headwise.costs.configs import ModelConfig, find
from headwise.costs.model import Load
from headwise.errors import ConfigError
from headwise.nn.counts import attention_of, counts_of, kinds_of, sizes_of
from headwise.nn.named import design_of, names
from headwise.nn.registry import STANDARD
from headwise.seeds import seeded
from headwise.textbook.plan.build import listing as list_all, plan_design, plan_model
from headwise.textbook.plan.compare import compare_designs
from headwise.textbook.plan.spread import spread_table
from headwise.textbook.plan.tables import Plan
from headwise.textbook.plan.trade_off import trade_off as weigh


def answer(
    *,
    config: str | None = None,
    design: str | None = None,
    sizes: Mapping[str, int | None],
    more: Sequence[str] = (),
    seq: int = 2048,
    batch: int = 1,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    materialised: bool = False,
    dtype: str = "bfloat16",
    cache: str | None = None,
    peak: float | None = None,
    bandwidth: float | None = None,
    measure: bool = False,
    trade_off: bool = False,
    designs: bool = False,
    listing: bool = False,
    devices: int | None = None,
    link: float | None = None,
) -> Plan:
    """The plan of a published model, of a layer, of h against d_k, of all designs beside one another, or the list of
    what there is, from the command's options.

    sizes: of the design, None where not given. more: others, as "name=value". devices: also the ways to spread the
        attention over so many; link: bytes/s that each of them sends.
    Raises ConfigError for options that exclude one another or that the plan would not heed.
    """
    if listing:
        _refuse_with_list(
            sizes, config=config, design=design, set=more, trade_off=trade_off, designs=designs, devices=devices
        )  # fmt: skip
        return list_all()
    for name, size in (("seq", seq), ("batch", batch)):
        if size < 1:
            raise ConfigError(f"{name}={size}: expected at least 1")
    given = {name: value for name, value in sizes.items() if value is not None} | _assigned(
        more, kinds_of(design or STANDARD)
    )
    model = None if config is None else find(config)
    if model is not None:
        _refuse_with_config(given, design=design, full=not causal, window=window, sinks=sinks)
    if window is not None and not causal:
        raise ConfigError("--window requires causal attention; leave out --full")
    if sinks and window is None:
        raise ConfigError("--sinks requires --window")
    work = Work(
        batch, seq, seq, causal=causal, window=window, sinks=sinks, materialised=materialised, dtype=dtype, cache=cache
    )
    if link is not None and devices is None:
        raise ConfigError("--link requires --devices")
    if devices is not None and (designs or trade_off):
        raise ConfigError("--devices is for one model or layer; leave out --designs and --trade-off, or --devices")
    if designs:
        _refuse_with_designs(
            config=config, design=design, trade_off=trade_off, cache=cache, peak=peak, bandwidth=bandwidth,
            measure=measure,
        )  # fmt: skip
        return _compare(given, work)
    if trade_off:
        return weigh(_width(model, given, design), work)
    machine = _machine(peak, bandwidth, measure, dtype)
    if model is not None:
        load = Load(batch, seq, materialised=materialised, dtype=dtype, cache=cache)
        whole = plan_model(model, load, machine=machine)
        if devices is None:
            return whole
        if model.decoder_layers:
            raise ConfigError(f"--devices: {model.name} has cross attention, which is not supported; plan a layer")
        own = load.work(seq, seq, causal=model.causal, window=model.window)
        return _spread(whole, model.design, attention_of(model), own, devices, model.layers, link, machine)
    if design is None and not given:
        raise ConfigError("give --config NAME (headwise plan --list shows them), or --d-model and --num-heads")
    design = design or STANDARD
    taken = sizes_of(design)
    if "num_heads" not in taken and given.pop("num_heads", 1) != 1:
        raise ConfigError(f"{design} has one head; leave out --num-heads")
    for name in set(given) - set(taken):
        close = get_close_matches(name, taken, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"{name}={given[name]}: {hint}{design} supports {', '.join(taken)}")
    if causal and not counts_of(design, given).masked:
        raise ConfigError(f"{design} does not support masks: add --full")
    layer = plan_design(design, given, work, machine=machine)
    return (
        layer if devices is None else _spread(layer, design, counts_of(design, given), work, devices, 1, link, machine)
    )


def _spread(
    plan: Plan, design: str, counts: Counts, work: Work, devices: int, layers: int, link: float | None,
    machine: Machine | None,
) -> Plan:  # fmt: skip
    """The plan with the ways over many devices."""
    if reason := _together(design):
        known = [name for name in names() if not _together(name)]
        raise ConfigError(
            f"--devices: the heads of {design} cannot be computed separately ({reason}); supported designs: "
            f"{', '.join(known)}"
        )
    for name, value in (("devices", devices), ("link", link)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value}: expected more than 0")
    table = spread_table(counts, work, devices, layers=layers, link=link, machine=machine)
    return replace(plan, tables=(*plan.tables, table))


def _together(design: str) -> str:
    """Why a design's heads are not spread over devices, as `parallelize_heads` finds it; "" if they are."""
    from headwise.parallel.heads import head_parallel_plan  # it loads torch.distributed

    with seeded(0):
        layer = design_of(design).build(4, 2)
    try:
        head_parallel_plan(layer)
    except ConfigError as error:
        return str(error)
    return ""


def _refuse_with_list(sizes: Mapping[str, int | None], **others: object) -> None:
    named = [name for name, value in {**sizes, **others}.items() if value]
    if named:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        raise ConfigError(f"--list shows every configuration and every design; leave out {options}, or --list")


def _refuse_with_config(given: Mapping[str, Any], *, design: str | None, **others: object) -> None:
    if design is not None:
        raise ConfigError("give --config or --design, not both")
    named = [*given, *(name for name, value in others.items() if value)]
    if named:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        raise ConfigError(f"--config has its own sizes; leave out {options}, or plan a layer with --design")


def _width(model: ModelConfig | None, given: Mapping[str, Any], design: str | None) -> int:
    if design not in (None, STANDARD) or set(given) - {"d_model"}:
        raise ConfigError("--trade-off requires --d-model or --config, and varies the number of heads itself")
    if model is None and "d_model" not in given:
        raise ConfigError("--trade-off requires --d-model or --config")
    return given["d_model"] if model is None else model.d_model


def _refuse_with_designs(**others: object) -> None:
    named = [name for name, value in others.items() if value not in (None, False)]
    if named:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        raise ConfigError(f"--designs compares all designs, without bytes and times; leave out {options}")


def _compare(given: Mapping[str, Any], work: Work) -> Plan:
    if set(given) - {"d_model", "num_heads", "num_kv_heads"} or not {"d_model", "num_heads"} <= set(given):
        raise ConfigError("--designs supports --d-model, --num-heads and --num-kv-heads (for gqa) only")
    return compare_designs(given["d_model"], given["num_heads"], work, num_kv_heads=given.get("num_kv_heads"))


def _machine(peak: float | None, bandwidth: float | None, measure: bool, dtype: str) -> Machine | None:
    if measure:
        if peak is not None or bandwidth is not None:
            raise ConfigError("--measure excludes --peak and --bandwidth")
        from headwise.textbook.plan.machine import measured_machine

        return measured_machine(dtype)
    if peak is None and bandwidth is None:
        return None
    if peak is None or bandwidth is None:
        raise ConfigError("--peak and --bandwidth must be given together")
    return Machine(peak, bandwidth)


def _assigned(texts: Sequence[str], kinds: Mapping[str, Any]) -> dict[str, int | str | bool]:
    """Sizes written as NAME=VALUE, of the types that the design's costs have for them; a size that it does not take is
    left to the check of the sizes."""
    found: dict[str, int | str | bool] = {}
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not name or not value:
            raise ConfigError(f"--set {text!r}: expected NAME=VALUE, for example latent_dim=512")
        name = name.replace("-", "_")
        found[name] = _value(text, name, value, kinds.get(name, int | str))
    return found


def _value(text: str, name: str, value: str, kind: Any) -> int | str | bool:
    kinds = get_args(kind) or (kind,)
    if bool in kinds and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    if str in kinds and not value.isdigit():
        return value
    if bool in kinds:
        raise ConfigError(f"--set {text!r}: expected true or false for {name}")
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--set {text!r}: expected a whole number for {name}") from None
