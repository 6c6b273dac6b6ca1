"""The plan of a model by its name, folder or checkpoint, the plan of one layer, and the list of models and designs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headwise.base.files import folder_of
from headwise.base.read import bounded, theirs
from headwise.costs import (
    Attentions,
    Counts,
    Machine,
    Stage,
    Work,
    attention_stages,
    backward_flops,
    cache_bytes,
    kept_bytes,
    score_bytes,
)
from headwise.costs.configs import CONFIGS, ModelConfig, Sizes, find
from headwise.costs.model import (
    Load,
    active_parameters,
    attentions_over_all,
    cached_numbers,
    decodes,
    largest_score_bytes,
    model_cache_bytes,
    model_kept_bytes,
    parameter_parts,
    pass_stages,
    source_tokens,
    states_bytes,
    step_stages,
    training_flops,
)
from headwise.costs.work import BYTES
from headwise.errors import ConfigError
from headwise.nn.registry import attentions_of, counts_of, names, sizes_of, summary_of
from headwise.plan.compare import spread
from headwise.plan.tables import Column, Plan, Table, Value, masked, named, term, written
from headwise.wording import BLANK, Bilingual, joined, scaled, tr

if TYPE_CHECKING:
    from headwise.models import HeadSite

NOTES = (term("plan_note"),)
CHOSEN = (*NOTES, term("chosen_note"))
_Input = TypeVar("_Input", Work, Load)
_BYTES = (Column(term("what")), Column(term("bytes"), "bytes"))


def plan_model(
    config: ModelConfig, load: Load, *, machine: Machine | None = None, devices: int | None = None,
    link: float | None = None,
) -> Plan:  # fmt: skip
    """Return parameters, memory, one pass over the whole text and one decoding step of a model.

    Args:
        load: sequences and tokens, and how numbers are stored.
        machine: adds minimum times and what limits each step.
        devices: adds the ways to partition the attention over this many; link: and what each of them can send, in
            bytes/s.
    """
    if load.cache is not None and not decodes(config):
        raise ConfigError(
            "cache={cache!r}: {name} is an encoder, which has no cache; leave it out",
            cache=load.cache,
            name=config.name,
        )
    attentions = attentions_of(config)
    total = sum(parameter_parts(config, attentions).values())
    n, b, dtype, source = load.tokens, load.batch, load.dtype, source_tokens(config, load)
    both = config.decoder_layers > 0
    tokens = term("tokens_of_both", source=source, target=n) if both else term("tokens", n=n)
    stored = joined([dtype, *([term("cached_as", dtype=load.cache)] if load.cache else [])])
    facts = [
        (term("source"), config.source),
        (term("sizes"), _sizes(config, attentions)),
        (term("input"), term("input_of", batch=b, tokens=tokens, rest=stored)),
        *_machine_facts(machine),
    ]
    warnings = []
    if 0 < config.context < (n if config.source_tokens else max(n, source)):
        warnings.append(term("beyond_context", context=config.context))
    if config.quantized:
        warnings.append(term("quantized", method=config.quantized, dtype=dtype))
    if warnings:
        facts.append((term("warning"), joined(warnings, tr("; "))))
    tables = [_parameters(config, attentions, total), _model_memory(config, attentions, total, load)]
    if config.layer_sizes or config.layer_windows or config.attended:
        tables.insert(1, layers_table(config, attentions))
    title = term("prefill_title" if config.causal else "pass_title", tokens=tokens)
    note = term("training_note", flops=written(training_flops(config, attentions, load), "flops"))
    tables.append(_stage_table("pass", title, pass_stages(config, attentions, load), machine, note))
    if decodes(config):
        step = step_stages(config, attentions, load)
        tables.append(_stage_table("step", term("step_title", n=n), step, machine))
    chosen = config.experts or any(counts.used is not None for counts in attentions.every)
    notes = CHOSEN if chosen else NOTES
    plan = Plan(term("model_title", name=config.name, total=total), tuple(facts), tuple(tables), notes)
    return spread(plan, config.design, attentions_over_all(config, attentions, load), devices, link, machine)


def plan_design(
    design: str, sizes: Mapping[str, Any], work: Work, *, machine: Machine | None = None, devices: int | None = None,
    link: float | None = None,
) -> Plan:  # fmt: skip
    """As `plan_model`, for one layer of a design: self attention of `work.queries` tokens. Full attention has no
    decoding step and no cache."""
    counts = counts_of(design, sizes)
    if work.causal and not counts.masked:
        raise ConfigError("causal=True: {design} does not support masks; add --full", design=design)
    n, stored = work.queries, term("materialised" if work.materialised else "blockwise")
    tokens = term("tokens", n=n)
    rest = joined([masked(work), stored, work.dtype])
    facts = [
        (term("design"), summary_of(design)),
        (term("sizes"), joined(f"{name} {value}" for name, value in sizes.items())),
        (term("input"), term("input_of", batch=work.batch, tokens=tokens, rest=rest)),
        *_machine_facts(machine),
    ]
    forward = attention_stages(counts, work)
    backward = backward_flops(forward, materialised=work.materialised)
    note = term("backward_note", flops=written(backward, "flops"))
    tables = [
        _layer_memory(counts, work),
        _stage_table("pass", term("prefill_title", tokens=tokens), forward, machine, note),
    ]
    if _decodes(counts, work):
        step = replace(work, queries=1)
        stages = attention_stages(counts.at_decoding, step)
        tables.append(_stage_table("step", term("step_title", n=n), stages, machine))
    title = term("layer_title", name=design, total=counts.parameters)
    plan = Plan(title, tuple(facts), tuple(tables), NOTES if counts.used is None else CHOSEN)
    return spread(plan, design, {(counts, work): 1}, devices, link, machine)


def listing() -> Plan:
    """List all published configurations, the model types of folders, and all designs with their sizes."""
    from headwise.models.configuration.sizes import FAMILIES, WITH_IMAGES  # of transformers

    models = tuple(
        (
            c.name, sum(parameter_parts(c, all_of).values()), c.layers + c.decoder_layers, c.d_model,
            all_of.layers[0].heads, c.head_dim, kv_heads(dict(c.sizes), all_of.layers[0]), c.d_ff, c.vocab,
            cached_numbers(c, all_of) or None,
        )
        for c, all_of in ((c, attentions_of(c)) for c in CONFIGS.values())
    )  # fmt: skip
    columns = (
        Column(term("config"), key="name"), Column(term("parameters"), "figure"),
        Column(term("layers_column"), "count"),
        Column("d_model", "count"), Column("h", "count", "num_heads"), Column("d_k", "count", "head_dim"),
        Column("h_kv", "count", "num_kv_heads"), Column("d_ff", "count"), Column(term("vocab"), "count"),
        Column(term("cache"), "count", "cached_numbers_a_token"),
    )  # fmt: skip
    designs = tuple((name, ", ".join(sizes_of(name))) for name in names())
    return Plan(
        term("list_title"),
        (),
        (
            Table(
                "configs", term("configs_title"), columns, models, note=term("list_note"),
            ),
            Table(
                "designs", term("designs_title"), (Column(term("design")), Column(term("sizes"))), designs,
            ),
        ),
        (term("folder_note", types=", ".join(sorted({*FAMILIES, *WITH_IMAGES}))),),
    )  # fmt: skip


def _decodes(counts: Counts, work: Work) -> bool:
    """Whether a layer can decode token by token: it is causal and has a cache."""
    return counts.cached and work.causal


def _sizes(config: ModelConfig, attentions: Attentions) -> str:
    c = config
    both = c.decoder_layers > 0
    layers = (
        term("layers_of_both", encoder=c.layers, decoder=c.decoder_layers) if both else term("layers", count=c.layers)
    )
    attended = [term("attended", count=c.self_attentions, states=len(c.recurrent))] if c.recurrent else []
    parts: list[str] = [layers, *attended, f"d_model {c.d_model:,}", *sizes_of_heads(c)]
    widths = f"{c.d_ff:,}" if c.decoder_d_ff in (0, c.d_ff) else f"{c.d_ff:,} + {c.decoder_d_ff:,}"
    parts.append(term("gated", size=widths) if c.gated else f"d_ff {widths}")
    if c.experts:
        code, met = "shared_experts" if c.shared_experts else "experts", scaled(active_parameters(c, attentions))
        parts.append(term(code, active=c.active_experts, all=c.experts, shared=c.shared_experts, parameters=met))
    parts.append(term("tied_vocabulary" if c.output == "tied" else "vocabulary_of", size=c.vocab))
    return joined([*parts, *_windows(c), *([term("prefix")] if c.prefix else [])])


def _windows(config: ModelConfig) -> list[str]:
    """The windows of the layers in words."""
    name = "chunks" if config.chunked else "window"
    if not config.layer_windows:
        return [] if config.window is None else [term(name, size=config.window)]
    name = "some_chunks" if config.chunked else "some_windows"
    some = Counter(window for window in config.windows if window is not None)
    return [term(name, size=window, some=count, all=config.self_attentions) for window, count in some.items()]


def _machine_facts(machine: Machine | None) -> list[tuple[str, str]]:
    if machine is None:
        return []
    peak, bandwidth = scaled(machine.peak, "FLOP/s"), scaled(machine.bandwidth, "B/s")
    words = term("machine_of", peak=peak, bandwidth=bandwidth, by=named(machine.by), ridge=machine.ridge)
    return [(term("machine"), words)]


def _parameters(config: ModelConfig, attentions: Attentions, total: int) -> Table:
    parts = parameter_parts(config, attentions)
    rows = [(term("output_part") if name == "output" else named(name), n, n / total) for name, n in parts.items()]
    published = config.published
    about = term("stated_about_note", count=scaled(published))
    exact = term("stated_note" if config.stated else "built_note", count=published)
    return Table(
        "parameters", term("parameters_title"),
        (Column(term("part")), Column(term("parameters"), "count"), Column(term("share"), "share")),
        (*rows, (term("all"), total, 1.0)), total=True, note=about if config.rounded else exact,
    )  # fmt: skip


def _model_memory(config: ModelConfig, attentions: Attentions, total: int, load: Load) -> Table:
    rows: list[tuple[Value, ...]] = [(term("weights"), total * BYTES[load.dtype])]
    if decodes(config):
        dtype = load.cache or load.dtype
        for name, layers in (("target", attentions.decoding), ("source", attentions.cross)):
            if layers:
                one = sum(cache_bytes(counts, 1, dtype=dtype) for counts in layers)
                rows.append((term(f"cache_of_{name}" if attentions.cross else "cache_of_one"), one))
        if longest := max((window for window in config.windows if window is not None), default=0):
            full = [counts for counts, window in zip(attentions.layers, config.windows, strict=True) if window is None]
            later = sum(cache_bytes(counts, 1, dtype=dtype) for counts in full)
            rows.append((term("cache_of_later", size=longest - 1), later))
        rows.append((term("cache_of_all"), model_cache_bytes(config, attentions, load)))
        if dtype != "int8":
            eight = model_cache_bytes(config, attentions, replace(load, cache="int8"))
            rows.append((term("cache_of_all_in", dtype="int8"), eight))
        if config.recurrent:
            rows.append((term("states_of_all", count=len(config.recurrent)), states_bytes(config, load)))
    alike = len({counts.heads for counts in attentions.every}) == 1 and source_tokens(config, load) == load.tokens
    for stored, same in _both_ways(load):
        scores = largest_score_bytes(config, attentions, same)
        rows.append((term("scores_of" if alike else "scores_of_largest", stored=stored), scores))
        kept = model_kept_bytes(config, attentions, same)
        rows.append((term("kept_of_layers", stored=stored, layers=config.attention_layers), kept))
    return Table("memory", term("memory_title"), _BYTES, tuple(rows), note=term("memory_note"))


def _layer_memory(counts: Counts, work: Work) -> Table:
    rows: list[tuple[Value, ...]] = [(term("weights"), counts.parameters * work.size)]
    window = {"window": work.window, "sinks": work.sinks}
    for dtype in dict.fromkeys((work.cache or work.dtype, "int8")) if _decodes(counts, work) else ():
        rows.append((term("cache_of_one_in", dtype=dtype), cache_bytes(counts, 1, dtype=dtype)))
        full = cache_bytes(counts, work.queries, batch=work.batch, dtype=dtype, **window)  # type: ignore[arg-type]
        rows.append((term("cache_of_all_in", dtype=dtype), full))
    for stored, same in _both_ways(work):
        rows.append((term("scores_of", stored=stored), score_bytes(counts, same)))
        rows.append((term("kept_of", stored=stored), kept_bytes(counts, same)))
    return Table("memory", term("layer_memory_title"), _BYTES, tuple(rows), note=term("memory_note"))


def _both_ways(work: _Input) -> list[tuple[Bilingual, _Input]]:
    """With the scores materialised and blockwise, in words and as the input."""
    return [(term(name), replace(work, materialised=name == "materialised")) for name in ("materialised", "blockwise")]


def _stage_table(key: str, title: str, stages: list[Stage], machine: Machine | None, note: str = "") -> Table:
    columns = [
        Column(term("step")), Column("FLOPs", "flops", "flops"), Column(term("exps"), "figure", "exponentials"),
        Column(term("bytes"), "bytes"), Column(term("FLOP/B"), "number", "intensity"),
    ]  # fmt: skip
    whole = Stage(
        "all", sum(s.flops for s in stages), sum(s.bytes for s in stages), sum(s.exponentials for s in stages)
    )
    if machine is not None:
        columns += [Column(term("time"), "seconds", "seconds"), Column(term("limit"))]
    rows = []
    for stage in [*stages, whole]:
        row: list[Value] = [named(stage.name), stage.flops or None, stage.exponentials or None, stage.bytes or None]
        row.append(stage.intensity if stage.bytes and stage.flops else None)
        if machine is not None:
            seconds = machine.seconds(stages if stage is whole else [stage])
            row += [seconds or None, "" if stage is whole or not seconds else named(machine.limit(stage))]
        rows.append(tuple(row))
    return Table(key, title, tuple(columns), tuple(rows), total=True, note=note)


COLUMNS = (
    Column(term("layers_column")), Column("h", "count", "num_heads"), Column("h_kv", "count", "num_kv_heads"),
    Column("d_k", "count", "head_dim"), Column(term("parameters"), "count"),
    Column(term("cache"), "count", "cached_numbers_a_token"),
)  # fmt: skip
WINDOWS = (Column(term("window_column"), "count", "window"), Column(term("count_column"), "count", "layers_alike"))
SHOWN = 4  # runs of layers in a row


def layers_table(config: ModelConfig, attentions: Attentions) -> Table:
    """Return a table with a row for each run of equal layers, or, if their windows differ, for all equal layers:
    parameters and cache are those of one layer."""
    count = config.self_attentions
    first, second = config.attention_sizes[:count], config.attention_sizes[count:]
    stacks = [("encoder" if second else "stack", first, attentions.layers)]
    if second:
        stacks += [("decoder", second[::2], attentions.decoder), ("cross", second[1::2], attentions.cross)]
    rows: list[tuple[Value, ...]] = []
    windowed = bool(config.layer_windows)
    for name, sizes, layers in stacks:
        decodes = name != "encoder" and (config.causal or bool(second))
        windows = config.windows if windowed and layers is attentions.layers else (None,) * len(layers)
        for numbers in _alike(layers, windows) if windowed else _runs(layers):
            i = numbers[0]
            given, counts = dict(sizes[i]), layers[i]
            d_k = given.get("head_dim", config.d_model // counts.heads)
            cache = counts.cache if decodes and counts.cached else None
            places = [config.attended[i] for i in numbers] if config.attended else numbers
            row: list[Value] = [term(name, numbers=_written(places)), counts.heads, kv_heads(given, counts), d_k]
            row += [counts.parameters, cache]
            rows.append((*row, windows[i], len(numbers)) if windowed else tuple(row))
    notes = [term("layers_note"), *([term("cross_note")] if second else [])]
    if any(counts.shared for counts in attentions.layers):
        notes.append(term("shared_note"))
    if windowed:
        kind = "chunk_note" if config.chunked else "window_note" if config.causal else "near_note"
        notes.append(term(kind))
    columns = COLUMNS + WINDOWS if windowed else COLUMNS
    return Table("layers", term("layers_title"), columns, tuple(rows), note=joined(notes, BLANK))


def kv_heads(sizes: Mapping[str, int | str], counts: Counts) -> Value:
    """The KV heads of a layer, or "c" if all heads share one latent vector."""
    from_one = counts.cached and not counts.at_decoding.values  # values are computed from the cached keys
    return "c" if from_one else sizes.get("num_kv_heads") or sizes.get("num_heads")


def sizes_of_heads(config: ModelConfig) -> Iterable[str]:
    """The sizes that all attention layers have, as "num_heads 8"; with the least and most where they differ."""
    every = [dict(sizes) for sizes in config.attention_sizes]
    for name in every[0]:
        values = {sizes.get(name) for sizes in every}
        numbers = [value for value in values if isinstance(value, int)]
        if len(values) == 1:
            yield f"{name} {every[0][name]}"
        elif len(numbers) == len(values):
            yield term("from_to", name=name, least=min(numbers), most=max(numbers))


def _runs(layers: tuple[Counts, ...]) -> Iterator[list[int]]:
    """The numbers of each run of layers with the same counts."""
    for _, run in groupby(range(len(layers)), key=lambda i: layers[i]):
        yield list(run)


def _alike(layers: tuple[Counts, ...], windows: tuple[int | None, ...]) -> Iterable[list[int]]:
    """The numbers of all layers with the same counts and window."""
    found: dict[tuple[Counts, int | None], list[int]] = {}
    for i, kind in enumerate(zip(layers, windows, strict=True)):
        found.setdefault(kind, []).append(i)
    return found.values()


def _written(numbers: list[int]) -> str:
    """Ascending numbers, such as "0–4, 6–10", the last after "…" if there are many."""
    cuts = [0, *(i + 1 for i, (one, other) in enumerate(pairwise(numbers)) if other > one + 1), len(numbers)]
    runs = [numbers[start:stop] for start, stop in pairwise(cuts)]
    texts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ", ".join(texts if len(texts) <= SHOWN else [*texts[: SHOWN - 1], "…", texts[-1]])


def read_config(name: str | Path) -> ModelConfig:
    """Return the sizes of a published model by name, or of the model in a folder or a checkpoint.

    Of a folder with config.json (and heads.json, if `save_pruned` wrote it) no weights are read: the model is built
    without memory, on the meta device, to compare its number of parameters with that of its sizes.

    Raises:
        CheckpointError: if a file cannot be read, or the weights beside config.json have other shapes.
        ConfigError: for an unknown name, a model type that is not supported, and a model with other parameters than
            its sizes give.
    """
    path = Path(name)
    if not path.exists():
        return find(str(name))
    path = folder_of(path)
    if path.is_file() or ((path / "model.safetensors").is_file() and not (path / "config.json").exists()):
        return _of_checkpoint(path)
    return _of_folder(path)


def _of_folder(folder: Path) -> ModelConfig:
    from headwise.edit.folder import is_pruned, resize_as_saved  # these import PyTorch's compiler
    from headwise.lm.loading.huggingface import check_shapes, read_config as read_json
    from headwise.models import find_heads
    from headwise.models.configuration import without_quantization
    from headwise.models.configuration.sizes import build, model_config, with_unread

    c = read_json(folder, weights=False)
    quantized = without_quantization(c)
    try:
        config = replace(model_config(c, folder.resolve().name, str(folder / "config.json")), quantized=quantized)
        with theirs(folder, "the model cannot be built"), bounded(folder):
            model = build(c)
    except ConfigError as error:
        raise ConfigError(
            "{folder!r}: {error}; `headwise plan layer` plans a layer of any sizes", folder=str(folder), error=error
        ) from None
    if is_pruned(folder):
        resize_as_saved(model, folder)
        sites = find_heads(model)  # in the order of the layers
        if len(sites) == config.attention_layers:  # else it has parts that `_checked` refuses
            config = config.with_layers([_resized(*one) for one in zip(config.attention_sizes, sites, strict=True)])
    check_shapes(folder, model)
    return _checked(with_unread(config, model, c), folder)


def _of_checkpoint(path: Path) -> ModelConfig:
    from headwise.lm.checkpoint import load_checkpoint  # imports much of headwise.lm

    decoder, _, _ = load_checkpoint(path)
    c = decoder.config
    known = sizes_of(c.design)
    layers = []
    for layer in c.layers or [{}] * c.num_layers:
        given = {"num_heads": c.num_heads, "num_kv_heads": c.num_kv_heads, **c.options, **layer}
        layers.append({name: value for name, value in given.items() if name in known and value is not None})
    config = ModelConfig(
        path.resolve().name, c.d_model, c.num_layers, c.d_ff, c.vocab_size, (), 0, str(path), design=c.design,
        final_norms=int(c.order == "pre"), output="tied", context=c.context,
    )  # fmt: skip
    built = sum(parameter.numel() for parameter in decoder.parameters())
    return _checked(replace(config.with_layers(layers), published=built, stated=False), path)


def _checked(config: ModelConfig, path: Path) -> ModelConfig:
    """The same; ConfigError if its sizes give another number of parameters than the model has that it describes."""
    counted = sum(parameter_parts(config, attentions_of(config)).values())
    if counted != config.published:
        raise ConfigError(
            "{path!r}: the model has {published:,} parameters, and one of these sizes {counted:,}: it has parts that "
            "are not understood; `headwise plan layer` plans a layer",
            path=str(path),
            published=config.published,
            counted=counted,
        )
    return config


def _resized(sizes: Sizes, site: "HeadSite") -> Mapping[str, int | str]:
    """The sizes of an attention layer with the heads of a site."""
    own = {**dict(sizes), "num_heads": site.num_heads, "num_kv_heads": site.num_kv_heads, "head_dim": site.head_dim}
    if site.num_kv_heads == site.num_heads:
        del own["num_kv_heads"]
    return own
