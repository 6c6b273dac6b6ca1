"""The score modifications: biases, learned sinks, soft caps, and one number per distance."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError, check_declared
from headwise.fields import Array, Number, Whole
from headwise.masks import Grid, Span
from headwise.scores.base import Score, Terms, check_device, check_floats


class Bias(Score):
    """A bias added to the scores, [b or 1, h or 1, n or 1, m or 1]; may require gradients.

    −∞ hides a key as a mask does, but the key still counts as allowed in measures.
    """

    repeats = True
    placed = False  # a part of the matrix has a slice of it
    holds = {"values": Array("bhnm")}

    def __init__(self, values: Tensor) -> None:
        self.values = check_floats("Bias(values)", values, 4)

    def check(self, grid: Grid, device: torch.device) -> None:
        if any(size not in (1, full) for size, full in zip(self.values.shape, grid, strict=True)):
            raise ShapeError(
                f"score=Bias(values): shape {tuple(self.values.shape)}, expected "
                f"({', '.join(f'{size} or 1' for size in grid)})"
            )
        check_device("Bias(values)", self.values, device)

    def with_gap(self, gap: Span, grid: Grid) -> Score:
        """Its values may have the dropped keys or not."""
        keys, whole = self.values.shape[3], grid.m + gap.size
        if keys not in (1, grid.m, whole):
            raise ShapeError(
                f"score=Bias(values): {keys} keys, expected {whole}, {grid.m} without the {gap.size} that the cache "
                f"has dropped, or 1"
            )
        if keys != whole:
            return self
        return Bias(torch.cat((self.values[..., : gap.start], self.values[..., gap.stop :]), -1))

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        return Terms(grid.n, biases=(self.values,))

    def __repr__(self) -> str:
        return f"Bias(<{'×'.join(map(str, self.values.shape))}>)"


class SinkLogits(Score):
    """A learned logit per head in the softmax denominator, without a value (gpt-oss, 2508.10925; Miller 2023 with 0).

    p_ij = exp S_ij / (exp sink + Σ_j' exp S_ij'): rows sum to less than 1. The log-sum-exp includes the sink, except
    for fully masked queries, where it is −∞.

    Args:
        logits: [h] numbers or a floating tensor, which may require gradients.
    """

    placed = False
    holds = {"logits": Array("h")}

    def __init__(self, logits: Sequence[float] | Tensor) -> None:
        self.logits = check_floats("SinkLogits(logits)", logits, 1)

    def check(self, grid: Grid, device: torch.device) -> None:
        if len(self.logits) != grid.h:
            raise ShapeError(f"score=SinkLogits(logits): {len(self.logits)} logits for {grid.h} heads")
        check_device("SinkLogits(logits)", self.logits, device)

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        return Terms(grid.n, sinks=self.logits.to(like))

    def part(self, rows: Span, cols: Span, grid: Grid) -> None:
        return None  # it belongs to whole rows

    def __repr__(self) -> str:
        return f"SinkLogits(<{len(self.logits)}>)"


@dataclass(frozen=True)
class SoftCap(Score):
    """cap · tanh(scale·q·k / cap): scores stay within ±cap (Gemma 2, 2408.00118 §2)."""

    cap: float
    placed = False
    holds = {"cap": Number()}
    saved_as = "headwise.scores.kinds.SoftCap"

    def __post_init__(self) -> None:
        if not isinstance(self.cap, (int, float)) or not (self.cap > 0 and math.isfinite(self.cap)):
            raise ConfigError(f"SoftCap({self.cap!r}): the cap must be a finite number > 0")

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        return Terms(grid.n, soft_cap=self.cap)


class Relative(Score, abstract=True):
    """Base of biases that depend on distances only: a class declares `holds` and `at`."""

    repeats = True
    placed = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_declared(cls, Relative, {"at": "the bias of each distance"})

    @abstractmethod
    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias [h or 1, len(offset)] of keys at position + offset, for integer offsets."""

    def with_gap(self, gap: Span, grid: Grid) -> Score:
        return super().with_gap(gap, grid) if gap.start else self  # no key that remains is before the gap

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        first, rows = 1 - grid.n - grid.shift, max(1, grid.n)  # no queries have the table of one
        found = self.at(torch.arange(first, first + rows + grid.m - 1, device=like.device), like.dtype)
        if found.shape[0] not in (1, grid.h):
            raise ShapeError(
                f"score={self!r}: biases of {found.shape[0]} heads, expected {grid.h} or 1; `holds` of "
                f"{type(self).__name__} names the axis h of each tensor that has it"
            )
        return Terms(grid.n, relative=found)


class ALiBi(Relative):
    """−slope · |i − j|, one slope per head (Press et al. 2022, 2108.12409 §3); i is the query position on the key axis.

    Args:
        slopes: [h] numbers or a floating tensor, which may require gradients.
    """

    repeats = False
    holds = {"slopes": Array("h")}

    def __init__(self, slopes: Sequence[float] | Tensor) -> None:
        self.slopes = check_floats("ALiBi(slopes)", slopes, 1)

    @classmethod
    def standard(cls, num_heads: int) -> "ALiBi":
        """Return ALiBi with the paper's slopes: 2^(−8/h), 2^(−16/h), … 2^(−8) for h a power of two; otherwise those of
        the next lower power of two, then every other one of the next higher."""
        if num_heads < 1:
            raise ConfigError(f"ALiBi.standard({num_heads}): expected at least one head")
        power = 1 << (num_heads.bit_length() - 1)
        slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
        slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power, 2)][: num_heads - power]
        return cls(slopes)

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        return -self.slopes.to(offset.device, dtype)[:, None] * offset.abs()

    def terms_with_gap(self, gap: Span, grid: Grid, like: Tensor) -> Terms:
        """Keys before the gap are farther from all queries by its length: a bias of these keys, which more kernels
        support than a gap in the distances of several queries."""
        farther = torch.arange(grid.m, device=like.device) < gap.start
        bias = self.slopes.to(like)[:, None] * (gap.start - gap.stop) * farther
        return replace(self.terms(grid, like), biases=(bias[None, :, None],))

    def check(self, grid: Grid, device: torch.device) -> None:
        if len(self.slopes) != grid.h:
            raise ShapeError(f"score=ALiBi(slopes): {len(self.slopes)} slopes for {grid.h} heads")

    def __repr__(self) -> str:
        return f"ALiBi(<{len(self.slopes)} slopes>)"


class RelativeBias(Relative):
    """A bias per distance: values[:, j − i − first], clamped to the ends (T5, 1910.10683 §2.1).

    Args:
        values: [h or 1, L] floating, may require gradients. values[:, t] is for keys at position + first + t.
        first: the lowest offset key − position, usually negative.
    """

    holds = {"values": Array("h*"), "first": Whole()}

    def __init__(self, values: Tensor, first: int) -> None:
        self.values, self.first = check_floats("RelativeBias(values)", values, 2), first
        if not isinstance(first, int) or isinstance(first, bool):
            raise ConfigError(f"RelativeBias(first={first!r}): expected a whole number")
        if self.values.shape[1] == 0:
            raise ShapeError(f"RelativeBias(values): expected [h or 1, L] with L >= 1, got {tuple(values.shape)}")

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        values = self.values.to(offset.device, dtype)
        return values[:, (offset - self.first).clamp(0, values.shape[1] - 1)]

    def with_gap(self, gap: Span, grid: Grid) -> Score:
        beyond = gap.start - 1 - grid.shift <= self.first  # the keys before the gap have the bias of `first` anyhow
        return self if beyond else super().with_gap(gap, grid)

    def check(self, grid: Grid, device: torch.device) -> None:
        if self.values.shape[0] not in (1, grid.h):
            raise ShapeError(
                f"score=RelativeBias(values): shape {tuple(self.values.shape)}, expected ({grid.h} or 1, L)"
            )
        check_device("RelativeBias(values)", self.values, device)

    def __repr__(self) -> str:
        h, length = self.values.shape
        return f"RelativeBias(<{h}×{length}>, first={self.first})"


def t5_bias(weight: Tensor, *, bidirectional: bool, max_distance: int = 128) -> RelativeBias:
    """Return T5's bias from its embedding of distance buckets (Raffel et al. 2020, 1910.10683 §2.1).

    Half of a direction's buckets hold one distance each, the others grow logarithmically up to max_distance, and
    larger distances share the last. T5 does not scale q·k: call `attend(…, scale=1.0)`.

    Args:
        weight: [num_buckets, h], such as `relative_attention_bias.weight`; gradients flow to it.
        bidirectional: True for encoders: half of the buckets are for keys after the query. False for decoders: keys
            after the query share the bucket of distance 0, and a causal mask hides them.
    """
    weight = check_floats("t5_bias(weight)", weight, 2)
    sides = 2 if bidirectional else 1
    buckets = weight.shape[0] // sides
    exact = buckets // 2
    if weight.shape[0] % sides or exact < 1 or max_distance <= exact:
        raise ConfigError(
            f"t5_bias(weight {tuple(weight.shape)}, bidirectional={bidirectional}, max_distance={max_distance}): "
            f"expected num_buckets of at least {2 * sides}, divisible by {sides}, and max_distance > {max(exact, 1)}, "
            f"the distances with a bucket of their own"
        )
    offset = torch.arange(-max_distance, max_distance + 1 if bidirectional else 1, device=weight.device)
    distance = offset.abs()
    # In float32 and in this order: rounding decides at the edges of buckets, and the weights were trained with it.
    wide = torch.log(distance.clamp_min(1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    bucket = torch.where(distance < exact, distance, (exact + wide.long()).clamp_max(buckets - 1))
    bucket = bucket + (offset > 0) * buckets
    floats = weight.to(
        torch.promote_types(weight.dtype, torch.float32)
    )  # a bucket accumulates gradients of many distances
    return RelativeBias(floats[bucket].mT, -max_distance)
