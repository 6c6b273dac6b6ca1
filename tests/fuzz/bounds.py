"""How far from the oracle a result may be: from the rounding of the scores, through the weights, to each result."""

from functools import cached_property

import torch
from torch import Tensor

from .oracle import Slopes, Truth

ROUND = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
LEAST = {torch.float32: 1.4e-45, torch.bfloat16: 9.2e-41, torch.float16: 6e-8, torch.float64: 5e-324}
CONTRACT = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float64: 2e-14}
NORMAL = 1.2e-38  # weights below the least normal float32 may be 0
OVERFLOW = 1e37


class Bounds:
    """Of a truth, for inputs of a dtype.

    Args:
        lost: what else the scores lose, relative to Σ|q||k|: where keys of eight bits are not rounded to the dtype.
        rough: absolute, for kernels whose exp of half precision is an approximation.
    """

    def __init__(self, t: Truth, dtype: torch.dtype, lost: float = 0.0, rough: float = 0.0) -> None:
        self.t, self.dtype, self.rough = t, dtype, rough
        self.half = dtype in (torch.bfloat16, torch.float16)
        self.u = ROUND[torch.float64] if dtype == torch.float64 else ROUND[torch.float32]
        self.lost = lost
        self.unsure: Tensor | None = None  # [b, h, n, m], weights of which it is not known whether dropout kept them
        self.weight = 2 * ROUND[dtype] if self.half else 0.0  # weights may be rounded to the dtype before a product
        d = t.q.shape[-1]
        size, raw = (x.nan_to_num(0.0, 0.0, 0.0) for x in (t.size, t.raw))
        near = self.u * ((3 + d**0.5) * size + 3 * raw.abs()) + lost * size
        if t.cap:
            near = near.clamp_max(2 * t.cap) + self.u * (2 * t.cap + 4 * t.capped.nan_to_num(0.0, 0.0, 0.0).abs())
        s = t.s.masked_fill(t.bad[..., None], -torch.inf)
        lse = t.lse.masked_fill(t.dark, 0.0).nan_to_num(0.0, 0.0, 0.0)
        seen = s.masked_fill(s == -torch.inf, 0.0)
        # The sum of a score may begin with the log-sum-exp.
        near = near + self.u * (3 * t.added + 3 * seen.abs() + (3 + d**0.5) * lse.abs()[..., None] + 6) + rough
        if t.sinks is not None:
            near = near + self.u * 3 * t.sinks.abs().nan_to_num(0.0, 0.0, 0.0)[:, None, None]
        self.s, self.near = s, near

    @cached_property
    def free(self) -> Tensor:
        """[b, h, n]: queries that are not compared, since their scores overflow the accumulating dtype."""
        if self.dtype == torch.float64 or not self.t.size.shape[-1]:
            return self.t.vague
        size = self.t.size.nan_to_num(0.0, 0.0, 0.0)
        return (torch.maximum(size, size / max(1e-300, abs(self.t.scale))) > OVERFLOW).any(-1) | self.t.vague

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The least and the largest log-sum-exp, [b, h, n]; 0 for queries that see nothing."""
        t, found = self.t, []
        for moved in (self.s - self.near, self.s + self.near):
            every = moved
            if t.sinks is not None:
                slack = self.u * 3 * t.sinks.abs().nan_to_num(0.0, 0.0, 0.0)
                sink = t.sinks + (slack if found else -slack)
                every = torch.cat((moved, sink[:, None, None].expand(*moved.shape[:3], 1)), -1)
            found.append(every.logsumexp(-1).masked_fill(t.dark | t.bad, 0.0))
        return found[0], found[1]

    @cached_property
    def lse(self) -> Tensor:
        """[b, h, n]"""
        low, high = self.ends
        exact = self.t.lse.masked_fill(self.t.dark | self.t.bad, 0.0)
        sums = self.u * (6 + self.t.p.shape[-1] ** 0.5 + 2 * exact.abs())
        return torch.maximum(high - exact, exact - low) + sums

    @cached_property
    def p(self) -> Tensor:
        """[b, h, n, m]"""
        low, high = (x[..., None] for x in self.ends)
        p = self.t.p
        up = (self.s + self.near - low).clamp_max(0.0).exp()
        down = (self.s - self.near - high).exp()
        change = torch.maximum(up - p, p - down)
        change = change + (8 + p.shape[-1] ** 0.5) * self.u * (p + change) + NORMAL
        return change.masked_fill(~self.t.allowed | (self.t.dark | self.t.bad)[..., None], 0.0)

    @cached_property
    def calm(self) -> bool:
        """Whether the contract must hold: no large score, and inputs that are all finite."""
        seen = self.s[self.s > -torch.inf]
        quiet = seen.numel() > 0 and float(seen.abs().max()) <= 8 and float(self.t.raw.abs().max()) <= 8
        quiet = quiet and not bool(self.t.bad.any() or self.t.bad_out.any()) and self.lost == 0
        return quiet and (self.t.sinks is None or float(self.t.sinks.abs().max()) <= 8)

    def rounded(self, x: Tensor) -> Tensor:
        """What the rounding of a result to the dtype may change."""
        return ROUND[self.dtype] * x.abs() * 1.01 + LEAST[self.dtype]

    def summed(self, count: int) -> float:
        """Relative, of a sum of so many."""
        return self.u * (6 + count**0.5)

    def sum_off(self, size: Tensor, off: Tensor, count: int) -> Tensor:
        """Of a sum of `count` terms known to `off`, their magnitudes summing to `size`: what is rounded may be larger
        than the exact terms by `off`."""
        return off + self.summed(count) * (size + off)

    def product(self, left: Tensor, off: Tensor, right: Tensor, count: int, weight: float | None = None) -> Tensor:
        """Of left @ right where left is known to `off`."""
        relative = self.summed(count) + (self.weight if weight is None else weight)
        return off @ right.abs() + relative * ((left.abs() + off) @ right.abs()) + (count + 2) * LEAST[torch.float32]

    def out(self, kept: Tensor | None = None) -> Tensor:
        """[b, h, n, e]"""
        t = self.t
        v = t.spread(t.v).nan_to_num(0.0, 0.0, 0.0)
        p, off = (t.p, self.p) if kept is None else (t.p * kept, self.p * kept)
        lost = self.lost * (p @ v.abs())
        return self.product(p, off, v, v.shape[2]) + lost + self.rounded(p @ v)

    def slopes(self, x: Slopes, d_out: Tensor, kept: Tensor | None = None) -> Tensor:
        """Of the gradients of the scores, [b, h, n, m]."""
        t = self.t
        d_out = d_out.double().abs()
        v = t.spread(t.v).nan_to_num(0.0, 0.0, 0.0).abs()
        size = d_out @ v.mT
        size = size if kept is None else size * kept
        d_p = (self.summed(v.shape[-1]) + self.lost) * size
        if self.unsure is not None:
            d_p = d_p + x.d_p.abs() * self.unsure
        # δ comes from the rounded output.
        delta = (d_out * (self.out(kept) + self.rounded(t.out))).sum(-1)
        delta = delta + self.summed(v.shape[-1]) * (t.p * size).sum(-1)
        known = self.p * (x.d_p - x.delta[..., None]).abs()
        return known + (t.p + self.p) * (d_p + delta[..., None] + self.summed(4) * (size + x.delta[..., None].abs()))

    def gradients(
        self,
        x: Slopes,
        d_out: Tensor,
        terms: dict,
        kept: Tensor | None = None,  # type: ignore[type-arg]
    ) -> dict[str, Tensor]:
        """Of q, k, v and the tensors of the scores, by name."""
        t = self.t
        off = self.slopes(x, d_out, kept)
        steep = torch.zeros_like(off)
        if t.cap:  # the derivative of the cap, by the error of what is capped
            steep = (2 * self.near / t.cap + 6 * self.u).clamp_max(1.0)
        scale = abs(t.scale)
        inner, inner_off = x.d_s * t.slope * scale, (off * (t.slope + steep) + x.d_s.abs() * steep) * scale
        q, k = t.q.nan_to_num(0.0, 0.0, 0.0), t.spread(t.k).nan_to_num(0.0, 0.0, 0.0)
        weights = t.p if kept is None else t.p * kept
        p_off = self.p if kept is None else self.p * kept
        n, m = t.p.shape[2:]
        found = {
            "q": self.product(inner, inner_off, k, m),
            "k": t.gather(self.product(inner.mT, inner_off.mT, q, n * t.group)),
            "v": t.gather(self.product(weights.mT, p_off.mT, d_out.double(), n * t.group)),
        }
        every = off + self.summed(t.p.shape[0] * n * m) * x.d_s.abs()
        for name, of in terms.items():
            if of is not None:
                found[name] = of(every).abs()
                continue
            sink = (t.sinks[:, None] - t.lse).exp().masked_fill(t.dark | t.bad, 0.0)  # type: ignore[index]
            d_delta = (d_out.double().abs() * (self.out(kept) + self.rounded(t.out))).sum(-1)
            change = (((2 * self.lse).clamp_max(99.0).expm1() + self.summed(n)) * sink + NORMAL).clamp_max(1.0)
            d_delta = d_delta + self.summed(t.v.shape[-1]) * (d_out.double() * t.out).abs().sum(-1)
            found[name] = (
                (change * x.delta.abs() + (sink + change) * d_delta).masked_fill(t.dark | t.bad, 0.0).sum((0, 2))
            )
        return found
