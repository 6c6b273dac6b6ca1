"""The work of attention: sizes of a call, costs per token and pair, FLOPs, bytes, memory and the least time.

>>> allowed_pairs(4, 4), allowed_pairs(1, 4), allowed_pairs(4, 4, window=2), chunked_pairs(4, 4, 3), near_pairs(4, 2)
(10, 4, 7, 7, 10)

A multiply and an add are two FLOPs. Only matrix products are counted; the exponentials of the softmax are reported
separately; norms, biases, rotary angles and activations are ignored. Bytes are those that *must* be transferred if each
step reads its inputs and writes its results once. The roofline model (Williams et al. 2009, 10.1145/1498765.1498785): a
step takes at least FLOPs / peak, and at least bytes / bandwidth.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headwise.errors import ConfigError, ShapeError, check_choice

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_BYTES = {**BYTES, "int8": 1}


@dataclass(frozen=True)
class Work:
    """b sequences of n queries, aligned to the end of m keys.

    batch: b. queries: n. keys: m.
    causal: queries do not attend to later keys. window: queries attend to keys at a distance below it, to both sides if
        not causal. sinks: first keys that all queries attend to in addition to the window. chunked: the keys are
        divided into chunks of `window` instead, and queries attend to keys of their own chunk. Sinks and chunks require
        causal and a window.
    projected: keys that are computed in this call, while the others come from a cache; n if None.
    cross: the projected keys come from another sequence than the queries.
    materialised: whether all n×m scores are written to memory, regardless of the mask.
    dtype: of weights and activations. cache: of cached keys and values, the same by default; int8 has a float32
        scale per vector.
    """

    batch: int
    queries: int
    keys: int
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    chunked: bool = False
    projected: int | None = None
    cross: bool = False
    materialised: bool = False
    dtype: str = "bfloat16"
    cache: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "queries", "keys"):
            if getattr(self, name) < 1:
                raise ConfigError("{name}={value}: expected at least 1", name=name, value=getattr(self, name))
        if self.causal and self.queries > self.keys:
            raise ConfigError(
                f"queries={self.queries}, keys={self.keys}: causal attention requires queries <= keys, as "
                f"queries are aligned to the end of the keys"
            )
        both_sides = self.window is not None and not self.causal
        if both_sides and self.queries != self.keys:
            raise ConfigError(
                f"window={self.window}, queries={self.queries}, keys={self.keys}: a window that is not causal requires "
                f"queries = keys"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError("window={window}: expected at least 1", window=self.window)
        windowed = self.causal and self.window is not None
        if self.sinks < 0 or (self.sinks and not windowed):
            raise ConfigError(
                "sinks={sinks}: expected at least 0, and causal attention with a window", sinks=self.sinks
            )
        if self.chunked and (not windowed or self.sinks):
            raise ConfigError("chunked=True: expected causal attention with a window, and no sinks")
        for name, value, known in (("dtype", self.dtype, BYTES), ("cache", self.cache, CACHE_BYTES)):
            if value is not None:
                check_choice(name, value, known)

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one sequence and head that are computed: those allowed by the mask, or all n·m."""
        n, m, window = self.queries, self.keys, self.window
        if self.materialised or (window is None and not self.causal):
            return n * m
        if window is not None and self.chunked:
            return chunked_pairs(n, m, window)
        return allowed_pairs(n, m, window, self.sinks) if self.causal else near_pairs(n, window or n)

    @property
    def new_keys(self) -> int:
        """Keys of one sequence that are computed in this call."""
        return self.queries if self.projected is None else self.projected

    @property
    def seen_keys(self) -> int:
        """Keys of one sequence that any query may attend to."""
        if self.window is None or not self.causal:
            return self.keys
        reach = self.window - 1
        if self.chunked:  # of the first query
            reach = (self.keys - self.queries) % self.window
        return min(self.keys, reach + self.queries + self.sinks)

    @property
    def size(self) -> int:
        """Bytes per weight or activation."""
        return BYTES[self.dtype]


def allowed_pairs(queries: int, keys: int, window: int | None = None, sinks: int = 0) -> int:
    """Pairs under a causal mask: the sum of min(t, window + sinks) over the positions t of the queries, the last
    n of 1 … m; `Causal() & (Window(window) | Sinks(sinks))` as masks.

    Args:
        queries: n. keys: m. window: keys that a query sees; None for all. sinks: first keys beside the window.
    Returns:
        The number of pairs.
    """
    most = keys if window is None else min(keys, window + sinks)
    return _triangle(keys, most) - _triangle(keys - queries, most)


def chunked_pairs(queries: int, keys: int, chunk: int) -> int:
    """Pairs under a causal mask within chunks: the sum of (t − 1) mod chunk + 1 over the positions of the queries."""
    return _triangles(keys, chunk) - _triangles(keys - queries, chunk)


def near_pairs(tokens: int, window: int) -> int:
    """Pairs of n tokens at a distance below the window, to both sides."""
    return 2 * allowed_pairs(tokens, tokens, window) - tokens


def _triangle(positions: int, most: int) -> int:
    """Σ min(t, most) for t = 1 … positions."""
    small = min(positions, most)
    return small * (small + 1) // 2 + (positions - small) * most


def _triangles(positions: int, chunk: int) -> int:
    """Σ ((t − 1) mod chunk + 1) for t = 1 … positions."""
    whole, rest = divmod(positions, chunk)
    return whole * _triangle(chunk, chunk) + _triangle(rest, chunk)


def kept_tokens(tokens: int, window: int | None = None, sinks: int = 0) -> int:
    """Tokens in a cache after `tokens` tokens: all, or sinks + window − 1, since the next token adds its own key.

    Args:
        tokens: seen so far. window: keys that a query sees; None for all. sinks: first keys beside the window.
    Returns:
        The number of tokens.
    """
    return tokens if window is None else min(tokens, sinks + window - 1)


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
            "d_model={d_model} is not divisible by num_heads={num_heads}; or give head_dim",
            d_model=d_model,
            num_heads=num_heads,
        )
    return d_model // num_heads


def positive(*, least: int = 1, **sizes: int) -> None:
    """Raise for the first size below `least`."""
    for name, size in sizes.items():
        if size < least:
            raise ConfigError("{name}={size}: expected at least {least}", name=name, size=size, least=least)


LSE_BYTES = SCALE_BYTES = 4  # float32


@dataclass(frozen=True)
class Stage:
    """One step of attention.

    name: of the step. flops: its FLOPs. bytes: what it must transfer. exponentials: of its softmax.
    """

    name: str
    flops: int
    bytes: int
    exponentials: int = 0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, in FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def times(self, count: int) -> "Stage":
        """The same step `count` times."""
        return Stage(self.name, count * self.flops, count * self.bytes, count * self.exponentials)


@dataclass(frozen=True)
class Machine:
    """The parameters of a roofline: peak in FLOP/s and memory bandwidth in bytes/s; by: their source."""

    peak: float
    bandwidth: float
    by: str = "as given"

    def __post_init__(self) -> None:
        for name in ("peak", "bandwidth"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    "{name}={value}: expected a finite number above 0", name=name, value=getattr(self, name)
                )

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic, and below which memory, is the limit."""
        return self.peak / self.bandwidth

    def seconds(self, stages: Iterable[Stage]) -> float:
        """A lower bound of the time of the steps in sequence."""
        return sum(max(stage.flops / self.peak, stage.bytes / self.bandwidth) for stage in stages)

    def limit(self, stage: Stage) -> str:
        """What limits a step: "arithmetic" or "memory"."""
        return "arithmetic" if stage.intensity >= self.ridge else "memory"


def attention_stages(counts: Counts, work: Work) -> list[Stage]:
    """The forward pass of one layer: projections, scores, softmax, head mixing, weighted sum, output.

    If materialised, the scores are written, the softmax reads them and writes the weights, the weighted sum reads
    these, and each of the two mixings reads and writes once more. If blockwise, none of them is written to memory.

    Args:
        counts: of the design. work: the input.
    Returns:
        The stages that do something, in their order.
    Raises:
        ConfigError: for a causal mask and a design that does not support masks.
    """
    if work.causal and not counts.masked:
        raise ConfigError("causal=True: this design does not support masks, so attention is always full")
    b, n, new, size = work.batch, work.queries, work.new_keys, work.size
    pairs = b * work.pairs
    matrix = b * work.queries * work.keys * counts.heads * size if work.materialised else 0
    inputs = b * n + (b * new if work.cross else 0)
    weights = _read(counts.parameters - counts.out_parameters, counts.met_before, b * max(n, new))
    if not new:
        weights -= min(counts.per_key, weights)  # keys of a context, already projected
    read_keys, read_values = _read_cache(counts, work)
    found = [
        Stage(
            "projections",
            2 * b * (n * counts.per_query + new * counts.per_key),
            size * (weights + inputs * counts.width + b * n * counts.query + b * new * counts.projected),
        ),
        Stage("scores", 2 * pairs * counts.scores, size * b * n * counts.query + read_keys + matrix),
        Stage("softmax", 0, 2 * matrix, pairs * counts.heads),
        Stage("head mixing", 2 * pairs * counts.mixing, 4 * matrix if counts.mixing else 0),
        Stage("weighted sum", 2 * pairs * counts.weighted_sum, matrix + read_values + size * b * n * counts.concat),
        linear_stage("output", counts.out_parameters, counts.output, b * n, counts.concat, counts.width, size),
    ]
    return [stage for stage in found if stage.flops or stage.bytes or stage.exponentials]


def linear_stage(
    name: str, weights: int, used: int, tokens: int, reads: int, writes: int, size: int, *, common: int = 0,
    biases: int = 0,
) -> Stage:  # fmt: skip
    """A linear map: each token uses `used` of all weights, `common` of them the same for all tokens, and reads and
    writes these numbers of `size` bytes. `biases` of the used ones are added and multiply nothing."""
    return Stage(
        name, 2 * (used - biases) * tokens, size * (_read(weights, used, tokens, common) + tokens * (reads + writes))
    )


def backward_flops(forward: Iterable[Stage], *, materialised: bool) -> int:
    """FLOPs of the gradients: each product has two, for its two factors. What was not saved is recomputed:
    blockwise attention recomputes the scores (2.5 times its forward pass if d_k = d_v), as FlashAttention does."""
    return sum(
        2 * stage.flops + (stage.flops if stage.name in ("scores", "head mixing") and not materialised else 0)
        for stage in forward
    )


def score_bytes(counts: Counts, work: Work) -> int:
    """Memory of the scores of one layer: b·h·n·m numbers, or blockwise one float32 log-sum-exp per query and head."""
    rows = work.batch * counts.heads * work.queries
    return rows * work.keys * work.size if work.materialised else rows * LSE_BYTES


def kept_bytes(counts: Counts, work: Work) -> int:
    """Memory that the forward of one layer saves for its backward pass: x, q, k, v, the concatenated heads, and the
    weights (materialised) or the log-sum-exps (blockwise). The context of cross attention, which all layers share, is
    not counted."""
    tokens = work.queries * (counts.width + counts.query + counts.concat) + work.new_keys * counts.projected
    return work.batch * tokens * work.size + score_bytes(counts, work)


def cache_bytes(
    counts: Counts, tokens: int, *, batch: int = 1, dtype: str = "bfloat16", window: int | None = None, sinks: int = 0
) -> int:
    """Bytes of the cache of one layer after `tokens` tokens; int8 has a float32 scale for each key and value vector.

    Args:
        counts: of the design. tokens: seen so far. batch: sequences. dtype: of the cache. window: keys that a query
            sees; None for all. sinks: first keys that stay beside the window.
    Returns:
        Bytes of all sequences.
    """
    check_choice("dtype", dtype, CACHE_BYTES)
    scales = counts.cached_vectors * SCALE_BYTES if dtype == "int8" else 0
    return batch * kept_tokens(tokens, window, sinks) * (counts.cache * CACHE_BYTES[dtype] + scales)


def _read(weights: int, used: int, tokens: int, common: int = 0) -> int:
    """Weights read for `tokens` tokens, each once; of experts, the mean if tokens choose evenly and independently."""
    chosen = weights - common
    if used >= weights or not chosen:
        return weights
    return common + round(chosen * (1 - (1 - (used - common) / chosen) ** tokens))


def _read_cache(counts: Counts, work: Work) -> tuple[int, int]:
    """Bytes of keys and of values that are read: new ones in the computation's dtype, cached ones in the cache's."""
    new = min(work.new_keys, work.seen_keys)
    old = work.seen_keys - new
    dtype = work.cache or work.dtype
    one, scale = CACHE_BYTES[dtype], SCALE_BYTES if dtype == "int8" else 0

    def read(numbers: int, vectors: int) -> int:
        return work.batch * (new * numbers * work.size + old * (numbers * one + vectors * scale))

    return read(counts.keys, counts.key_vectors), read(counts.values, counts.value_vectors)
