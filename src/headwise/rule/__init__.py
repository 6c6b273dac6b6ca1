"""The definition of a score: S_ij = cap(scale · q_i·k_j) + biases where the mask allows (i, j), −∞ elsewhere.

p_ij = exp S_ij / Σ_j' exp S_ij'; a learned sink adds one more term to the sum. All kernels, the float64 reference and
the tiles of an `AttentionMap` follow this file.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, ShapeError
from headwise.fields import Cuts, Section
from headwise.masks import Grid, Mask, Span, State
from headwise.scores import Bias, RelativeBias, Score, SinkLogits, SoftCap, Terms, WithGap
from headwise.scores.base import together

TILE_ELEMENTS = 3 << 18  # scores in memory at once, over all batch entries and heads: 3 MB in float32
KEY_BLOCK = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Rule:
    """A mask, a scale and scores for a matrix of a given size: S_ij = cap(scale · q_i·k_j) + biases if the mask allows
    (i, j), else −∞ (Vaswani et al. 2017, eq. 1, with the additions of `headwise.scores`)."""

    mask: Mask
    scale: float
    grid: Grid
    scores: tuple[Score, ...] = ()

    @classmethod
    def of_terms(cls, mask: Mask, scale: float, grid: Grid, terms: Terms) -> "Rule":
        """The rule with the scores given as `terms`."""
        scores: list[Score] = [SoftCap(terms.soft_cap)] if terms.soft_cap > 0 else []
        if terms.relative is not None and terms.relative.shape[1]:
            table = RelativeBias(terms.relative, 1 - grid.n - grid.shift - (grid.n - 1 if terms.split else 0))
            # Tables of keys before and after a gap have no entry in common if it is n − 1 wide.
            scores.append(WithGap(table, terms.split, grid.n - 1) if terms.split else table)
        scores += [Bias(bias) for bias in terms.biases]
        if terms.sinks is not None:
            scores.append(SinkLogits(terms.sinks))
        return cls(mask, scale, grid, tuple(scores))

    def terms(self, like: Tensor) -> Terms:
        """The scores as tensors, in the dtype and on the device of `like`, which has the accumulation dtype."""
        if not self.scores:
            return Terms(self.grid.n)
        return together(self.grid.n, (score.terms(self.grid, like) for score in self.scores))

    def only(self, batch: int, head: int | None = None) -> "Rule":
        """The rule of one batch entry, and of one head or all."""
        cuts = {"b": Section(batch, batch + 1, self.grid.b)}
        return self.cut(cuts if head is None else {**cuts, "h": Section(head, head + 1, self.grid.h)})

    def cut(self, cuts: Cuts) -> "Rule":
        """The rule of some batch entries and heads."""
        scores = tuple(score.cut(cuts) for score in self.scores)
        return Rule(self.mask.cut(cuts), self.scale, self.grid.cut(cuts), scores)

    def part(self, rows: Span, cols: Span) -> "Rule":
        """The rule of a rectangle, q[:, :, rows] and k[:, :, cols], with the scores and mask of the whole matrix.
        Scores of whole rows, such as learned sinks, are omitted; code that merges parts adds them once."""
        return self._part(rows, cols, [score.part(rows, cols, self.grid) for score in self.scores])

    def rows(self, rows: Span) -> "Rule":
        """The rule of some rows and all keys, for q[:, :, rows], including scores of whole rows."""
        cols = Span(0, self.grid.m)
        return self._part(rows, cols, [score.part(rows, cols, self.grid) or score for score in self.scores])

    def _part(self, rows: Span, cols: Span, scores: Iterable[Score | None]) -> "Rule":
        here = tuple(score for score in scores if score is not None)
        return Rule(self.mask.part(rows, cols, self.grid), self.scale, self.grid.part(rows, cols), here)

    def kept(self) -> "Rule":
        """The rule for a map to keep: detached, and unaffected by later optimizer steps."""
        return Rule(self.mask, self.scale, self.grid, tuple(score.kept() for score in self.scores))

    def row_blocks(self, multiple: int = 1) -> Iterator[Span]:
        """Yield blocks of ≥ 16 queries with at most TILE_ELEMENTS scores a tile, of a multiple of `multiple` rows."""
        b, h, n, m = self.grid
        height = max(16, TILE_ELEMENTS // max(1, b * h * min(m, KEY_BLOCK)))
        height = -(-height // multiple) * multiple
        for start in range(0, n, height):
            yield Span(start, min(start + height, n))

    def tiles(
        self, rows: Span, width: int = KEY_BLOCK, within: Span | None = None
    ) -> Iterator[tuple[Span, State]]:  # fmt: skip
        """Yield the tiles of `width` keys, of all keys or those `within`, in order; fully masked tiles are skipped."""
        first, last = (0, self.grid.m) if within is None else within
        for start in range(first, last, width):
            cols = Span(start, min(start + width, last))
            state = self.mask.state(rows, cols, self.grid)
            if state is not State.EMPTY:
                yield cols, state

    def allowed(self, rows: Span, cols: Span, device: torch.device) -> Tensor:
        """Boolean [b or 1, h or 1, rows, cols] of a MIXED tile."""
        i = torch.arange(rows.start, rows.stop, device=device)
        j = torch.arange(cols.start, cols.stop, device=device)
        return self.mask.allowed(i, j, self.grid)

    def is_full(self) -> bool:
        """Whether every query attends to every key."""
        whole = Span(0, self.grid.n), Span(0, self.grid.m)
        return self.mask.state(*whole, self.grid) is State.FULL


def check_vectors(q: Any, k: Any, v: Any = None) -> None:
    """Raise ShapeError, DTypeError or DeviceError if these cannot be the queries, keys and values of one attention."""
    for name, x in (("q", q), ("k", k), ("v", k if v is None else v)):
        check_dense(name, x)
        if x.ndim != 4:
            raise ShapeError(f"{name}: expected [batch, heads, seq, head_dim], got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise DTypeError(f"{name}: dtype {x.dtype} is not supported; use float32, bfloat16, float16 or float64")
        if x.dtype != q.dtype:
            raise DTypeError(f"{name} is {x.dtype}, but q is {q.dtype}; convert them to one dtype")
        if x.device != q.device:
            raise DeviceError(f"{name} is on {x.device}, but q is on {q.device}; move them to one device")
    b, h, _, d = q.shape
    h_kv, m = k.shape[1], k.shape[2]
    if k.shape != (b, h_kv, m, d):
        raise ShapeError(f"k: shape {tuple(k.shape)} does not match q {tuple(q.shape)}; expected ({b}, h_kv, m, {d})")
    if v is not None and v.shape[:3] != (b, h_kv, m):
        raise ShapeError(
            f"v: shape {tuple(v.shape)} does not match k {tuple(k.shape)}; expected ({b}, {h_kv}, {m}, d_v)"
        )
    if h_kv == 0:
        raise ShapeError(f"k: shape {tuple(k.shape)} has no heads, expected at least one (num_kv_heads)")
    if h % h_kv:
        raise ShapeError(f"q has {h} heads, not a multiple of the {h_kv} heads of k and v (num_heads, num_kv_heads)")


def check_dense(name: str, x: Any) -> None:
    """Raise DTypeError for a nested or sparse tensor."""
    if not isinstance(x, Tensor) or (x.layout == torch.strided and not x.is_nested):
        return
    if x.is_nested:
        raise DTypeError(
            f"{name}: expected a dense tensor, got a nested one; pad its sequences ({name}.to_padded_tensor(0.0)) and "
            f"pass mask=Lengths(…), or pack them into one and pass mask=Documents(…)"
        )
    kind = str(x.layout).removeprefix("torch.")
    raise DTypeError(
        f"{name}: expected a dense tensor, got one of layout {kind}; pass {name}.to_dense(), and mask=… for entries "
        f"that no query may attend to, such as Lengths(…) or Documents(…)"
    )


def score_tile(
    q: Tensor, k: Tensor, scale: float, soft_cap: float = 0.0, added: Iterable[Tensor] = (), *,
    minus: Tensor | None = None, out: Tensor | None = None, slope: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """cap(scale · q kᵀ) + Σ added − minus before the mask, at most 0 with `minus`; as `raw_scores`. added: broadcasting
    to [b, h, r, c]; slope: output [b, h, r, c] for the cap's derivative, 1 − tanh²."""
    if soft_cap == 0.0:
        scores = raw_scores(q, k, scale, minus, out)
    else:
        scores = raw_scores(q, k, scale / soft_cap, None, out).tanh_()
        if slope is not None:
            torch.mul(scores, scores, out=slope).neg_().add_(1.0)
        scores.mul_(soft_cap)
        if minus is not None:
            scores.sub_(minus[..., None])
    for term in added:
        scores.add_(term)
    # A weight is at most 1; if scores are so large that their rounding errors are, the difference could exceed 0.
    return scores if minus is None else scores.clamp_(max=0.0)


def raw_scores(q: Tensor, k: Tensor, scale: float, minus: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """scale · q kᵀ − minus [b, h, r] before the mask: [b, h, r, c] in the accumulation dtype. out: contiguous."""
    # With h_kv < h (grouped queries) the group is folded into the rows: keys are never repeated in memory.
    b, h, r, d = q.shape
    h_kv, c = k.shape[1], k.shape[2]
    group = h // max(1, h_kv)  # a tile may have no heads
    rows = compute(q).reshape(b * h_kv, group * r, d)
    keys = compute(k).reshape(b * h_kv, c, d).transpose(1, 2)
    out = None if out is None else out.view(b * h_kv, group * r, c)
    if minus is None:
        scores = torch.bmm(rows, keys, out=out).mul_(scale)
    else:
        start = minus.reshape(b * h_kv, group * r, 1).to(rows.dtype)
        scores = torch.baddbmm(start, rows, keys, beta=-1.0, alpha=scale, out=out)
    return scores.view(b, h, r, c)


def grouped(weights: Tensor, values: Tensor) -> Tensor:
    """weights [b, h, r, c] times values [b, h_kv, c, e], each KV head shared by h / h_kv heads: [b, h, r, e]."""
    b, h, r, c = weights.shape
    h_kv, e = values.shape[1], values.shape[-1]
    out = torch.bmm(weights.reshape(b * h_kv, h // max(1, h_kv) * r, c), compute(values).reshape(b * h_kv, c, e))
    return out.view(b, h, r, e)


def seen_nonfinite(allowed: Tensor | None, values: Tensor, scores: Tensor) -> Tensor:
    """Where the output must be NaN, [b, h, r, d_v]: a non-finite value is visible to the query."""
    seen = torch.ones_like(scores) if allowed is None else allowed.to(scores.dtype).expand_as(scores)
    return grouped(seen, (~torch.isfinite(values)).to(scores.dtype)) > 0


def grouped_t(weights: Tensor, rows: Tensor, h_kv: int) -> Tensor:
    """weightsᵀ [b, h, c, r] times rows [b, h, r, e], summed over the heads of a group: [b, h_kv, c, e]."""
    b, h, r, c = weights.shape
    e = rows.shape[-1]
    group = h // max(1, h_kv)
    left = weights.reshape(b * h_kv, group * r, c).transpose(1, 2)
    out = torch.bmm(left, compute(rows).reshape(b * h_kv, group * r, e))
    return out.view(b, h_kv, c, e)


def diagonal_sums(x: Tensor) -> Tensor:
    """Sums along the diagonals of [b, h, r, c], from the lowest left to the highest right: [b, h, r + c − 1]."""
    b, h, r, c = x.shape
    if r == 0 or c == 0:
        return x.new_zeros(b, h, max(0, r + c - 1))
    # Flip the rows and shift each by its index: padding a row to r + c and reading the memory in rows of r + c - 1
    # shifts them.
    padded = torch.nn.functional.pad(x.flip(2), (0, r))
    skewed = padded.reshape(b, h, r * (r + c))[..., : r * (r + c - 1)].view(b, h, r, r + c - 1)
    return skewed.sum(2)


def add_diagonals(into: Tensor, terms: Terms, d_scores: Tensor, rows: Span, cols: Span) -> None:
    """Add to the gradient of `terms.relative` what that of a tile of scores [b, h, r, c] contributes, in place."""
    for part, where in terms.strips(rows, cols):
        strip = into[:, where]
        here = d_scores[..., part.start - cols.start : part.stop - cols.start]
        strip += diagonal_sums(here.sum(0, keepdim=True))[0].sum_to_size(strip.shape)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of learned sinks [h]: dS = p · (0 − δ), p = exp(sink − lse); lse and δ = Σ dO∘O are [b, h, n]."""
    return -(sink_weight(sinks, lse) * delta).sum((0, 2))


def sink_weight(sinks: Tensor, lse: Tensor) -> Tensor:
    """The weights of learned sinks [h], from the log-sum-exp of each row: [b, h, n]; 0 for fully masked queries."""
    return torch.exp(sinks.detach()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)


def without_masked_queries(x: Tensor, lse: Tensor) -> Tensor:
    """x [b, h, n, e] with 0 in the rows of fully masked queries, where lse [b, h, n] is −∞: a NaN there, times a weight
    of 0, would spread to the gradients of keys that other queries attend to."""
    return x.masked_fill((lse == -torch.inf)[..., None], 0.0)


def own_dtypes(x: Tensor) -> AbstractContextManager[object]:
    """Context manager without autocast on x's device, which would round float32 logits to 16 bits."""
    kind = x.device.type
    narrows = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if narrows else nullcontext()


def compute(x: Tensor) -> Tensor:
    """Convert x to the dtype of logits and softmax: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()
