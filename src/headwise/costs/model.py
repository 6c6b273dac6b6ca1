"""A whole Transformer: its parameters by part, and the cost of a forward pass or of one decoding step.

`attentions` are the counts of the attention layers, as returned by `headwise.nn.registry.attentions_of`.

>>> from headwise.costs.configs import find
>>> from headwise.nn.registry import attentions_of
>>> config = find("gpt-2-small")
>>> sum(parameter_parts(config, attentions_of(config)).values())
124439808
"""

from collections import Counter
from dataclasses import dataclass

from headwise.costs.configs import ModelConfig
from headwise.costs.work import (
    BYTES,
    Attentions,
    Counts,
    Stage,
    Work,
    attention_stages,
    backward_flops,
    cache_bytes,
    kept_bytes,
    linear_stage,
    positive,
    score_bytes,
)
from headwise.errors import ConfigError, check_choice

NORMS = {"layer": 2, "rms": 1, "none": 0}  # parameters of a norm per channel
# Bits of a quantized weight, bits of a scale, weights that share it: MXFP4 as in OCP's Microscaling Formats 1.0; for
# integers an assumption, groups of 128 with a scale in float16 and no zero points, as GPTQ and AWQ often have them.
WEIGHTS = {"mxfp4": (4, 8, 32), "int8": (8, 16, 128), "int4": (4, 16, 128)}


@dataclass(frozen=True)
class Load:
    """The input of a model: b texts of `tokens` tokens; materialised, dtype, cache as in `Work`. weights: how those of
    `quantized` are stored, a name in `WEIGHTS`; default: dtype."""

    batch: int = 1
    tokens: int = 2048
    materialised: bool = False
    dtype: str = "bfloat16"
    cache: str | None = None
    source: int | None = None  # of an encoder-decoder, tokens of the encoder's input; default: `tokens`
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_choice("weights", self.weights, WEIGHTS)
        positive(batch=self.batch, tokens=self.tokens, source=1 if self.source is None else self.source)
        self.work(1, 1, causal=True)  # checks how numbers are stored

    def work(self, queries: int, keys: int, *, causal: bool, **options: object) -> Work:
        """The attention of one layer under this load."""
        return Work(
            self.batch, queries, keys, causal=causal, materialised=self.materialised, dtype=self.dtype,
            cache=self.cache, **options,  # type: ignore[arg-type]
        )  # fmt: skip


def source_tokens(config: ModelConfig, load: Load) -> int:
    """Positions of the encoder of an encoder-decoder. ConfigError if the load has a source that does not fit."""
    if load.source is None:
        return config.source_tokens or load.tokens
    name = config.name
    if not config.decoder_layers:
        raise ConfigError(
            "source={source}: {name} is not an encoder-decoder; leave it out", source=load.source, name=name
        )
    if config.source_tokens and load.source != config.source_tokens:
        raise ConfigError(
            "source={source}: the encoder of {name} always has {source_tokens} positions; leave it out",
            source=load.source,
            name=name,
            source_tokens=config.source_tokens,
        )
    return load.source


def parameter_parts(config: ModelConfig, attentions: Attentions) -> dict[str, int]:
    """Parameters by part, without parts that the model lacks. A tied output matrix counts as embedding."""
    c, norm = config, config.d_model * NORMS[config.norm]
    dense, sparse = _feed_forward(c, c.dense_d_ff), _feed_forward(c, c.d_ff)
    if c.experts:
        sparse = c.experts * sparse + _common(c)
    decoder = c.decoder_layers * _feed_forward(c, c.decoder_d_ff or c.d_ff)
    norms = c.layers * (2 if c.norms is None else c.norms) + c.decoder_layers * 3 + c.final_norms + c.embedding_norms
    parts = {
        "embedding": c.vocab * c.d_model,
        "positions, segments": (c.positions + c.segments) * c.d_model + c.relative,
        "convolutions": sum(one.weights + one.outputs for one in c.convolutions),
        "attention": sum(counts.parameters for counts in attentions.every),
        "recurrent layers": sum(layer.parameters for layer in c.recurrent),
        "feed-forward": c.dense_layers * dense + (c.layers - c.dense_layers) * sparse + decoder,
        "norms": norms * norm,
        "output": (c.vocab * c.d_model if c.output == "own" else 0) + c.vocab * c.output_bias,
        "pooler": (c.d_model + 1) * c.d_model if c.pooler else 0,
        "other parts": 0 if c.others is None else c.others.parameters,
        "not for text": c.unread,
    }
    return {name: count for name, count in parts.items() if count}


def quantized(config: ModelConfig, attentions: Attentions, weights: str) -> int:
    """How many weights are quantized: in MXFP4, those of experts if there are any, as in gpt-oss; else all matrices of
    attention, feed-forward networks and experts, not those of recurrent layers, and not those that choose experts."""
    c, width = config, (3 if config.gated else 2) * config.d_model
    sparse = c.layers - c.dense_layers
    experts = sparse * c.experts * c.d_ff * width
    if weights == "mxfp4" and experts:
        return experts
    dense = c.dense_layers * c.dense_d_ff + sparse * (sum(_shared_widths(c)) if c.experts else c.d_ff)
    dense += c.decoder_layers * (c.decoder_d_ff or c.d_ff)
    attention = sum(counts.per_query + counts.per_key + counts.out_parameters for counts in attentions.every)
    return experts + dense * width + attention


def weight_bytes(config: ModelConfig, attentions: Attentions, load: Load) -> int:
    """All parameters, with the scales of quantized ones."""
    whole, count, bits = sum(parameter_parts(config, attentions).values()), 0, 0.0
    if load.weights is not None:
        each, scale, shared = WEIGHTS[load.weights]
        count, bits = quantized(config, attentions, load.weights), each + scale / shared
    return (whole - count) * BYTES[load.dtype] + round(count * bits / 8)


def active_parameters(config: ModelConfig, attentions: Attentions) -> int:
    """Parameters used for one token, with all embeddings: all but those of unselected experts, and of parts that are
    not for text."""
    idle = (config.layers - config.dense_layers) * (config.experts - config.active_experts)
    whole = sum(parameter_parts(config, attentions).values()) - config.unread
    return whole - idle * _feed_forward(config, config.d_ff)


def pass_stages(config: ModelConfig, attentions: Attentions, load: Load, *, logits: str = "last") -> list[Stage]:
    """One forward pass over all tokens, with the logits of the "last" position of each text, or of "all"."""
    c, b, n = config, load.batch, load.tokens
    layers = [
        stage.times(k)
        for work, every in _works(config, attentions, load)
        for counts, k in Counter(every).items()
        for stage in attention_stages(counts, work)
    ]
    first = _first(config, load)
    fed = [*_encoder_stages(c, load, b * first), *_decoder_stages(c, load, b * n)]
    ends = _vocabulary(c, load, b * (n if logits == "all" else 1))
    if c.pooler:  # of the first token of each text
        weights = (c.d_model + 1) * c.d_model
        size = BYTES[load.dtype]
        ends.append(linear_stage("pooler", weights, weights, b, c.d_model, c.d_model, size, biases=c.d_model))
    beside = [*_recurrent(c, load, n), *_other_stages(c, load, b * n)]
    convolutions = [
        linear_stage(
            "convolutions", one.weights + one.outputs, one.weights + one.outputs, b * first * one.positions,
            one.stride * one.inputs, one.outputs, BYTES[load.dtype], biases=one.outputs,
        )
        for one in c.convolutions
    ]  # fmt: skip
    return _added([*convolutions, *layers, *beside, *fed, *ends])


def step_stages(config: ModelConfig, attentions: Attentions, load: Load) -> list[Stage]:
    """One decoding step: the last of `tokens` tokens in each text, which attends to its own key too."""
    if not decodes(config):
        raise ConfigError("config={name!r}: an encoder without a decoder does not generate text", name=config.name)
    c = config
    own = [(load.work(1, _seen(c, load, window), causal=True), every) for window, every in _decoding(c, attentions)]
    source = load.work(1, source_tokens(c, load), causal=False, projected=0, cross=True)
    layers = [
        stage.times(k)
        for work, every in (*own, (source, attentions.cross))
        for counts, k in Counter(every).items()
        for stage in attention_stages(counts.at_decoding, work)
    ]
    fed = (_decoder_stages if c.decoder_layers else _encoder_stages)(c, load, load.batch)
    beside = [*_recurrent(c, load, 1, transfers=2), *_other_stages(c, load, load.batch)]
    return _added([*layers, *beside, *fed, *_vocabulary(c, load, load.batch)])


def decodes(config: ModelConfig) -> bool:
    """Whether the model generates token by token."""
    return config.causal or config.decoder_layers > 0


def training_flops(config: ModelConfig, attentions: Attentions, load: Load) -> int:
    """Forward and backward over all tokens, with the logits of all positions."""
    forward = pass_stages(config, attentions, load, logits="all")
    return sum(stage.flops for stage in forward) + backward_flops(forward, materialised=load.materialised)


def cached_numbers(config: ModelConfig, attentions: Attentions) -> int:
    """Numbers per token in all layers' caches; of an encoder-decoder, of a token of the source and of the target."""
    return sum(counts.cache for counts in attentions.decoding + attentions.cross) if decodes(config) else 0


def model_cache_bytes(config: ModelConfig, attentions: Attentions, load: Load) -> int:
    """Keys and values of all layers after all tokens; those of an encoder-decoder's source in cross attention."""
    if not decodes(config):
        return 0
    dtype, n, m = load.cache or load.dtype, load.tokens, source_tokens(config, load)
    own = (
        cache_bytes(counts, n, batch=load.batch, dtype=dtype, window=window)
        for window, every in _decoding(config, attentions)
        for counts in every
    )
    return sum(own) + sum(cache_bytes(counts, m, batch=load.batch, dtype=dtype) for counts in attentions.cross)


def states_bytes(config: ModelConfig, load: Load) -> int:
    """States of all recurrent layers, however many tokens there are."""
    size = BYTES[load.dtype]
    return load.batch * sum(layer.state_bytes(size) for layer in config.recurrent)


def largest_score_bytes(config: ModelConfig, attentions: Attentions, load: Load) -> int:
    """The largest `score_bytes` of a layer."""
    works = _works(config, attentions, load)
    return max(score_bytes(counts, work) for work, every in works for counts in set(every))


def model_kept_bytes(config: ModelConfig, attentions: Attentions, load: Load) -> int:
    """`kept_bytes` of all layers; the encoder's output, which all cross attention reads, once."""
    works = _works(config, attentions, load)
    context = load.batch * _first(config, load) * config.d_model * BYTES[load.dtype] if config.decoder_layers else 0
    return context + sum(k * kept_bytes(counts, work) for work, every in works for counts, k in Counter(every).items())


def _works(config: ModelConfig, attentions: Attentions, load: Load) -> list[tuple[Work, tuple[Counts, ...]]]:
    """The attention over all tokens, and the layers that compute it."""
    c, n, first = config, load.tokens, _first(config, load)
    if c.prefix:  # whatever the windows are
        return [(load.work(n, n, causal=False), attentions.layers)]
    works = [
        (load.work(first, first, causal=c.causal, window=window, chunked=c.chunked and window is not None), every)
        for window, every in _by_window(c, attentions.layers)
    ]
    if c.decoder_layers:
        works.append((load.work(n, n, causal=True), attentions.decoder))
        works.append((load.work(n, first, causal=False, projected=first, cross=True), attentions.cross))
    return works


def attentions_over_all(config: ModelConfig, attentions: Attentions, load: Load) -> dict[tuple[Counts, Work], int]:
    """The attention over all tokens of each kind of layer, and the number of such layers."""
    return Counter((counts, work) for work, every in _works(config, attentions, load) for counts in every)


def _by_window(config: ModelConfig, layers: tuple[Counts, ...]) -> list[tuple[int | None, tuple[Counts, ...]]]:
    """Each window, and the layers that have it."""
    found: dict[int | None, list[Counts]] = {}
    for window, counts in zip(config.windows, layers, strict=True):
        found.setdefault(window, []).append(counts)
    return [(window, tuple(every)) for window, every in found.items()]


def _decoding(config: ModelConfig, attentions: Attentions) -> list[tuple[int | None, tuple[Counts, ...]]]:
    """The same of the layers whose keys are the tokens that are generated."""
    return [(None, attentions.decoder)] if attentions.decoder else _by_window(config, attentions.layers)


def _seen(config: ModelConfig, load: Load, window: int | None) -> int:
    """Keys that a decoding step reads, with its own: of a chunk, those in it; materialised, all in the cache."""
    if window is None:
        return load.tokens
    if config.chunked and not load.materialised:
        return (load.tokens - 1) % window + 1
    return min(load.tokens, window)


def _first(config: ModelConfig, load: Load) -> int:
    """Tokens of the first stack of layers, or of the only one."""
    source = source_tokens(config, load)
    return source if config.decoder_layers else load.tokens


def _feed_forward(config: ModelConfig, width: int) -> int:
    return (3 if config.gated else 2) * config.d_model * width + _biases(config, width)


def _biases(config: ModelConfig, width: int) -> int:
    return (2 if config.gated else 1) * width + config.d_model if config.ff_bias else 0


def _shared_widths(config: ModelConfig) -> list[int]:
    """The width of each shared expert; of all together if only that is known."""
    return [config.shared_d_ff] if config.shared_d_ff else [config.d_ff] * config.shared_experts


def _common(config: ModelConfig) -> int:
    """Parameters that all tokens use in a block of experts: d_model weights per expert choose, and shared experts."""
    c = config
    shared = sum(_feed_forward(c, width) for width in _shared_widths(c))
    return c.experts * (c.d_model + c.router_bias) + shared + (c.d_model if c.shared_gate else 0)


def _recurrent(config: ModelConfig, load: Load, tokens: int, transfers: int = 1) -> list[Stage]:
    """The layers with a state; transfers: how often a state is read or written."""
    size, rows = BYTES[load.dtype], load.batch * tokens
    found = []
    for layer, k in Counter(config.recurrent).items():
        moved = 2 * (layer.width + layer.inside)
        states = transfers * load.batch * layer.state_bytes(size)
        found.append(
            Stage("recurrent layers", 2 * rows * layer.per_token, size * (layer.parameters + rows * moved)).times(k)
        )
        found.append(Stage("states", 2 * rows * layer.update, states).times(k))
    return found


def _other_stages(config: ModelConfig, load: Load, tokens: int) -> list[Stage]:
    c = config.others
    if c is None:
        return []
    numbers = c.parameters - c.table + tokens * (c.row + 2 * c.inside)
    return [Stage("other parts", 2 * tokens * c.work, BYTES[load.dtype] * numbers)]


def _encoder_stages(config: ModelConfig, load: Load, tokens: int) -> list[Stage]:
    """Feed-forward of `layers`, which are all layers of a model without cross attention."""
    c, size = config, BYTES[load.dtype]
    inside = c.d_model + (c.d_ff * c.active_experts + sum(_shared_widths(c)) if c.experts else c.d_ff)
    one = _feed_forward(c, c.d_ff)
    shared = _common(c) if c.experts else 0
    weights = c.experts * one + shared if c.experts else one
    used = c.active_experts * one + shared if c.experts else one
    biases = _biases(c, c.d_ff)
    if c.experts:
        biases = c.active_experts * biases + c.experts * c.router_bias
        biases += sum(_biases(c, width) for width in _shared_widths(c))
    stage = linear_stage("feed-forward", weights, used, tokens, inside, inside, size, common=shared, biases=biases)
    return [stage.times(c.layers - c.dense_layers), *_dense(c, load, tokens, c.dense_layers, c.dense_d_ff)]


def _decoder_stages(config: ModelConfig, load: Load, tokens: int) -> list[Stage]:
    """Feed-forward of a decoder with cross attention."""
    return _dense(config, load, tokens, config.decoder_layers, config.decoder_d_ff or config.d_ff)


def _dense(config: ModelConfig, load: Load, tokens: int, layers: int, width: int) -> list[Stage]:
    if not layers:
        return []
    weights, inside = _feed_forward(config, width), config.d_model + width
    stage = linear_stage(
        "feed-forward", weights, weights, tokens, inside, inside, BYTES[load.dtype], biases=_biases(config, width)
    )
    return [stage.times(layers)]


def _vocabulary(config: ModelConfig, load: Load, rows: int) -> list[Stage]:
    if config.output == "none":
        return []
    biases = config.vocab * config.output_bias
    table = config.vocab * config.d_model + biases
    size = BYTES[load.dtype]
    return [linear_stage("vocabulary", table, table, rows, config.d_model, config.vocab, size, biases=biases)]


def _added(stages: list[Stage]) -> list[Stage]:
    """Stages of the same name combined, in order of first appearance."""
    sums: dict[str, Stage] = {}
    for stage in stages:
        old = sums.get(stage.name, Stage(stage.name, 0, 0))
        sums[stage.name] = Stage(
            stage.name, old.flops + stage.flops, old.bytes + stage.bytes, old.exponentials + stage.exponentials
        )
    return list(sums.values())
