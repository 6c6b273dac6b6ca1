"""Costs of a layer per token and per pair: the few numbers that determine FLOPs, bytes, memory and times."""

from dataclasses import dataclass

from headwise.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class Counts:
    """One attention layer. Work is in multiply-adds, sizes are in numbers (not bytes).

    parameters: number of parameters; used: those used for one token, if not all (mixtures).
    width: d_model. heads: number of softmaxes per (query, key) pair.
    per_query, per_key: work to project a token to its queries, and to its keys and values.
    scores, weighted_sum: work per pair in all heads: h·d_k and h·d_v. mixing: work per pair between heads.
    output: work per token after the weighted sum; output_weights: number of weights there, if different.
    query, keys, values, concat: numbers per token that one step passes to the next: queries, keys, values, and the
        concatenated heads. key_vectors, value_vectors: number of vectors that keys and values are split into.
    cached: whether keys and values are kept between decoding steps. shared: whether they are those of another layer,
        which computes and keeps them. masked: whether masks are supported.
    decoding: the counts of the same layer when computed with a cache, if they differ.
    """

    parameters: int
    width: int
    heads: int
    per_query: int
    per_key: int
    scores: int
    weighted_sum: int
    output: int
    query: int
    keys: int
    values: int
    concat: int
    key_vectors: int
    value_vectors: int
    mixing: int = 0
    used: int | None = None
    output_weights: int | None = None
    cached: bool = True
    shared: bool = False
    masked: bool = True
    decoding: "Counts | None" = None

    @property
    def met(self) -> int:
        """Parameters used for one token."""
        return self.parameters if self.used is None else self.used

    @property
    def out_parameters(self) -> int:
        """Parameters after the weighted sum; biases and norms all count as before it."""
        return self.output if self.output_weights is None else self.output_weights

    @property
    def met_before(self) -> int:
        """Parameters used for one token before the weighted sum."""
        return self.parameters - self.out_parameters if self.used is None else self.used - self.output

    @property
    def at_decoding(self) -> "Counts":
        """The counts of a decoding step."""
        return self if self.decoding is None else self.decoding

    @property
    def cache(self) -> int:
        """Numbers per token that are kept between decoding steps."""
        return self.at_decoding.keys + self.at_decoding.values if self.cached and not self.shared else 0

    @property
    def projected(self) -> int:
        """Numbers per token that the projection of keys and values writes."""
        return 0 if self.shared else self.keys + self.values

    @property
    def cached_vectors(self) -> int:
        """Vectors per token in the cache; an int8 cache stores one scale for each."""
        kept = self.cached and not self.shared
        return self.at_decoding.key_vectors + self.at_decoding.value_vectors if kept else 0


@dataclass(frozen=True)
class Attentions:
    """The attention layers of a model: those of its only stack or its encoder, and self and cross attention of each
    layer of a decoder with cross attention."""

    layers: tuple[Counts, ...]
    decoder: tuple[Counts, ...] = ()
    cross: tuple[Counts, ...] = ()

    @property
    def every(self) -> tuple[Counts, ...]:
        """All of them."""
        return self.layers + self.decoder + self.cross

    @property
    def decoding(self) -> tuple[Counts, ...]:
        """Those whose keys are the tokens that are generated."""
        return self.decoder or self.layers


def divided(d_model: int, num_heads: int) -> int:
    """d_model / num_heads, or an error that names both."""
    positive(d_model=d_model, num_heads=num_heads)
    if d_model % num_heads:
        raise ShapeError(
            f"d_model={d_model} is not divisible by num_heads={num_heads}; or give head_dim",
            f"d_model={d_model} 不能被 num_heads={num_heads} 整除；或给出 head_dim",
        )
    return d_model // num_heads


def positive(*, least: int = 1, **sizes: int) -> None:
    """Raise for the first size below `least`."""
    for name, size in sizes.items():
        if size < least:
            raise ConfigError(f"{name}={size}: expected at least {least}", f"{name}={size}：应不小于 {least}")
