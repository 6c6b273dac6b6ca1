"""`torch.nn.attention.flex_attention.flex_attention`: its functions of positions, evaluated on them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Mask, Span
from headwise.models.recognise.followed import Lost
from headwise.models.recognise.libraries.base import FusedCall, Library, capped, first_of, masked
from headwise.models.recognise.masks import Sizes, blocks, mask_of_rows
from headwise.models.recognise.tracked import Tracked
from headwise.scores import Bias, RelativeBias, Score

_FAR = 1e12  # a score that any soft cap has cut off


def _flex(given: dict[str, Any], out: Any, function: Callable[..., Any], seen: Tracked) -> FusedCall:
    q, k, v = given["query"], given["key"], given["value"]
    made = first_of(out)
    scale, change, block_mask = given.get("scale"), given.get("score_mod"), given.get("block_mask")
    sizes = (*q.shape[:3], k.shape[2])
    allow = None if block_mask is None else block_mask.mask_mod
    key = (id(change), id(allow), sizes)
    found = seen.kept.get(key)
    if found is None:
        found = _Evaluated(change, allow, sizes, q), change, allow  # which live on, so that their ids stay theirs
        seen.kept[key] = found
    evaluated = found[0]
    batch = "1" if k.shape[0] == 1 < q.shape[0] else "b"
    own = q.shape[-1] ** -0.5 if scale is None else scale
    return FusedCall(
        q, k, v, made, ("bhnd", f"{batch}hmd", f"{batch}hme", "bhne"),
        (*capped(own * evaluated.slope, evaluated.cap), *(("score", one) for one in evaluated.biases),
         *masked(evaluated.mask)),
        heads=True,
    )  # fmt: skip


class _Evaluated:
    """score_mod as cap · tanh(slope · s / cap) + bias, or slope · s + bias, and the mask of both functions.

    The functions are evaluated for some queries at a time. Whether score_mod is of this form shows in the result of the
    call, which is compared.
    """

    def __init__(self, change: Any, allow: Any, sizes: Sizes, like: Tensor) -> None:
        self._change, self._allow, self._sizes, self._like = change, allow, sizes, like
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        self.slope = 1.0
        self.cap: float | None = None
        self.biases: tuple[Score, ...] = ()
        if change is not None:
            self._factors()
            self.biases = self._bias()
        self.mask: Mask | None = mask_of_rows(self._visible, sizes)

    def _visible(self, rows: Span) -> Tensor:
        """Which keys some queries may attend to, [b, h, r, m]."""
        parts = []
        if self._allow is not None:
            parts.append(self._each(self._allow, rows).bool())
        if self._change is not None:
            parts.append(~torch.isneginf(self._scores(0.0, rows)))
        b, h, _, m = self._sizes
        if not parts:
            return torch.ones(b, h, rows.stop - rows.start, m, dtype=torch.bool, device=self._like.device)
        return parts[0] if len(parts) == 1 else parts[0] & parts[1]

    def _factors(self) -> None:
        first = Span(0, min(self._sizes[2], 16))
        zero, one, far = (self._scores(score, first) for score in (0.0, 1.0, _FAR))
        seen = torch.isfinite(zero) & torch.isfinite(one)
        if not bool(seen.any()):
            return
        cap = float((far - zero)[seen].max())
        slope = float((one - zero)[seen].median())
        if cap < _FAR / 2 and cap > 0:
            ratio = slope / cap
            if not 0 < ratio < 1:
                raise Lost("a score_mod that is not a scale, a soft cap, a bias or a mask")
            self.cap, slope = _rounded(cap), cap * float(torch.atanh(torch.tensor(ratio, dtype=torch.float64)))
        if not slope > 0:
            raise Lost("a score_mod that is not a scale, a soft cap, a bias or a mask")
        self.slope = _rounded(slope)

    def _bias(self) -> tuple[Score, ...]:
        """What is added to the scores: nothing, a number for each distance, or for each query and key."""
        n, m = self._sizes[2:]
        found: list[Tensor] = []
        edges = torch.cat((self._added(Span(n - 1, n))[..., 0, : n - 1], self._added(Span(0, 1))[..., 0, :]), -1)
        relative = edges[:1].amax(0) if n <= m + 1 else None  # [h, n - 1 + m], of distances from 1 - n to m - 1
        one_batch = one_head = True
        for rows in blocks(self._sizes):
            here = self._added(rows)
            one_batch &= bool((here == here[:1]).all())
            one_head &= bool((here == here[:, :1]).all())
            if relative is not None:
                i, j = (torch.arange(*span, device=here.device) for span in (rows, (0, m)))
                expected = relative[:, j - i[:, None] + n - 1]
                if not torch.allclose(expected.expand_as(here), here, rtol=1e-6, atol=1e-6):
                    relative = None
            if relative is None:
                found.append(here)
        if relative is not None:
            if not bool(relative.any()):
                return ()
            return (RelativeBias(relative[:1] if one_head else relative, 1 - m),)
        if len(found) < len(list(blocks(self._sizes))):
            found = [self._added(rows) for rows in blocks(self._sizes)]
        values = torch.cat(found, 2)
        return (Bias(values[: 1 if one_batch else None, : 1 if one_head else None]),)

    def _added(self, rows: Span) -> Tensor:
        """score_mod of 0, which is the bias; 0 where it is masked."""
        values = self._scores(0.0, rows)
        return values.masked_fill(torch.isneginf(values), 0.0)

    def _scores(self, score: float, rows: Span) -> Tensor:
        b, h, _, m = self._sizes
        scores = torch.full((b, h, rows.stop - rows.start, m), score, dtype=self._dtype, device=self._like.device)
        return self._each(self._change, rows, scores).to(self._dtype)

    def _each(self, function: Callable[..., Tensor], rows: Span, *scores: Tensor) -> Tensor:
        """A function of (score,) batch, head, query and key, of each of them, [b, h, r, m]."""
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        b, h, _, m = self._sizes
        places = [torch.arange(*span, device=self._like.device) for span in ((0, b), (0, h), rows, (0, m))]
        for i in (3, 2, 1, 0):
            dims = [0] * len(scores) + [0 if i == one else None for one in range(4)]
            function = torch.vmap(function, in_dims=tuple(dims))
        with torch.no_grad(), TransformGetItemToIndex():
            return function(*scores, *places)


def _rounded(number: float) -> float:
    """The number without the rounding of float32, if it is a short one."""
    short = float(f"{number:.5g}")
    return short if abs(short - number) <= 3e-6 * abs(number) else number


LIBRARIES = (Library("torch.nn.attention.flex_attention", ("flex_attention",), _flex),)
