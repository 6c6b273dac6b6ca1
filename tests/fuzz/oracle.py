"""What attention is, in float64 and from the formulas: outputs, log-sum-exp and gradients, with the whole matrix.

It shares no code with the library. A mask is a tree of ("and" | "or", left, right) over leaves, a score is a tuple
that begins with its kind; both hold names of tensors, which lie in `held`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Tree = tuple[Any, ...]


def allowed(mask: Tree, b: int, h: int, n: int, m: int, held: Mapping[str, Tensor]) -> Tensor:
    """Boolean [b, h, n, m]: which keys each query may see. Query i has the position i + m − n on the key axis."""
    i, j = torch.arange(n)[:, None], torch.arange(m)
    position = i + m - n
    kind, *rest = mask or ("everything",)
    match kind:
        case "and":
            found = allowed(rest[0], b, h, n, m, held) & allowed(rest[1], b, h, n, m, held)
        case "or":
            found = allowed(rest[0], b, h, n, m, held) | allowed(rest[1], b, h, n, m, held)
        case "causal":
            found = j <= position
        case "window":
            found = (j > position - rest[0]) & (j <= position + rest[1])
        case "sinks":
            found = (j < rest[0]).expand(n, m)
        case "head windows":
            windows = [n + m if window is None else window for window in rest[0]]
            found = (j > position - torch.tensor(windows)[:, None, None]) | (j < rest[1])
        case "lengths":
            keys, queries, side = rest
            found = _real(held[keys], m, side)[:, None, None, :]
            if queries is not None:
                found = found & _real(held[queries], n, side)[:, None, :, None]
        case "documents":
            ids = torch.atleast_2d(held[rest[0]])
            mine = ids[:, m - n :, None]
            found = ((mine == ids[:, None, :]) & (mine >= 0))[:, None]
        case "forbidden":
            queries, keys, heads = (held[name] for name in rest)
            pairs = torch.atleast_2d(queries)[:, None, :, None] & torch.atleast_2d(keys)[:, None, None, :]
            found = ~(pairs & heads[:, None, None])
        case "dense":
            found = held[rest[0]]
            found = found[:, None] if found.ndim == 3 else found
        case "everything":
            found = torch.ones(n, m, dtype=torch.bool)
        case _:
            raise AssertionError(kind)
    return found.expand(b, h, n, m)


def starts(mask: Tree, b: int, h: int, n: int, m: int, held: Mapping[str, Tensor]) -> Tensor | None:
    """The key where the sequence of each key starts, [b, m]; m or more for padding before all; None: 0 for all keys."""
    kind, *rest = mask or ("everything",)
    match kind:
        case "and" | "or":
            left, right = (starts(one, b, h, n, m, held) for one in rest)
            if left is None and right is None:
                return None
            if kind == "and":
                if left is None or right is None:
                    return right if left is None else left
                start, key = torch.maximum(left, right)[..., None], torch.arange(m)
                same = (left[:, :, None] == left[:, None]) & (right[:, :, None] == right[:, None])
                return torch.where(same & (key >= start), key, m).amin(-1) if m else left
        case "lengths":
            return (m - held[rest[0]])[:, None].expand(b, m) if rest[2] == "right" else None
        case "documents":
            ids = torch.atleast_2d(held[rest[0]]).expand(b, m)
            same = ids[:, :, None] == ids[:, None, :]
            return same.int().argmax(-1).masked_fill(ids < 0, m) if m else ids
        case "dense":
            pass
        case _:
            return None
    found = torch.full((b, m), m)
    for at, rows in enumerate(allowed(mask, b, h, n, m, held).flatten(1, 2)):
        start = m
        for j in range(m):
            sees = rows[rows[:, j]]
            start = j if len(sees) and not bool(sees[:, :j].any()) else start
            found[at, j] = start if len(sees) or n < m else m  # all queries are there, and none sees it
    return found


def _real(lengths: Tensor, size: int, side: str) -> Tensor:
    """[b, size]: the first `lengths`, or the last."""
    place = torch.arange(size) if side == "left" else size - 1 - torch.arange(size)
    return place < lengths[:, None]


def decoded(steps: Tensor, scales: Tensor, parts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Vectors of eight bits with a scale for each part, as floats."""
    wide = [scales[..., i : i + 1].double().expand(*scales.shape[:-1], part) for i, part in enumerate(parts)]
    return (steps.double() * torch.cat(wide, -1)).to(dtype) if parts else steps.to(dtype)


def slopes(heads: int) -> Tensor:
    """The slopes of ALiBi's paper."""

    def of_power(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    if math.log2(heads).is_integer():
        return torch.tensor(of_power(heads), dtype=torch.float64)
    below = 2 ** int(math.log2(heads))
    return torch.tensor([*of_power(below), *of_power(2 * below)[0::2][: heads - below]], dtype=torch.float64)


def t5_bucket(relative: Tensor, both: bool, buckets: int, farthest: int) -> Tensor:
    """Which row of the embedding a relative position (key − query) has, as in T5's own code."""
    first = torch.zeros_like(relative)
    if both:
        buckets //= 2
        first = (relative > 0).long() * buckets
        distance = relative.abs()
    else:
        distance = (-relative).clamp_min(0)
    exact = buckets // 2
    ratio = torch.log(distance.float().clamp_min(1) / exact) / math.log(farthest / exact)
    large = (exact + (ratio * (buckets - exact)).long()).clamp_max(buckets - 1)
    return first + torch.where(distance < exact, distance, large)


@dataclass
class Truth:
    """All [b, h, n, m] but where said.

    raw: scale · q·k. size: |scale| · Σ|q||k|. s: scores, −∞ where not allowed. capped, added: what of them is from the
    cap, and the magnitudes of what was added. p: weights. slope: the derivative of the cap.
    lse [b, h, n]; sink: its weight [b, h, n]. bad: queries whose scores are not finite, [b, h, n]: their p is 0.
    dark: queries that see nothing. starts: a call of `starts`. bad_out: [b, h, n, e], outputs that are not
    finite. out: with 0 there. open_out: those that may be either; vague: queries of which all may.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    group: int
    scale: float
    allowed: Tensor
    starts: Callable[[], Tensor | None]
    raw: Tensor
    size: Tensor
    capped: Tensor
    added: Tensor
    slope: Tensor
    s: Tensor
    p: Tensor
    lse: Tensor
    sinks: Tensor | None
    bad: Tensor
    dark: Tensor
    bad_out: Tensor
    open_out: Tensor
    vague: Tensor
    out: Tensor
    cap: float

    def distances(self) -> Tensor:
        """|position − key|, [n, m]."""
        n, m = self.p.shape[2:]
        return (torch.arange(n)[:, None] + m - n - torch.arange(m)).abs().double()

    def spread(self, x: Tensor) -> Tensor:
        """x [b, h_kv, …] with a head for each query head."""
        return x.repeat_interleave(self.group, 1) if x.shape[1] != self.p.shape[1] else x

    def gather(self, x: Tensor) -> Tensor:
        """x [b, h, …] summed over the query heads of each KV head."""
        b, kv = self.k.shape[:2]
        return x.reshape(b, kv, self.group, *x.shape[2:]).sum(2)


def truth(
    q: Tensor, k: Tensor, v: Tensor, mask: Tree, scores: Sequence[Tree], scale: float | None, held: Mapping[str, Tensor]
) -> Truth:
    """softmax(cap(scale · q kᵀ) + biases) v under a mask, the sinks in the denominator (Vaswani et al. 2017, eq. 1)."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    b, h, n, d = q.shape
    m, group = k.shape[2], h // k.shape[1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    keys = k.repeat_interleave(group, 1)
    raw = scale * (q @ keys.mT)
    size = abs(scale) * (q.abs() @ keys.abs().mT)
    s, slope, cap = raw, torch.ones_like(raw), 0.0
    added = torch.zeros_like(raw)
    sinks = None
    for kind, *rest in scores:
        if kind == "cap":
            cap = rest[0]
            s = cap * torch.tanh(raw / cap)
            slope = 1 - (s / cap).square()
    capped = s
    relative = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    for kind, *rest in scores:
        x = held[rest[0]].detach().double() if isinstance(rest[0], str) else None
        match kind:
            case "alibi":
                term = -(slopes(rest[0]) if x is None else x)[:, None, None] * relative.abs()
            case "relative":
                term = x[:, (relative - rest[1]).clamp(0, x.shape[1] - 1)]
            case "t5":
                term = x[t5_bucket(relative, rest[1], len(x), rest[2])].permute(2, 0, 1)
            case "bias":
                term = x
            case "sinks":
                sinks = x
                continue
            case _:
                continue
        s = s + term
        added = added + term.abs().nan_to_num(0.0, 0.0, 0.0)
    open_ = allowed(mask, b, h, n, m, held)
    s = s.masked_fill(~open_, -torch.inf)
    bad = (s.isnan() | (s == torch.inf)).any(-1)
    clean = s.masked_fill(bad[..., None], -torch.inf)
    dark = (clean == -torch.inf).all(-1)
    top = clean.amax(-1) if m else torch.full((b, h, n), -torch.inf, dtype=torch.float64)
    if sinks is not None:
        top = torch.maximum(top, sinks[:, None].expand_as(top))
    top = top.masked_fill(dark, 0.0)
    weights = (clean - top[..., None]).exp()
    total = weights.sum(-1)
    if sinks is not None:
        total = total + (sinks[:, None] - top).exp()
    total = total.masked_fill(dark, 1.0)
    p = weights / total[..., None]
    lse = (top + total.log()).masked_fill(dark, -torch.inf)
    values = v.repeat_interleave(group, 1)
    far = (~values.isfinite()).double()
    bad_out = ((s > -torch.inf).double() @ far > 0) | bad[..., None]
    out = (p @ values.nan_to_num(0.0, 0.0, 0.0)).masked_fill(bad_out, 0.0)
    # A bias of −∞ hides a key; whether it hides a value that is not finite is open, and so is what a query that is not
    # finite makes of scores that are.
    vague = ~q.isfinite().all(-1) & open_.any(-1) & ~bad
    slope = slope.masked_fill(~open_, 0.0)
    open_out = ((open_.double() @ far > 0) & ~bad_out) | vague[..., None]
    return Truth(
        q, k, v, group, scale, open_, partial(starts, mask, b, h, n, m, held),
        raw, size, capped, added, slope, s, p, lse, sinks, bad, dark & ~bad, bad_out,
        open_out, vague, out, cap,
    )  # fmt: skip


@dataclass
class Slopes:
    """The backward pass, [b, h, n, m] but for delta [b, h, n]: gradients of weights and of scores, before the cap's."""

    d_p: Tensor
    delta: Tensor
    d_s: Tensor


def slopes_of(t: Truth, d_out: Tensor, kept: Tensor | None = None) -> Slopes:
    """Of the gradient of the output [b, h, n, e]. `kept`: what dropout multiplies each weight by."""
    d_out = d_out.double()
    d_p = d_out @ t.spread(t.v).nan_to_num(0.0, 0.0, 0.0).mT
    d_p = d_p if kept is None else d_p * kept
    delta = (t.p * d_p).sum(-1)
    return Slopes(d_p, delta, t.p * (d_p - delta[..., None]))


def gradients(
    t: Truth, x: Slopes, d_out: Tensor, scores: Sequence[Tree], held: Mapping[str, Tensor], kept: Tensor | None = None
) -> dict[str, Tensor]:
    """Of q, k, v and of each tensor of the scores, by name."""
    weights = t.p if kept is None else t.p * kept
    inner = x.d_s * t.slope * t.scale
    q, k = t.q.nan_to_num(0.0, 0.0, 0.0), t.k.nan_to_num(0.0, 0.0, 0.0)
    found = {
        "q": inner @ t.spread(k),
        "k": t.gather(inner.mT @ q),
        "v": t.gather(weights.mT @ d_out.double()),
    }
    for name, of in terms(t, scores, held).items():
        if of is not None:
            found[name] = of(x.d_s)
        else:
            sink = (t.sinks[:, None] - t.lse).exp().masked_fill(t.dark | t.bad, 0.0)
            found[name] = -(sink * x.delta).sum((0, 2))
    return found


def terms(t: Truth, scores: Sequence[Tree], held: Mapping[str, Tensor]) -> dict[str, Any]:
    """For each tensor of the scores, how a gradient [b, h, n, m] of the scores is summed to its own; None for sinks."""
    n, m = t.p.shape[2:]
    relative = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    found: dict[str, Any] = {}
    for kind, *rest in scores:
        if not isinstance(rest[0], str):
            continue
        x = held[rest[0]]
        match kind:
            case "alibi":
                found[rest[0]] = lambda d: -(d * relative.abs()).sum((0, 2, 3))
            case "relative":
                at = (relative - rest[1]).clamp(0, x.shape[1] - 1)
                found[rest[0]] = lambda d, at=at, x=x: _summed_at(d, at, x.shape[1]).sum_to_size(x.shape)
            case "t5":
                at = t5_bucket(relative, rest[1], len(x), rest[2])
                found[rest[0]] = lambda d, at=at, x=x: _summed_at(d, at, len(x)).mT
            case "bias":
                found[rest[0]] = lambda d, x=x: d.sum_to_size(x.shape)
            case "sinks":
                found[rest[0]] = None
    return found


def _summed_at(d: Tensor, at: Tensor, count: int) -> Tensor:
    """d [b, h, n, m] summed where `at` [n, m] is the same: [h, count]."""
    flat = d.sum(0).flatten(1)
    return flat.new_zeros(len(flat), count).index_add(1, at.flatten(), flat)
