"""FLOPs and bytes of each step of attention, its memory, and a lower bound of its time.

A multiply and an add are two FLOPs, as usual. Only matrix products are counted; the exponentials of the softmax are
reported separately; norms, biases, rotary angles and activations are ignored. Bytes are those that *must* be
transferred if each step reads its inputs and writes its results once. The roofline model (Williams et al. 2009,
10.1145/1498765.1498785) gives times: a step takes at least FLOPs / peak, and at least bytes / bandwidth. Actual kernels
take longer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headwise.costs.counts import Counts
from headwise.costs.work import CACHE_BYTES, Work, kept_tokens
from headwise.errors import ConfigError, check_choice

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
                    f"{name}={getattr(self, name)}: expected a finite number above 0",
                    f"{name}={getattr(self, name)}：应为大于 0 的有限数",
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
    """A linear map: each token uses `used` of all weights, `common` of which are the same for all tokens, and reads and
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
    """Weights read for `tokens` tokens, each once: of those that tokens choose from, such as experts, the mean number
    if each is chosen equally often and tokens choose independently."""
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
