"""From the options of `headwise plan` to a plan: which kind of plan, of what, and whether the options fit it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from headwise.base.files import folder_of
from headwise.base.run import seeded
from headwise.costs import Machine, Work
from headwise.costs.configs import ModelConfig, find
from headwise.costs.model import Load, attentions_over_all, decodes
from headwise.errors import ConfigError, unknown_option
from headwise.nn.registry import STANDARD, attentions_of, counts_of, design_of, kinds_of, names, sizes_of
from headwise.textbook.plan.build import listing as list_all, plan_design, plan_model
from headwise.textbook.plan.compare import compare_designs
from headwise.textbook.plan.spread import Layers, spread_table
from headwise.textbook.plan.tables import Plan
from headwise.textbook.plan.trade_off import trade_off as vary_heads


def plan_from_options(
    *,
    config: str | None = None,
    design: str | None = None,
    sizes: Mapping[str, int | None],
    more: Sequence[str] = (),
    seq: int = 2048,
    source: int | None = None,
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
    """Return the plan for the options of the command, which are described by `headwise plan --help`.

    Args:
        sizes: of the design, None where an option was not given. more: other options of the design, as "name=value".
        source: tokens of the encoder's input in an encoder-decoder; seq by default.
    Raises:
        ConfigError: naming options that exclude each other or would have no effect.
    """
    if listing:
        others = {**sizes, "config": config, "design": design, "set": more, "trade_off": trade_off, "designs": designs}
        _refuse(
            {**others, "devices": devices},
            "--list shows every configuration and every design; leave out {}, or --list",
            "--list 列出全部配置与设计；请去掉 {}，或去掉 --list",
        )
        return list_all()
    for name, size in (("seq", seq), ("source", source), ("batch", batch)):
        if size is not None and size < 1:
            raise ConfigError(f"{name}={size}: expected at least 1", f"{name}={size}：应不小于 1")
    chosen = {name: value for name, value in sizes.items() if value is not None}
    chosen |= _assigned(more, kinds_of(design or STANDARD))
    model = None if config is None else _model(config)
    if source is not None and (model is None or trade_off or designs):
        raise ConfigError(
            "--source is for the plan of an encoder-decoder; give --config, or leave it out",
            "--source 只用于规划编码器-解码器模型；请给出 --config，或去掉它",
        )
    if model is not None:
        if design is not None:
            raise ConfigError("give --config or --design, not both", "--config 与 --design 只能给出其一")
        _refuse(
            {**dict.fromkeys(chosen, True), "full": not causal, "window": window, "sinks": sinks},
            "--config has its own sizes; leave out {}, or plan a layer with --design",
            "--config 有自己的大小；请去掉 {}，或用 --design 规划一层",
        )
    if window is not None and not causal:
        raise ConfigError(
            "--window requires causal attention; leave out --full", "--window 需要因果注意力；请去掉 --full"
        )
    if sinks and window is None:
        raise ConfigError("--sinks requires --window", "--sinks 需要 --window")
    work = Work(
        batch, seq, seq, causal=causal, window=window, sinks=sinks, materialised=materialised, dtype=dtype, cache=cache
    )
    if link is not None and devices is None:
        raise ConfigError("--link requires --devices", "--link 需要 --devices")
    if devices is not None and (designs or trade_off):
        raise ConfigError(
            "--devices is for one model or layer; leave out --designs and --trade-off, or --devices",
            "--devices 只用于一个模型或一层；请去掉 --designs 与 --trade-off，或去掉 --devices",
        )
    if designs:
        _refuse(
            {
                "config": config, "design": design, "trade_off": trade_off, "cache": cache,
                "peak": peak is not None, "bandwidth": bandwidth is not None, "measure": measure,
            },
            "--designs compares all designs, without bytes and times; leave out {}",
            "--designs 比较全部设计，不含字节数与时间；请去掉 {}",
        )  # fmt: skip
        if set(chosen) - {"d_model", "num_heads", "num_kv_heads"} or not {"d_model", "num_heads"} <= set(chosen):
            raise ConfigError(
                "--designs supports --d-model, --num-heads and --num-kv-heads (for gqa) only",
                "--designs 只支持 --d-model、--num-heads 与 --num-kv-heads（用于 gqa）",
            )
        return compare_designs(chosen["d_model"], chosen["num_heads"], work, num_kv_heads=chosen.get("num_kv_heads"))
    if trade_off:
        given = [name for name, value in sizes.items() if value is not None]
        return vary_heads(_width(model, chosen, given, design), work)
    machine = _machine(peak, bandwidth, measure, dtype)
    if model is not None:
        if cache is not None and not decodes(model):
            raise ConfigError(
                f"--cache: {model.name} is an encoder, which has no cache; leave it out",
                f"--cache：{model.name} 是编码器，没有缓存；请去掉",
            )
        load = Load(batch, seq, materialised=materialised, dtype=dtype, cache=cache, source=source)
        whole = plan_model(model, load, machine=machine)
        if devices is None:
            return whole
        layers = attentions_over_all(model, attentions_of(model), load)
        return _spread(whole, model.design, layers, devices, link, machine)
    if design is None and not chosen:
        raise ConfigError(
            "give --config NAME (headwise plan --list shows them), or --d-model and --num-heads",
            "请给出 --config 名称（headwise plan --list 列出全部），或 --d-model 与 --num-heads",
        )
    design = design or STANDARD
    known = sizes_of(design)
    if "num_heads" not in known and chosen.pop("num_heads", 1) != 1:
        raise ConfigError(f"{design} has one head; leave out --num-heads", f"{design} 只有一个头；请去掉 --num-heads")
    for name in set(chosen) - set(known):
        raise unknown_option(name, chosen[name], design, known)
    counts = counts_of(design, chosen)
    if causal and not counts.masked:
        raise ConfigError(f"{design} does not support masks: add --full", f"{design} 不支持掩码：请加 --full")
    layer = plan_design(design, chosen, work, machine=machine)
    return layer if devices is None else _spread(layer, design, {(counts, work): 1}, devices, link, machine)


def _model(config: str) -> ModelConfig:
    """A published configuration by name, or that of a folder or a checkpoint."""
    path = Path(config)
    if not path.exists():
        return find(config)
    path = folder_of(path)
    if path.is_file() or ((path / "model.safetensors").is_file() and not (path / "config.json").exists()):
        from headwise.textbook.plan.checkpoint import config_of_checkpoint  # imports much of headwise.lm

        return config_of_checkpoint(path)
    from headwise.textbook.plan.folder import config_of  # as well

    return config_of(path)


def _spread(plan: Plan, design: str, layers: Layers, devices: int, link: float | None, machine: Machine | None) -> Plan:
    """The plan with a table of the ways to partition the attention over devices."""
    if reason := _inseparable(design):
        known = [name for name in names() if not _inseparable(name)]
        raise ConfigError(
            f"--devices: the heads of {design} cannot be computed separately ({reason}); supported designs: "
            f"{', '.join(known)}"
        )
    for name, value in (("devices", devices), ("link", link)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value}: expected more than 0", f"{name}={value}：应大于 0")
    table = spread_table(layers, devices, link=link, machine=machine)
    return replace(plan, tables=(*plan.tables, table))


def _inseparable(design: str) -> str:
    """Why `parallelize_heads` does not support a design; "" if it does."""
    from headwise.parallel.heads import head_parallel_plan  # imports torch.distributed

    with seeded(0):
        layer = design_of(design).build(4, 2)
    try:
        head_parallel_plan(layer)
    except ConfigError as error:
        return str(error)
    return ""


def _refuse(options: Mapping[str, object], message: str, zh: str) -> None:
    """Raise if any of these options is set; `message`, in Chinese `zh`, gets their names in place of {}."""
    if chosen := [f"--{name.replace('_', '-')}" for name, value in options.items() if value]:
        raise ConfigError(message.format(", ".join(chosen)), zh.format("、".join(chosen)))


def _width(model: ModelConfig | None, chosen: Mapping[str, Any], given: Collection[str], design: str | None) -> int:
    """d_model for --trade-off. given: the sizes that have an option of their own."""
    if model is None and "d_model" not in chosen:
        raise ConfigError("--trade-off requires --d-model or --config", "--trade-off 需要 --d-model 或 --config")
    others = dict.fromkeys(set(given) - {"d_model"}, True)
    _refuse(
        {"design": design not in (None, STANDARD), **dict(sorted(others.items())), "set": set(chosen) - set(given)},
        f"--trade-off varies the number of heads of {STANDARD} itself; leave out {{}}",
        f"--trade-off 自行改变 {STANDARD} 的头数；请去掉 {{}}",
    )
    return chosen["d_model"] if model is None else model.d_model


def _machine(peak: float | None, bandwidth: float | None, measure: bool, dtype: str) -> Machine | None:
    if measure:
        if peak is not None or bandwidth is not None:
            raise ConfigError("--measure excludes --peak and --bandwidth", "--measure 不能与 --peak、--bandwidth 同用")
        from headwise.textbook.plan.machine import measured_machine

        return measured_machine(dtype)
    if peak is None and bandwidth is None:
        return None
    if peak is None or bandwidth is None:
        raise ConfigError("--peak and --bandwidth must be given together", "--peak 与 --bandwidth 必须同时给出")
    return Machine(peak, bandwidth)


def _assigned(texts: Sequence[str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Parse NAME=VALUE, with the types of the design's sizes; unknown names are checked with the other sizes."""
    found: dict[str, Any] = {}
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not name or not value:
            raise ConfigError(
                f"--set {text!r}: expected NAME=VALUE, for example latent_dim=512",
                f"--set {text!r}：应为 名称=值，例如 latent_dim=512",
            )
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
        raise ConfigError(
            f"--set {text!r}: expected true or false for {name}", f"--set {text!r}：{name} 应为 true 或 false"
        )
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"--set {text!r}: expected a whole number for {name}", f"--set {text!r}：{name} 应为整数"
        ) from None
