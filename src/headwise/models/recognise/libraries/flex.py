"""`torch.nn.attention.flex_attention.flex_attention`: its functions of positions, evaluated on them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.fields import for_each_pair
from headwise.masks import Mask, Span
from headwise.models.recognise.libraries.base import FusedCall, Kept, Library, capped, first_of, masked
from headwise.models.recognise.scores import Sizes, blocks, mask_of_rows
from headwise.models.recognise.tracked import Lost, Tracked
from headwise.scores import Bias, RelativeBias, Score

_FAR = 1e12  # a score that any soft cap has cut off
_OTHER = "a score_mod that is not a scale, a soft cap, a bias or a mask"
_BLOCKS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
_kept = Kept()


def _flex(given: dict[str, Any], out: Any, function: Callable[..., Any], seen: Tracked) -> FusedCall:
    q, k, v = given["query"], given["key"], given["value"]
    made = first_of(out)
    scale, change, block_mask = given.get("scale"), given.get("score_mod"), given.get("block_mask")
    sizes = (*q.shape[:3], k.shape[2])
    key = (id(change), id(block_mask), sizes)
    found = seen.kept.get(key)
    if found is None:
        allow = None if block_mask is None else block_mask.mask_mod
        tensors = [] if block_mask is None else [getattr(block_mask, name) for name in _BLOCKS]
        evaluated = _kept.made(
            (change, allow), tensors, (sizes, q.dtype, q.device), lambda: _Evaluated(change, block_mask, sizes, q)
        )
        found = evaluated, change, block_mask  # which live on, so that their ids stay theirs
        seen.kept[key] = found
    evaluated = found[0]
    batch = "1" if k.shape[0] == 1 < q.shape[0] else "b"
    own = q.shape[-1] ** -0.5 if scale is None else scale
    return FusedCall(
        q, k, v, made, ("bhnd", f"{batch}hmd", f"{batch}hme", "bhne"),
        (*capped(own * evaluated.slope, evaluated.cap), *(("score", one) for one in evaluated.biases),
         *masked(evaluated.mask)),
        heads=True, own=evaluated.own,
    )  # fmt: skip


def _blocks_of(counts: Tensor, indices: Tensor) -> Tensor:
    """Which blocks of keys are listed for each block of queries, [b or 1, h or 1, rows, columns]."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    found = torch.zeros_like(listed)
    return found.scatter_reduce(-1, indices.long(), listed, "amax") if indices.numel() else found


class _Evaluated:
    """score_mod as cap · tanh(slope · s / cap) + bias, or slope · s + bias, and the mask of both functions, evaluated
    for some queries at a time, score_mod also at a random score of each query and key."""

    def __init__(self, change: Any, block_mask: Any, sizes: Sizes, like: Tensor) -> None:
        self._change, self._sizes, self._like = change, sizes, like[:0]
        self._allow: Any = None if block_mask is None else block_mask.mask_mod
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        self.slope = 1.0
        self.cap: float | None = None
        self.biases: tuple[Score, ...] = ()
        if change is not None:
            self._factors()
            self.biases = self._bias()
            self._check()
        self.mask: Mask | None = mask_of_rows(self._visible, sizes)
        self.own = self._own()  # why flex_attention has to be called itself
        if block_mask is not None:
            self._check_blocks(block_mask)
        self._change = self._allow = None

    def _check_blocks(self, block_mask: Any) -> None:
        """Raise if the blocks of keys are not those that mask_mod leads to: compiled kernels compute these blocks."""
        height, width = block_mask.BLOCK_SIZE
        n, m = self._sizes[2:]
        partial = _blocks_of(block_mask.kv_num_blocks, block_mask.kv_indices)
        full = torch.zeros_like(partial)
        if block_mask.full_kv_num_blocks is not None:
            full = _blocks_of(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        for start in range(0, n, height):
            allowed = self._each(self._allow, Span(start, min(start + height, n))).bool()
            for first in range(0, m, width):
                at = ..., start // height, first // width
                tile = allowed[..., first : first + width].flatten(2)
                left_out = tile.any(-1) & ~(partial[at] | full[at])
                if bool((left_out | (full[at] & ~tile.all(-1))).any()):
                    raise Lost("a block_mask whose blocks are not those of its mask_mod")

    def _own(self) -> str:
        if self._change is not None and self._scores(0.0, Span(0, 1), gradients=True).requires_grad:
            return "its score_mod reads tensors that need gradients"
        if any(for_each_pair(one) for one in self.biases):
            return (
                "its score_mod adds numbers that depend on more than the distance, which would be stored as n×m numbers"
            )
        if self.mask is not None and for_each_pair(self.mask):
            return "its mask has no short form, such as Causal or Documents, and would be stored as n×m booleans"
        return ""

    def _check(self) -> None:
        """Raise if score_mod is another function of the scores."""
        random = torch.Generator(self._like.device).manual_seed(0)
        b, h, _, m = self._sizes
        for rows in blocks(self._sizes):
            shape = b, h, rows.size, m
            size, sign = (
                torch.rand(shape, generator=random, dtype=self._dtype, device=self._like.device) for _ in "ab"
            )
            scores = 10 ** (5 * size - 2) * torch.where(sign < 0.5, -1.0, 1.0)
            theirs, bias = self._scores(scores, rows), self._scores(0.0, rows)
            ours = scores * self.slope
            ours = (ours if self.cap is None else self.cap * torch.tanh(ours / self.cap)) + bias
            if not torch.allclose(theirs, ours, rtol=1e-5, atol=1e-5):
                raise Lost(_OTHER)

    def _visible(self, rows: Span) -> Tensor:
        """Which keys some queries may attend to, [b, h, r, m]."""
        parts = []
        if self._allow is not None:
            parts.append(self._each(self._allow, rows).bool())
        if self._change is not None:
            parts.append(~torch.isneginf(self._scores(0.0, rows)))
        b, h, _, m = self._sizes
        if not parts:
            return torch.ones(b, h, rows.size, m, dtype=torch.bool, device=self._like.device)
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
                raise Lost(_OTHER)
            self.cap, slope = _rounded(cap), cap * float(torch.atanh(torch.tensor(ratio, dtype=torch.float64)))
        if not slope > 0:
            raise Lost(_OTHER)
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

    def _scores(self, score: float | Tensor, rows: Span, gradients: bool = False) -> Tensor:
        b, h, _, m = self._sizes
        shape = b, h, rows.size, m
        scores = torch.as_tensor(score, dtype=self._dtype, device=self._like.device).expand(shape)
        return self._each(self._change, rows, scores, gradients=gradients).to(self._dtype)

    def _each(self, function: Callable[..., Tensor], rows: Span, *scores: Tensor, gradients: bool = False) -> Tensor:
        """A function of (score,) batch, head, query and key, of each of them, [b, h, r, m]."""
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        b, h, _, m = self._sizes
        places = [torch.arange(*span, device=self._like.device) for span in ((0, b), (0, h), rows, (0, m))]
        for i in (3, 2, 1, 0):
            dims = [0] * len(scores) + [0 if i == one else None for one in range(4)]
            function = torch.vmap(function, in_dims=tuple(dims))
        with torch.set_grad_enabled(gradients), TransformGetItemToIndex():
            return function(*scores, *places)


def _rounded(number: float) -> float:
    """The number without the rounding of float32, if it is a short one."""
    short = float(f"{number:.5g}")
    return short if abs(short - number) <= 3e-6 * abs(number) else number


LIBRARIES = (Library("torch.nn.attention.flex_attention", ("flex_attention",), _flex),)
