"""The plan of a model by its name, folder or checkpoint, the plan of one layer, and the list of models and designs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeVar

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
    model,
    score_bytes,
)
from headwise.costs.configs import CONFIGS, ModelConfig, find
from headwise.costs.work import BYTES
from headwise.errors import ConfigError
from headwise.nn.registry import attentions_of, counts_of, names, sizes_of, summary_of
from headwise.plan.compare import spread
from headwise.plan.tables import Column, Plan, Table, Value, masked, named, written
from headwise.wording import BLANK, Bilingual, joined, scaled, tr

BOUNDS_NOTE = tr(
    "A multiply-add is two FLOPs; exps are the softmax's exponentials. Bytes and times are lower bounds: each "
    "step reads its inputs and writes its results once; the steps run one after another, each at the roofline."
)
CHOSEN_NOTE = tr(
    "Of weights that tokens choose from, experts or heads, bytes count the mean number that all tokens read, if "
    "each is chosen equally often and independently."
)
MEMORY_NOTE = tr(
    "An int8 cache has one float32 scale per vector. Kept for backward: attention only, without other layers."
)
LIST_NOTE = tr(
    "cache: numbers per token in all layers, source and target in an encoder-decoder; — for encoders. Layers with a "
    "window keep no more tokens than it. h_kv c: all heads share one latent vector c."
)
_Input = TypeVar("_Input", Work, model.Load)
_BYTES = (Column(tr("what")), Column(tr("bytes"), "bytes"))


def plan_model(
    config: ModelConfig, load: model.Load, *, machine: Machine | None = None, devices: int | None = None,
    link: float | None = None,
) -> Plan:  # fmt: skip
    """Return parameters, memory, one pass over the whole text and one decoding step of a model.

    Args:
        load: sequences and tokens, and how numbers are stored.
        machine: adds minimum times and what limits each step.
        devices: adds the ways to partition the attention over this many; link: and what each of them can send, in
            bytes/s.
    """
    if load.cache is not None and not model.decodes(config):
        raise ConfigError(
            "cache={cache!r}: {name} is an encoder, which has no cache; leave it out",
            cache=load.cache,
            name=config.name,
        )
    attentions = attentions_of(config)
    total = sum(model.parameter_parts(config, attentions).values())
    n, b, dtype, source = load.tokens, load.batch, load.dtype, model.source_tokens(config, load)
    tokens = tr("{n:,} tokens", n=n)
    if config.decoder_layers:
        tokens = tr("{source:,} source and {target:,} target tokens", source=source, target=n)
    stored = joined([dtype, *([tr("{dtype} cache", dtype=load.cache)] if load.cache else [])])
    facts = [
        (tr("source"), config.source),
        (tr("sizes"), _sizes(config, attentions)),
        (tr("input"), tr("{batch} × {tokens}, {rest}", batch=b, tokens=tokens, rest=stored)),
        *_machine_facts(machine),
    ]
    warnings = []
    if 0 < config.context < (n if config.source_tokens else max(n, source)):
        warnings.append(tr("the model was trained on at most {context:,} tokens", context=config.context))
    if config.quantized and load.weights is None:
        counted = tr("the weights are quantized ({method}); here all of them are counted in {dtype}")
        warnings.append(counted.filled(method=config.quantized, dtype=dtype))
    if warnings:
        facts.append((tr("warning"), joined(warnings, tr("; "))))
    tables = [_parameters(config, attentions, total), _model_memory(config, attentions, total, load)]
    if config.layer_sizes or config.layer_windows or config.attended:
        tables.insert(1, layers_table(config, attentions))
    title = tr("One forward pass over {tokens} (prefill)", tokens=tokens)
    if not config.causal:
        title = tr("One forward pass over {tokens}", tokens=tokens)
    flops = written(model.training_flops(config, attentions, load), "flops")
    note = tr("Training (all logits, forward and backward): {flops}.", flops=flops)
    tables.append(_stage_table("pass", title, model.pass_stages(config, attentions, load), machine, note))
    if model.decodes(config):
        step = model.step_stages(config, attentions, load)
        tables.append(_stage_table("step", tr("One decoding step at token {n:,}", n=n), step, machine))
    chosen = config.experts or any(counts.used is not None for counts in attentions.every)
    notes = (BOUNDS_NOTE, CHOSEN_NOTE) if chosen else (BOUNDS_NOTE,)
    plan = Plan(tr("{name}: {total:,} parameters", name=config.name, total=total), tuple(facts), tuple(tables), notes)
    return spread(plan, config.design, model.attentions_over_all(config, attentions, load), devices, link, machine)


def plan_design(
    design: str, sizes: Mapping[str, Any], work: Work, *, machine: Machine | None = None, devices: int | None = None,
    link: float | None = None,
) -> Plan:  # fmt: skip
    """As `plan_model`, for one layer of a design: self attention of `work.queries` tokens. Full attention has no
    decoding step and no cache."""
    counts = counts_of(design, sizes)
    if work.causal and not counts.masked:
        raise ConfigError("causal=True: {design} does not support masks; add --full", design=design)
    n, stored = work.queries, tr("materialised") if work.materialised else tr("blockwise")
    tokens = tr("{n:,} tokens", n=n)
    rest = joined([masked(work), stored, work.dtype])
    facts = [
        (tr("design"), summary_of(design)),
        (tr("sizes"), joined(f"{name} {value}" for name, value in sizes.items())),
        (tr("input"), tr("{batch} × {tokens}, {rest}", batch=work.batch, tokens=tokens, rest=rest)),
        *_machine_facts(machine),
    ]
    forward = attention_stages(counts, work)
    backward = backward_flops(forward, materialised=work.materialised)
    note = tr("Backward: {flops}.", flops=written(backward, "flops"))
    tables = [
        _layer_memory(counts, work),
        _stage_table("pass", tr("One forward pass over {tokens} (prefill)", tokens=tokens), forward, machine, note),
    ]
    if counts.cached and work.causal:
        step = replace(work, queries=1)
        stages = attention_stages(counts.at_decoding, step)
        tables.append(_stage_table("step", tr("One decoding step at token {n:,}", n=n), stages, machine))
    title = tr("{name}: {total:,} parameters per layer", name=design, total=counts.parameters)
    notes = (BOUNDS_NOTE,) if counts.used is None else (BOUNDS_NOTE, CHOSEN_NOTE)
    plan = Plan(title, tuple(facts), tuple(tables), notes)
    return spread(plan, design, {(counts, work): 1}, devices, link, machine)


def listing() -> Plan:
    """List all published configurations, the model types of folders, and all designs with their sizes."""
    from headwise.models.configuration.sizes import FAMILIES, WITH_IMAGES  # of transformers

    models = tuple(
        (
            c.name, sum(model.parameter_parts(c, all_of).values()), c.layers + c.decoder_layers, c.d_model,
            all_of.layers[0].heads, c.head_dim, kv_heads(dict(c.sizes), all_of.layers[0]), c.d_ff, c.vocab,
            model.cached_numbers(c, all_of) or None,
        )
        for c, all_of in ((c, attentions_of(c)) for c in CONFIGS.values())
    )  # fmt: skip
    columns = (
        Column(tr("config"), key="name"), Column(tr("parameters"), "figure"),
        Column(tr("layers"), "count"),
        Column("d_model", "count"), Column("h", "count", "num_heads"), Column("d_k", "count", "head_dim"),
        Column("h_kv", "count", "num_kv_heads"), Column("d_ff", "count"), Column(tr("vocab"), "count"),
        Column(tr("cache"), "count", "cached_numbers_a_token"),
    )  # fmt: skip
    designs = tuple((name, ", ".join(sizes_of(name))) for name in names())
    listed = tr("Designs: headwise plan layer NAME --d-model … --num-heads … --set SIZE=…")
    tables = (
        Table("configs", tr("Published models: headwise plan model NAME"), columns, models, note=LIST_NOTE),
        Table("designs", listed, (Column(tr("design")), Column(tr("sizes"))), designs),
    )
    folders = tr(
        "`headwise plan model` also takes a folder with the config.json of a model of transformers, of one of these "
        "types: {types}.",
        types=", ".join(sorted({*FAMILIES, *WITH_IMAGES})),
    )
    return Plan(tr("Models and designs"), (), tables, (folders,))


def _sizes(config: ModelConfig, attentions: Attentions) -> str:
    c = config
    parts: list[str] = [tr("{count} layers", count=c.layers)]
    if c.decoder_layers:
        parts = [tr("{encoder} + {decoder} layers", encoder=c.layers, decoder=c.decoder_layers)]
    if c.recurrent:
        parts.append(tr("{count} with attention, {states} recurrent", count=c.self_attentions, states=len(c.recurrent)))
    parts += [f"d_model {c.d_model:,}", *sizes_of_heads(c)]
    widths = f"{c.d_ff:,}" if c.decoder_d_ff in (0, c.d_ff) else f"{c.d_ff:,} + {c.decoder_d_ff:,}"
    parts.append(tr("d_ff {size} (gated)", size=widths) if c.gated else f"d_ff {widths}")
    if c.experts:
        experts = tr("{active} of {all} experts, {parameters} active")
        if c.shared_experts:
            experts = tr("{active} of {all} and {shared} shared experts, {parameters} active")
        met = model.active_parameters(c, attentions)
        given = {"active": c.active_experts, "all": c.experts, "shared": c.shared_experts, "parameters": scaled(met)}
        parts.append(experts.filled(**given))
        counted = tr("with the embedding, which is the output matrix too")
        if c.output == "own":
            counted = tr("{rest} without the input embedding", rest=scaled(met - c.vocab * c.d_model))
        parts.append(counted)
    tied = c.output == "tied"
    parts.append(tr("vocabulary {size:,} (tied)", size=c.vocab) if tied else tr("vocabulary {size:,}", size=c.vocab))
    return joined([*parts, *_windows(c), *([tr("tokens of the input attend to both sides")] if c.prefix else [])])


def _windows(config: ModelConfig) -> list[str]:
    """The windows of the layers in words."""
    if not config.layer_windows:
        one = tr("chunks of {size:,}") if config.chunked else tr("window {size:,}")
        return [] if config.window is None else [one.filled(size=config.window)]
    one = tr("window {size:,} in {some} of {all} layers")
    if config.chunked:
        one = tr("chunks of {size:,} in {some} of {all} layers")
    some = Counter(window for window in config.windows if window is not None)
    return [one.filled(size=window, some=count, all=config.self_attentions) for window, count in some.items()]


def _machine_facts(machine: Machine | None) -> list[tuple[str, str]]:
    if machine is None:
        return []
    peak, bandwidth = scaled(machine.peak, "FLOP/s"), scaled(machine.bandwidth, "B/s")
    words = tr(
        "{peak} and {bandwidth}, {by}: memory-bound below {ridge:.3g} FLOP per byte", peak=peak, bandwidth=bandwidth,
        by=named(machine.by), ridge=machine.ridge,
    )  # fmt: skip
    return [(tr("machine"), words)]


def _parameters(config: ModelConfig, attentions: Attentions, total: int) -> Table:
    parts = model.parameter_parts(config, attentions)
    output = tr("output", sense="layer")
    rows = [(output if name == "output" else named(name), n, n / total) for name, n in parts.items()]
    note = tr("A model that is built from the source has {count:,}.", count=config.published)
    if config.rounded:
        note = tr("The source states about {count}.", count=scaled(config.published))
    elif config.stated:
        note = tr("The source states {count:,}.", count=config.published)
    return Table(
        "parameters", tr("Parameters"),
        (Column(tr("part")), Column(tr("parameters"), "count"), Column(tr("share"), "share")),
        (*rows, (tr("all", sense="total"), total, 1.0)), total=True, note=note,
    )  # fmt: skip


def _model_memory(config: ModelConfig, attentions: Attentions, total: int, load: model.Load) -> Table:
    rows: list[tuple[Value, ...]] = [(tr("weights"), total * BYTES[load.dtype])]
    notes = [MEMORY_NOTE]
    if load.weights is not None:
        bits, scale, shared = model.WEIGHTS[load.weights]
        count = model.quantized(config, attentions, load.weights)
        alone = load.weights == "mxfp4" and config.experts
        where = tr("the experts alone") if alone else tr("attention and feed-forward networks")
        rows.append((tr("weights, {stored}", stored=load.weights), model.weight_bytes(config, attentions, load)))
        notes.append(tr(
            "{stored}: {bits} bits, and a scale of {scale} bits for {shared} weights, in {count:,} weights of {where}; "
            "the other {rest:,} parameters, and all parameters in passes and steps, are counted in {dtype}.",
            stored=load.weights, bits=bits, scale=scale, shared=shared, count=count, rest=total - count,
            dtype=load.dtype, where=where,
        ))  # fmt: skip
    if model.decodes(config):
        dtype = load.cache or load.dtype
        target = tr("cache, one target token") if attentions.cross else tr("cache, one token")
        for name, layers in ((target, attentions.decoding), (tr("cache, one source token"), attentions.cross)):
            if layers:
                rows.append((name, sum(cache_bytes(counts, 1, dtype=dtype) for counts in layers)))
        if longest := max((window for window in config.windows if window is not None), default=0):
            full = [counts for counts, window in zip(attentions.layers, config.windows, strict=True) if window is None]
            later = sum(cache_bytes(counts, 1, dtype=dtype) for counts in full)
            rows.append((tr("cache, each token after {size:,}", size=longest - 1), later))
        rows.append((tr("cache, all tokens"), model.model_cache_bytes(config, attentions, load)))
        if dtype != "int8":
            eight = model.model_cache_bytes(config, attentions, replace(load, cache="int8"))
            rows.append((tr("cache, all tokens, {dtype}", dtype="int8"), eight))
        if config.recurrent:
            states = tr("states of {count} recurrent layers", count=len(config.recurrent))
            rows.append((states, model.states_bytes(config, load)))
    alike = len({counts.heads for counts in attentions.every}) == 1 and model.source_tokens(config, load) == load.tokens
    for stored, same in _both_ways(load):
        scores = tr("scores, {stored}, one layer") if alike else tr("scores, {stored}, largest layer")
        rows.append((scores.filled(stored=stored), model.largest_score_bytes(config, attentions, same)))
        kept = tr("kept for backward, {stored}, {layers} layers", stored=stored, layers=config.attention_layers)
        rows.append((kept, model.model_kept_bytes(config, attentions, same)))
    return Table("memory", tr("Memory"), _BYTES, tuple(rows), note=joined(notes, BLANK))


def _layer_memory(counts: Counts, work: Work) -> Table:
    rows: list[tuple[Value, ...]] = [(tr("weights"), counts.parameters * work.size)]
    window = {"window": work.window, "sinks": work.sinks}
    for dtype in dict.fromkeys((work.cache or work.dtype, "int8")) if counts.cached and work.causal else ():
        rows.append((tr("cache, one token, {dtype}", dtype=dtype), cache_bytes(counts, 1, dtype=dtype)))
        full = cache_bytes(counts, work.queries, batch=work.batch, dtype=dtype, **window)  # type: ignore[arg-type]
        rows.append((tr("cache, all tokens, {dtype}", dtype=dtype), full))
    for stored, same in _both_ways(work):
        rows.append((tr("scores, {stored}, one layer", stored=stored), score_bytes(counts, same)))
        rows.append((tr("kept for backward, {stored}", stored=stored), kept_bytes(counts, same)))
    return Table("memory", tr("Memory of one layer"), _BYTES, tuple(rows), note=MEMORY_NOTE)


def _both_ways(work: _Input) -> list[tuple[Bilingual, _Input]]:
    """With the scores materialised and blockwise, in words and as the input."""
    return [(name, replace(work, materialised=i == 0)) for i, name in enumerate((tr("materialised"), tr("blockwise")))]


def _stage_table(key: str, title: str, stages: list[Stage], machine: Machine | None, note: str = "") -> Table:
    columns = [
        Column(tr("step")), Column("FLOPs", "flops", "flops"), Column(tr("exps"), "figure", "exponentials"),
        Column(tr("bytes"), "bytes"), Column(tr("FLOP/B"), "number", "intensity"),
    ]  # fmt: skip
    whole = Stage(
        "all", sum(s.flops for s in stages), sum(s.bytes for s in stages), sum(s.exponentials for s in stages)
    )
    if machine is not None:
        columns += [Column(tr("time ≥"), "seconds", "seconds"), Column(tr("limit"))]
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
    Column(tr("layers")), Column("h", "count", "num_heads"), Column("h_kv", "count", "num_kv_heads"),
    Column("d_k", "count", "head_dim"), Column(tr("parameters"), "count"),
    Column(tr("cache"), "count", "cached_numbers_a_token"),
)  # fmt: skip
WINDOWS = (Column(tr("window"), "count", "window"), Column(tr("count"), "count", "layers_alike"))
SHOWN = 4  # runs of layers in a row


def layers_table(config: ModelConfig, attentions: Attentions) -> Table:
    """A row for each run of equal layers, or, if windows differ, for all equal ones; numbers are of one layer."""
    count = config.self_attentions
    first, second = config.attention_sizes[:count], config.attention_sizes[count:]
    stacks = [(tr("encoder {numbers}") if second else tr("{numbers}"), first, attentions.layers)]
    if second:
        stacks.append((tr("decoder {numbers}"), second[::2], attentions.decoder))
        stacks.append((tr("decoder {numbers}, cross"), second[1::2], attentions.cross))
    rows: list[tuple[Value, ...]] = []
    windowed = bool(config.layer_windows)
    for name, sizes, layers in stacks:
        decodes = layers is not attentions.layers if second else config.causal
        windows = config.windows if windowed and layers is attentions.layers else (None,) * len(layers)
        runs = (list(run) for _, run in groupby(range(len(layers)), key=layers.__getitem__))
        for numbers in _alike(layers, windows) if windowed else runs:
            i = numbers[0]
            given, counts = dict(sizes[i]), layers[i]
            d_k = given.get("head_dim", config.d_model // counts.heads)
            cache = counts.cache if decodes and counts.cached else None
            places = [config.attended[i] for i in numbers] if config.attended else numbers
            row: list[Value] = [name.filled(numbers=_written(places)), counts.heads, kv_heads(given, counts), d_k]
            row += [counts.parameters, cache]
            rows.append((*row, windows[i], len(numbers)) if windowed else tuple(row))
    notes = [tr("Of one layer each; cache: numbers per token.")]
    if second:
        notes.append(
            tr("cross: attention to the encoder's output, whose keys and values are cached once per source token.")
        )
    if any(counts.shared for counts in attentions.layers):
        notes.append(tr("cache 0: the layer attends to the keys and values of an earlier one."))
    if windowed and config.chunked:
        notes.append(tr(
            "A window of w tokens is a chunk of the text: a query attends within its own, and the cache keeps w − 1."
        ))  # fmt: skip
    elif windowed and config.causal:
        notes.append(tr(
            "A query in a window of w tokens attends to the last w tokens, its own included, and the cache keeps w − 1."
        ))  # fmt: skip
    elif windowed:
        notes.append(tr("A query in a window of w tokens attends to tokens at a distance below w, to both sides."))
    columns = COLUMNS + WINDOWS if windowed else COLUMNS
    return Table("layers", tr("Attention layers"), columns, tuple(rows), note=joined(notes, BLANK))


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
            yield tr("{name} {least} to {most}", name=name, least=min(numbers), most=max(numbers))


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
            built = build(c)
    except ConfigError as error:
        raise ConfigError(
            "{folder!r}: {error}; `headwise plan layer` plans a layer of any sizes", folder=str(folder), error=error
        ) from None
    if is_pruned(folder):
        resize_as_saved(built, folder)
        sites = find_heads(built)  # in the order of the layers
        if len(sites) == config.attention_layers:  # else it has parts that `_checked` refuses
            sizes = [dict(one) for one in config.attention_sizes]
            for one, site in zip(sizes, sites, strict=True):
                one |= {"num_heads": site.num_heads, "num_kv_heads": site.num_kv_heads, "head_dim": site.head_dim}
                if site.num_kv_heads == site.num_heads:
                    del one["num_kv_heads"]
            config = config.with_layers(sizes)
    check_shapes(folder, built)
    return _checked(with_unread(config, built, c), folder)


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
    counted = sum(model.parameter_parts(config, attentions_of(config)).values())
    if counted != config.published:
        raise ConfigError(
            "{path!r}: the model has {published:,} parameters, and one of these sizes {counted:,}: it has parts that "
            "are not understood; `headwise plan layer` plans a layer",
            path=str(path),
            published=config.published,
            counted=counted,
        )
    return config
