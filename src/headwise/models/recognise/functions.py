"""Functions of PyTorch and of other packages that compute a whole attention, and how their arguments are a `FusedCall`;
`LIBRARIES` lists them. No package is imported here. The result is compared with headwise's, as of attention that is
written out."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.fields import for_each_pair
from headwise.masks import Causal, Documents, Lengths, Mask, Span, Window
from headwise.models.recognise.libraries import FusedCall, Kept, Library, capped, first_of, masked, take
from headwise.models.recognise.scores import Sizes, blocks, mask_of_rows, of_distance
from headwise.models.recognise.tracked import Lost, Tracked
from headwise.scores import ALiBi, Bias, Score

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def scaled_dot_product_attention(seen: Tracked, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> None:
    """Take note of a call."""
    given = {**dict(zip(_SDPA, args, strict=False)), **kwargs}
    q, k, v = (given[name] for name in _SDPA[:3])
    record = seen.record(out, "F.scaled_dot_product_attention")
    if q.is_nested:
        record.reason = "nested tensors"
        return
    n, m = q.shape[-2], k.shape[-2]
    scale, mask, dropout_p = given.get("scale"), given.get("attn_mask"), float(given.get("dropout_p") or 0.0)
    steps: list[tuple[Any, ...]] = [("mul", q.shape[-1] ** -0.5 if scale is None else float(scale))]
    if mask is not None:
        steps.append(("fill", ~mask, -torch.inf) if mask.dtype == torch.bool else ("add", mask))
    if given.get("is_causal"):
        hidden = None if n == m else ~torch.ones(n, m, dtype=torch.bool, device=q.device).tril()
        steps.append(("mask", Causal()) if hidden is None else ("fill", hidden, -torch.inf))
    rest = {name: value for name, value in given.items() if name not in (*_SDPA[:3], "dropout_p")}
    count = out.ndim - 2  # of leading dimensions, which broadcast
    lead, letters = "abcijklopqrstuvwxyz"[: count - 1] + "h" * (count > 0), list[str]()
    for x, last in ((q, "nd"), (k, "md"), (v, "me"), (out, "ne")):
        here = lead[count - (x.ndim - 2) :]
        sizes = zip(here, x.shape[:-2], out.shape[count - len(here) : count], strict=True)
        own = [one if size == whole or (one == "h" and given.get("enable_gqa")) else "1" for one, size, whole in sizes]
        letters.append("".join(own) + last)
    take(seen, FusedCall(
        q, k, v, out, tuple(letters), tuple(steps), dropout_p=dropout_p,  # type: ignore[arg-type]
        plain=lambda: F.scaled_dot_product_attention(q, k, v, **rest),
    ), record)  # fmt: skip


_CUT_OFF = 1e12  # a score that any soft cap has cut off
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
        zero, one, far = (self._scores(score, first) for score in (0.0, 1.0, _CUT_OFF))
        seen = torch.isfinite(zero) & torch.isfinite(one)
        if not bool(seen.any()):
            return
        cap = float((far - zero)[seen].max())
        slope = float((one - zero)[seen].median())
        if cap < _CUT_OFF / 2 and cap > 0:
            ratio = slope / cap
            if not 0 < ratio < 1:
                raise Lost(_OTHER)
            self.cap, slope = _rounded(cap), cap * float(torch.atanh(torch.tensor(ratio, dtype=torch.float64)))
        if not slope > 0:
            raise Lost(_OTHER)
        self.slope = _rounded(slope)

    def _bias(self) -> tuple[Score, ...]:
        """What is added to the scores: nothing, a number for each distance, or for each query and key."""
        relative = of_distance(self._added, self._sizes)
        if relative is not None:
            return (relative,) if bool(relative.values.any()) else ()
        values = torch.cat([x for x, _ in map(self._added, blocks(self._sizes))], 2)
        one_batch, one_head = bool((values == values[:1]).all()), bool((values == values[:, :1]).all())
        return (Bias(values[: 1 if one_batch else None, : 1 if one_head else None]),)

    def _added(self, rows: Span) -> tuple[Tensor, Tensor]:
        """score_mod of 0, which is the bias, 0 where it hides the key, and where it does."""
        values = self._scores(0.0, rows)
        hidden = torch.isneginf(values)
        return values.masked_fill(hidden, 0.0), hidden

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


# q, k, v and out as a batch; the mask of packed sequences; and what packs an output again.
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
Packed = tuple[Tensors, Mask, Callable[[Tensor], Tensor]]


def packed(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts_q: Tensor, starts_k: Tensor, used: Tensor | None = None
) -> Packed:
    """Tensors [b, tokens, …], the mask, and a function that packs an output again. Starts are [sequences + 1], `used`
    keys [sequences]. Queries and keys packed differently become a batch with padding before them."""
    starts_q, starts_k = starts_q.long(), starts_k.long()
    if used is None and torch.equal(starts_q, starts_k) and int(starts_q[0]) == 0 and int(starts_q[-1]) == len(q):
        ids = torch.repeat_interleave(torch.arange(len(starts_q) - 1, device=q.device), starts_q.diff())
        return (q[None], k[None], v[None], out[None]), Documents(ids), lambda made: made[0]
    lengths_q = starts_q.diff()
    lengths_k = starts_k.diff() if used is None else used.long()
    (mine, real), (theirs, _) = _places(starts_q, lengths_q), _places(starts_k, lengths_k)

    def again(made: Tensor) -> Tensor:
        return made.new_zeros(len(q), *made.shape[2:]).index_put((mine[real],), made[real])

    mask = Lengths(lengths_k.cpu(), lengths_q.cpu(), side="right")
    return (q[mine], k[theirs], v[theirs], out[mine.to(out.device)]), mask, again


def _places(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """[sequences, longest], where each token lies, and whether it is one; 0 for padding, which comes first."""
    longest = int(lengths.max())
    back = torch.arange(longest, 0, -1, device=starts.device)
    real = back <= lengths[:, None]
    return torch.where(real, starts[: len(lengths), None] + lengths[:, None] - back, 0), real


def windowed(left: int, right: int) -> Mask | None:
    """The mask of queries that see `left` keys before them and `right` after; a negative number is no limit."""
    if left < 0:
        return Causal() if right == 0 else None if right < 0 else Window(_FAR, right)
    return Causal() & Window(left + 1) if right == 0 else Window(left + 1, right if right > 0 else _FAR)


_FAR = 1 << 30


_VARLEN = {
    "query": "q", "key": "k", "value": "v", "cu_seq_q": "cu_seqlens_q", "cu_seq_k": "cu_seqlens_k",
    "scale": "softmax_scale",
}  # fmt: skip


def _varlen(given: dict[str, Any], *call: Any) -> FusedCall:
    """`varlen_attn`, with flash-attn's names of its arguments."""
    named = {_VARLEN.get(name, name): value for name, value in given.items() if name != "cu_seq_k" or value is not None}
    return _flash(named, *call)


def _flash(given: dict[str, Any], out: Any, function: Callable[..., Any], seen: Tracked) -> FusedCall:
    """A call of any of them; arguments that are not known here show in the result."""
    made = first_of(out)
    paged = given.get("block_table", given.get("page_table"))
    if paged is not None:
        raise Lost("keys in pages (block_table)")
    if given.get("qv") is not None:
        raise Lost("a second product of queries with values (qv)")
    if given.get("rotary_cos") is not None:
        raise Lost("rotary positions applied by flash-attn (rotary_cos)")
    q, k, v = _tensors(given)
    starts_q = given.get("cu_seqlens_q", given.get("cu_seqlens"))

    def arranged(out: Tensor) -> Packed | tuple[Tensors, None, None]:
        if starts_q is not None:
            return packed(q, k, v, out, starts_q, given.get("cu_seqlens_k", starts_q), given.get("seqused_k"))
        if given.get("cache_seqlens") is not None:
            return _cached(given, q, k, v, out)
        return (q, k, v, out), None, None

    tensors, mask, again = arranged(made)
    left, right = (-1 if size is None else size for size in given.get("window_size") or (-1, -1))
    scale = given.get("softmax_scale")
    dropout_p = float(given.get("dropout_p") or 0.0)
    slopes = given.get("alibi_slopes")
    if slopes is not None and slopes.ndim > 1:
        raise Lost("slopes of ALiBi that differ between batch entries")
    return FusedCall(
        *tensors, ("bnhd", "bmhd", "bmhe", "bnhe"),
        (*capped(q.shape[-1] ** -0.5 if scale is None else scale, given.get("softcap")),
         *(() if slopes is None else (("score", ALiBi(slopes)),)),
         *masked(mask, windowed(left, 0 if given.get("causal") else right))),
        heads=True, dropout_p=dropout_p,
        plain=lambda: arranged(first_of(function(**{**given, "dropout_p": 0.0})))[0][3], restore=again,
        returned=made, arrange=lambda x: arranged(x)[0][3],
        own="it writes new keys to its cache" if "k_cache" in given and given.get("k") is not None else "",
    )  # fmt: skip


def _tensors(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, which may be packed into one tensor as the last dimension but two."""
    if "qkv" in given:
        q, k, v = given["qkv"].unbind(-3)
    elif "kv" in given:
        q, (k, v) = given["q"], given["kv"].unbind(-3)
    else:
        cache = "_cache" if "k_cache" in given else ""
        q, k, v = given["q"], given[f"k{cache}"], given[f"v{cache}"]
    return q, k, v


def _cached(given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Packed:
    """Queries and a cache [b, size, h, d] whose first keys are used, as packed sequences."""
    b, n, size = *q.shape[:2], k.shape[1]
    if given.get("cache_batch_idx") is not None or given.get("cache_leftpad") is not None:
        raise Lost("a cache with other places (cache_batch_idx, cache_leftpad)")
    used = torch.as_tensor(given["cache_seqlens"], device=q.device).expand(b)
    new = given.get("k")
    used = used + (0 if new is None else new.shape[1])
    starts = torch.arange(b + 1, device=q.device)
    q, k, v, out = (x.flatten(0, 1) for x in (q, k, v, out))
    tensors, mask, again = packed(q, k, v, out, starts * n, starts * size, used)
    return tensors, mask, lambda made: again(made).unflatten(0, (b, n))


_FLASH = (
    "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache",
)  # fmt: skip


_LETTERS = {
    3: ("bnd", "bmd", "bme", "bne"),
    4: ("bnhd", "bmhd", "bmhe", "bnhe"),
    5: ("bnghd", "bmghd", "bmghe", "bnghe"),
}


def _xformers(given: dict[str, Any], out: Any, function: Callable[..., Any], seen: Tracked) -> FusedCall:
    q, k, v = given["query"], given["key"], given["value"]
    made = first_of(out)
    scale, p, bias = given.get("scale"), float(given.get("p") or 0.0), given.get("attn_bias")
    steps: tuple[Any, ...] = (("mul", q.shape[-1] ** -0.5 if scale is None else scale),)
    if isinstance(bias, Tensor):
        steps = (*steps, ("add", bias))
    elif bias is not None:
        mask = _mask(bias, q.shape[1], k.shape[1], q.device)
        steps = (*steps, *(masked(mask) if isinstance(mask, Mask) else (("add", mask),)))
        extra = getattr(bias, "_bias", None)
        if isinstance(mask, Mask) and isinstance(extra, Tensor):
            steps = (*steps, ("add", extra))
    rest = {name: value for name, value in given.items() if name != "p"}
    output_dtype = given.get("output_dtype")
    return FusedCall(
        q, k, v, made, _LETTERS[q.ndim], steps, heads=q.ndim > 3, dropout_p=p,
        plain=lambda: first_of(function(**rest)),
        own="" if output_dtype in (None, q.dtype) else "its output_dtype is not that of its queries",
    )  # fmt: skip


def _mask(bias: Any, n: int, m: int, device: torch.device) -> Mask | Tensor:
    """The mask of a bias that needs no tensor, else its values [n, m]."""
    name = type(bias).__name__
    if name == "LowerTriangularFromBottomRightMask" or (name == "LowerTriangularMask" and n == m):
        return Causal()
    if name in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        starts_q, starts_k = (getattr(bias, side).seqstart_py for side in ("q_seqinfo", "k_seqinfo"))
        if list(starts_q) == list(starts_k) and starts_q[-1] == n == m:
            starts = torch.tensor(list(starts_q))
            ids = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff()).to(device)
            return Documents(ids) & Causal() if "Causal" in name else Documents(ids)
    values: Tensor = bias.materialize((n, m), dtype=torch.float32, device=device)
    return values


LIBRARIES: tuple[Library, ...] = (
    Library("torch.nn.attention.flex_attention", ("flex_attention",), _flex),
    Library("torch.nn.attention.varlen", ("varlen_attn",), _varlen),
    *(
        Library(module, _FLASH, _flash, _tensors)
        for module in (
            "flash_attn.flash_attn_interface", "flash_attn", "flash_attn_interface", "flash_attn.cute.interface",
        )
    ),
    *(
        Library(module, ("memory_efficient_attention", "memory_efficient_attention_forward"), _xformers)
        for module in ("xformers.ops.fmha", "xformers.ops")
    ),
)  # fmt: skip
