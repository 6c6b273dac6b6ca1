"""The functions of flash-attn: [b, n, h, d], packed sequences, and caches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Mask
from headwise.models.recognise.libraries.base import FusedCall, Library, capped, first_of, masked
from headwise.models.recognise.libraries.packed import packed, windowed
from headwise.models.recognise.tracked import Lost, Tracked
from headwise.scores import ALiBi

# Tensors [b, tokens, …], the mask of packed sequences, and what packs an output again.
_Arranged = tuple[tuple[Tensor, Tensor, Tensor, Tensor], Mask | None, Callable[[Tensor], Tensor] | None]


def _read(given: dict[str, Any], out: Any, function: Callable[..., Any], seen: Tracked) -> FusedCall:
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

    def arranged(out: Tensor) -> _Arranged:
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


def _cached(given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> _Arranged:
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


_NAMES = (
    "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache",
)  # fmt: skip
LIBRARIES = tuple(
    Library(module, _NAMES, _read, _tensors)
    for module in ("flash_attn.flash_attn_interface", "flash_attn", "flash_attn_interface", "flash_attn.cute.interface")
)
