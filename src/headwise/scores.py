"""What changes a score between q·k and the softmax: soft caps, biases by distance, biases of your own, learned sinks.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 8, 100, 16)
    >>> out = hw.attend(q, k, v, mask=hw.Causal(), score=(hw.SoftCap(30.0), hw.ALiBi.standard(8)))

They are objects in a tuple. Whatever its order, S_ij = cap(scale · q_i·k_j) + all biases, then the mask; a learned
sink only enters the denominator. Their tensors may require gradients. What depends on the distance alone is kept as
one number a distance, so only a `Bias` takes n×m memory: the caller's own.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import ConfigError, DeviceError, DTypeError, ShapeError, check_declared
from headwise.masks import Grid, Span

__all__ = ["ALiBi", "Bias", "Relative", "RelativeBias", "Score", "SinkLogits", "SoftCap", "t5_bias"]


class Score:
    """Base of what can stand in `score=(…)`.

    A class of its own declares what it is of a single head and of a rectangle of the matrix; nothing is assumed. One
    below `Relative`, `Bias` or another of the scores here has that of them.
    """

    repeats = False  # whether two of its kind in one call make sense
    placed: bool  # whether it depends on the distance of queries and keys

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_declared(cls, Score, {
            "placed": "whether it depends on the distance of queries and keys",
            "only": "the score as one batch entry and head has it",
            "part": "the score as a rectangle of the matrix has it",
        })  # fmt: skip

    def check(self, grid: Grid, device: torch.device) -> None:
        """Raise if this cannot be laid over such a matrix."""

    def only(self, batch: int, head: int) -> "Score":
        """The score as one batch entry and head has it, for a grid of batch 1 and one head."""
        raise NotImplementedError

    def part(self, rows: Span, cols: Span) -> "Score":
        """The score as a rectangle of the matrix has it."""
        raise NotImplementedError

    def kept(self) -> "Score":
        """The score as a map keeps it: without graph, and with numbers that no optimiser changes. Unless overridden, a
        copy in which tensors are such."""
        tensors = {name: _kept(x) for name, x in self.__dict__.items() if isinstance(x, Tensor)}
        if not tensors:
            return self
        found = copy(self)
        found.__dict__.update(tensors)
        return found


@dataclass(frozen=True)
class SoftCap(Score):
    """cap · tanh(scale·q·k / cap): scores stay within ±cap (Gemma 2, 2408.00118 §2)."""

    cap: float
    placed = False

    def only(self, batch: int, head: int) -> Score:
        return self

    def part(self, rows: Span, cols: Span) -> Score:
        return self

    def __post_init__(self) -> None:
        if not (self.cap > 0 and math.isfinite(self.cap)):
            raise ConfigError(f"SoftCap({self.cap}): the cap must be finite and > 0")


class Relative(Score, ABC):
    """Base of biases that depend on the distance alone."""

    repeats = True
    placed = True

    @abstractmethod
    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias [h or 1, len(offset)] of keys that stand at position + offset, for integer offsets."""

    def only(self, batch: int, head: int) -> Score:
        return _OfOneHead(self, head)

    def part(self, rows: Span, cols: Span) -> Score:
        return self


class _OfOneHead(Relative):
    """What a `Relative` of any class is for one head."""

    def __init__(self, whole: Relative, head: int) -> None:
        self.whole, self.head = whole, head

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        found = self.whole.at(offset, dtype)
        return found if len(found) == 1 else found[self.head : self.head + 1]

    def only(self, batch: int, head: int) -> Score:
        return self

    def kept(self) -> Score:
        kept = self.whole.kept()
        assert isinstance(kept, Relative)
        return _OfOneHead(kept, self.head)

    def __repr__(self) -> str:
        return repr(self.whole)


class ALiBi(Relative):
    """−slope · |i − j|, one slope a head (Press et al. 2022, 2108.12409 §3); i is the query's position on the key axis.

    Args:
        slopes: [h] numbers or a floating tensor, which may require gradients.
    """

    repeats = False

    def __init__(self, slopes: Sequence[float] | Tensor) -> None:
        self.slopes = _floats("ALiBi(slopes)", slopes, 1)

    @classmethod
    def standard(cls, num_heads: int) -> "ALiBi":
        """The paper's slopes: 2^(−8/h), 2^(−16/h), … 2^(−8) for h a power of two; for others those of the power of
        two below, then every other one of the power above."""
        if num_heads < 1:
            raise ConfigError(f"ALiBi.standard({num_heads}): expected at least one head")
        power = 1 << (num_heads.bit_length() - 1)
        slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
        slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power, 2)][: num_heads - power]
        return cls(slopes)

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        return -self.slopes.to(offset.device, dtype)[:, None] * offset.abs()

    def check(self, grid: Grid, device: torch.device) -> None:
        if len(self.slopes) != grid.h:
            raise ShapeError(f"score=ALiBi(slopes): {len(self.slopes)} slopes for {grid.h} heads")

    def only(self, batch: int, head: int) -> Score:
        return ALiBi(self.slopes[head : head + 1])

    def __repr__(self) -> str:
        return f"ALiBi(<{len(self.slopes)} slopes>)"


class RelativeBias(Relative):
    """A bias for each distance: values[:, j − i − first], the ends standing for all beyond (T5, 1910.10683 §2.1).

    Args:
        values: [h or 1, L] floating, may require gradients. values[:, t] is for keys at position + first + t.
        first: the lowest offset key − position, mostly negative.
    """

    def __init__(self, values: Tensor, first: int) -> None:
        self.values, self.first = _floats("RelativeBias(values)", values, 2), int(first)
        if self.values.shape[1] == 0:
            raise ShapeError(f"RelativeBias(values): expected [h or 1, L] with L >= 1, got {tuple(values.shape)}")

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        values = self.values.to(offset.device, dtype)
        return values[:, (offset - self.first).clamp(0, values.shape[1] - 1)]

    def check(self, grid: Grid, device: torch.device) -> None:
        if self.values.shape[0] not in (1, grid.h):
            raise ShapeError(
                f"score=RelativeBias(values): shape {tuple(self.values.shape)}, expected ({grid.h} or 1, L)"
            )
        _same_device("RelativeBias(values)", self.values, device)

    def only(self, batch: int, head: int) -> Score:
        return self if len(self.values) == 1 else RelativeBias(self.values[head : head + 1], self.first)

    def __repr__(self) -> str:
        h, length = self.values.shape
        return f"RelativeBias(<{h}×{length}>, first={self.first})"


def t5_bias(weight: Tensor, *, bidirectional: bool, max_distance: int = 128) -> RelativeBias:
    """T5's bias from its embedding of distance buckets (Raffel et al. 2020, 1910.10683 §2.1).

    Half of a direction's buckets are one distance each, the rest widen logarithmically up to max_distance, and
    everything farther shares the last. T5 itself does not scale q·k: call `attend(…, scale=1.0)`.

    Args:
        weight: [num_buckets, h], such as `relative_attention_bias.weight`; gradients flow to it.
        bidirectional: encoders: half of the buckets are for keys after the query. Decoders: False, keys after
            the query share the bucket of distance 0, for a causal mask to hide.
    """
    weight = _floats("t5_bias(weight)", weight, 2)
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
    # In float32 and in this order: at a bucket's edge the rounding decides, and the weights were trained with this one.
    wide = torch.log(distance.clamp_min(1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    bucket = torch.where(distance < exact, distance, (exact + wide.long()).clamp_max(buckets - 1))
    bucket = bucket + (offset > 0) * buckets
    floats = weight.to(torch.promote_types(weight.dtype, torch.float32))  # a bucket adds up gradients of many distances
    return RelativeBias(floats[bucket].mT, -max_distance)


class Bias(Score):
    """Any bias added to the scores, [b or 1, h or 1, n or 1, m or 1]; may require gradients.

    It is added where the mask allows. −∞ hides a key like a mask, but counts as allowed where keys are counted.
    """

    repeats = True
    placed = False  # its part is cut out

    def __init__(self, values: Tensor) -> None:
        self.values = _floats("Bias(values)", values, 4)

    def check(self, grid: Grid, device: torch.device) -> None:
        if any(size not in (1, full) for size, full in zip(self.values.shape, grid, strict=True)):
            raise ShapeError(
                f"score=Bias(values): shape {tuple(self.values.shape)}, expected "
                f"({', '.join(f'{size} or 1' for size in grid)})"
            )
        _same_device("Bias(values)", self.values, device)

    def only(self, batch: int, head: int) -> Score:
        b, h = self.values.shape[:2]
        at, on = min(batch, b - 1), min(head, h - 1)
        return Bias(self.values[at : at + 1, on : on + 1])

    def part(self, rows: Span, cols: Span) -> Score:
        return Bias(self.values[cell(self.values, rows, cols)])

    def __repr__(self) -> str:
        return f"Bias(<{'×'.join(map(str, self.values.shape))}>)"


class SinkLogits(Score):
    """A learned logit a head that takes weight and gives no value (gpt-oss, 2508.10925; Miller 2023 with 0).

    p_ij = exp S_ij / (exp sink + Σ_j' exp S_ij'): rows sum to less than 1. The log-sum-exp holds the sink too, except
    in rows that see nothing, where it stays −∞.

    Args:
        logits: [h] numbers or a floating tensor, which may require gradients.
    """

    placed = False

    def __init__(self, logits: Sequence[float] | Tensor) -> None:
        self.logits = _floats("SinkLogits(logits)", logits, 1)

    def check(self, grid: Grid, device: torch.device) -> None:
        if len(self.logits) != grid.h:
            raise ShapeError(f"score=SinkLogits(logits): {len(self.logits)} logits for {grid.h} heads")
        _same_device("SinkLogits(logits)", self.logits, device)

    def only(self, batch: int, head: int) -> Score:
        return SinkLogits(self.logits[head : head + 1])

    def part(self, rows: Span, cols: Span) -> Score:
        return self

    def __repr__(self) -> str:
        return f"SinkLogits(<{len(self.logits)}>)"


def cell(bias: Tensor, rows: Span, cols: Span) -> tuple[slice, ...]:
    """Where a tile lies in a bias [b or 1, h or 1, n or 1, m or 1]."""
    sides = zip(bias.shape[2:], (rows, cols), strict=True)
    return slice(None), slice(None), *(slice(0, 1) if size == 1 else slice(*span) for size, span in sides)


def check_scores(scores: object, grid: Grid, device: torch.device) -> tuple[Score, ...]:
    """`score=…` as a tuple, each fit for the grid and none twice that cannot be."""
    given = (scores,) if isinstance(scores, Score) else scores
    kinds = (SoftCap, Relative, Bias, SinkLogits)
    if not isinstance(given, Sequence) or not all(isinstance(score, kinds) for score in given):
        raise DTypeError(f"score: expected headwise scores such as (SoftCap(30.0),), got {scores!r}")
    for at, score in enumerate(given):
        if not score.repeats and any(type(other) is type(score) for other in given[:at]):
            raise ConfigError(f"score: two of {type(score).__name__}, and only one has a meaning")
        score.check(grid, device)
    return tuple(given)


def _floats(name: str, values: Sequence[float] | Tensor, ndim: int) -> Tensor:
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=torch.float64).float() if ndim == 1 else torch.as_tensor(values)
    if not values.is_floating_point():
        raise DTypeError(f"{name}: expected floating numbers, got {values.dtype}")
    if values.ndim != ndim:
        raise ShapeError(f"{name}: expected {ndim} dimension{'s' * (ndim > 1)}, got shape {tuple(values.shape)}")
    return values


def _same_device(name: str, values: Tensor, device: torch.device) -> None:
    if values.device != device:
        raise DeviceError(f"score={name} is on {values.device}, but q is on {device}; move them to one device")


def _kept(values: Tensor) -> Tensor:
    """Detached; copied if it is a parameter or a view of one, which the next step of training would change."""
    still = values.detach()
    # torch.compile cannot ask what is a view.
    shared = values.is_leaf or torch.compiler.is_dynamo_compiling() or values._is_view()
    return still.clone() if values.requires_grad and shared else still
