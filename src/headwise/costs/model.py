"""A whole Transformer: its parameters by part, and the cost of a forward pass or of one decoding step.

`attention` is the counts of one attention layer, as returned by `headwise.nn.counts.attention_of`.

>>> from headwise.costs.configs import find
>>> from headwise.nn.counts import attention_of
>>> config = find("gpt-2-small")
>>> sum(parameter_parts(config, attention_of(config)).values())
124439808
"""

from dataclasses import dataclass, replace

from headwise.costs.configs import ModelConfig
from headwise.costs.counts import Counts
from headwise.costs.stages import Stage, attention_stages, backward_flops, cache_bytes, linear_stage
from headwise.costs.work import BYTES, Work
from headwise.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """The input of a model: b texts of `tokens` tokens (encoder-decoder: source and target of that length each).

    materialised, dtype, cache: as in `Work`.
    """

    batch: int = 1
    tokens: int = 2048
    materialised: bool = False
    dtype: str = "bfloat16"
    cache: str | None = None

    def work(self, queries: int, keys: int, *, causal: bool, window: int | None = None, **options: object) -> Work:
        """The attention of one layer under this load."""
        return Work(
            self.batch, queries, keys, causal=causal, window=window if causal else None,
            materialised=self.materialised, dtype=self.dtype, cache=self.cache, **options,  # type: ignore[arg-type]
        )  # fmt: skip


def attention_layers(config: ModelConfig) -> int:
    """The number of attention layers; each decoder layer of an encoder-decoder has two."""
    return config.layers + 2 * config.decoder_layers


def parameter_parts(config: ModelConfig, attention: Counts) -> dict[str, int]:
    """Parameters by part, without parts that the model lacks. A tied output matrix counts as embedding."""
    c, norm = config, config.d_model * (2 if config.norm == "layer" else 1)
    dense, sparse = _feed_forward(c, c.dense_d_ff), _feed_forward(c, c.d_ff)
    if c.experts:
        sparse = c.experts * (sparse + c.d_model) + c.shared_experts * sparse  # a router: d_model weights per expert
    norms = c.layers * (2 if c.norms is None else c.norms) + c.decoder_layers * 3 + c.final_norm + c.embedding_norm
    parts = {
        "embedding": c.vocab * c.d_model,
        "positions, segments": (c.positions + c.segments) * c.d_model,
        "attention": attention_layers(c) * attention.parameters,
        "feed-forward": c.dense_layers * dense + (c.layers + c.decoder_layers - c.dense_layers) * sparse,
        "norms": norms * norm,
        "output": c.vocab * c.d_model if c.output == "own" else 0,
        "pooler": (c.d_model + 1) * c.d_model if c.pooler else 0,
        "other": c.extra,
    }
    return {name: count for name, count in parts.items() if count}


def active_parameters(config: ModelConfig, attention: Counts) -> int:
    """Parameters used for one token: all but those of unselected experts."""
    idle = config.experts - config.active_experts
    sparse_layers = config.layers + config.decoder_layers - config.dense_layers
    return sum(parameter_parts(config, attention).values()) - sparse_layers * idle * _feed_forward(config, config.d_ff)


def pass_stages(config: ModelConfig, attention: Counts, load: Load, *, logits: str = "last") -> list[Stage]:
    """One forward pass over all tokens, with the logits of the "last" position of each text, or of "all"."""
    n = load.tokens
    works = [(config.layers, load.work(n, n, causal=config.causal, window=config.window))]
    if config.decoder_layers:
        works += [
            (config.decoder_layers, load.work(n, n, causal=True)),
            (config.decoder_layers, load.work(n, n, causal=False, projected=n, cross=True)),
        ]
    layers = [stage.times(k) for k, work in works for stage in attention_stages(attention, work)]
    passes = 2 if config.decoder_layers else 1  # source and target
    rows = load.batch * (n if logits == "all" else 1)
    return _added([*layers, *_dense_stages(config, load, load.batch * n, passes, rows)])


def step_stages(config: ModelConfig, attention: Counts, load: Load) -> list[Stage]:
    """One decoding step: the last of `tokens` tokens in each text, which attends to its own key too."""
    if not decodes(config):
        raise ConfigError(
            f"config={config.name!r}: an encoder without a decoder does not generate text",
            f"config={config.name!r}：没有解码器的编码器不生成文本",
        )
    n = load.tokens
    works = [(config.decoder_layers or config.layers, load.work(1, n, causal=True, window=config.window))]
    if config.decoder_layers:
        works.append((config.decoder_layers, load.work(1, n, causal=False, projected=0, cross=True)))
    layers = [stage.times(k) for k, work in works for stage in attention_stages(attention.at_decoding, work)]
    decoder = replace(config, layers=config.decoder_layers, decoder_layers=0) if config.decoder_layers else config
    return _added([*layers, *_dense_stages(decoder, load, load.batch, 1, load.batch)])


def decodes(config: ModelConfig) -> bool:
    """Whether the model generates token by token."""
    return config.causal or config.decoder_layers > 0


def training_flops(config: ModelConfig, attention: Counts, load: Load) -> int:
    """Forward and backward over all tokens, with the logits of all positions."""
    forward = pass_stages(config, attention, load, logits="all")
    return sum(stage.flops for stage in forward) + backward_flops(forward, materialised=load.materialised)


def cached_numbers(config: ModelConfig, attention: Counts) -> int:
    """Numbers per token in the caches of all layers; in an encoder-decoder, of one token of the source and one of the
    target."""
    return attention.cache * (2 * config.decoder_layers or config.layers) if decodes(config) else 0


def model_cache_bytes(config: ModelConfig, attention: Counts, load: Load) -> int:
    """Keys and values of all layers after all tokens; in an encoder-decoder, those of source and target."""
    if not decodes(config):
        return 0
    layers = 2 * config.decoder_layers or config.layers
    dtype = load.cache or load.dtype
    return layers * cache_bytes(
        attention, load.tokens, batch=load.batch, dtype=dtype, window=config.window
    )  # fmt: skip


def _feed_forward(config: ModelConfig, width: int) -> int:
    matrices = (3 if config.gated else 2) * config.d_model * width
    return matrices + (width + config.d_model if config.ff_bias else 0)


def _dense_stages(config: ModelConfig, load: Load, tokens: int, passes: int, rows: int) -> list[Stage]:
    """Feed-forward and vocabulary; `passes` over half of the layers each where there are two stacks."""
    c, size = config, BYTES[load.dtype]
    inside = c.d_model + c.d_ff * (c.active_experts + c.shared_experts if c.experts else 1)
    one = _feed_forward(c, c.d_ff)
    shared = c.shared_experts * one + c.experts * c.d_model
    weights = c.experts * one + shared if c.experts else one
    used = c.active_experts * one + shared if c.experts else one
    stage = linear_stage("feed-forward", weights, used, tokens, inside, inside, size, shared)
    found = [stage.times(layers) for layers in (c.layers - c.dense_layers, c.decoder_layers)[:passes]]
    if c.dense_layers:
        wide, inside = _feed_forward(c, c.dense_d_ff), c.d_model + c.dense_d_ff
        found.append(linear_stage("feed-forward", wide, wide, tokens, inside, inside, size).times(c.dense_layers))
    if c.output != "none":
        table = c.vocab * c.d_model
        found.append(linear_stage("vocabulary", table, table, rows, c.d_model, c.vocab, size))
    return found


def _added(stages: list[Stage]) -> list[Stage]:
    """Stages of the same name combined, in order of first appearance."""
    sums: dict[str, Stage] = {}
    for stage in stages:
        old = sums.get(stage.name, Stage(stage.name, 0, 0))
        sums[stage.name] = Stage(
            stage.name, old.flops + stage.flops, old.bytes + stage.bytes, old.exponentials + stage.exponentials
        )
    return list(sums.values())
