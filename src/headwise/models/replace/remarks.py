"""What is unusual in an attention, though it is the same function as a call of `attend`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.map import AttentionMap
from headwise.models.recognise.attention import Attention
from headwise.models.recognise.scores import named_mask

LARGEST = 1 << 22  # cells of a mask that are looked at


def remarks_of(a: Attention, amap: AttentionMap) -> tuple[str, ...]:
    """Another scale than 1/√d, a mask that may be inverted, fully masked queries, dropout."""
    return tuple(_remarks(a, amap))


def _remarks(a: Attention, amap: AttentionMap) -> Iterator[str]:
    d = a.q.shape[3]
    usual = d**-0.5
    if abs(a.scale / usual - 1) > 4 * torch.finfo(a.dtype).eps:
        yield f"its scale is {a.scale:.4g}, not 1/√{d} = {usual:.4g}" + (": there is none" if a.scale == 1 else "")
    yield from _of_mask(a, amap)
    if a.dropout_p:
        yield f"a share of {a.dropout_p:g} of its weights is dropped; headwise drops others, with the same probability"


def _of_mask(a: Attention, amap: AttentionMap) -> Iterator[str]:
    b, h, n, m = amap.shape
    hidden = amap.lse == -torch.inf
    if a.mask is not None and n > 1 and b * n * m <= LARGEST:
        allowed = a.mask.to_dense(n, m, batch=b, heads=h).expand(b, h, n, m)
        opposite = named_mask(~allowed, (b, h, n, m))
        if repr(opposite) == "Causal()":
            yield "queries attend to exactly the keys that Causal() masks: its mask may be inverted"
        elif n == m and bool(allowed.tril(-1).any()) and not bool(allowed.diagonal(dim1=2, dim2=3).any()):
            yield "no query attends to its own key"
    if bool(hidden.any()):
        count = int(hidden.any(1).sum())
        what = _result(a, hidden)
        yield f"{count} fully masked quer{'y' if count == 1 else 'ies'}: their result is {what}, where attend returns 0"


def _result(a: Attention, hidden: Tensor) -> str:
    """What the code computes for fully masked queries."""
    found = a.out.detach()[hidden]
    if not bool(found.isfinite().all()):
        return "NaN, and so are gradients"
    if not bool(found.any()):
        return "0"
    group = a.out.shape[1] // a.v.shape[1]
    mean = a.v.detach().mean(2, keepdim=True).repeat_interleave(group, 1).expand_as(a.out)[hidden]
    if torch.allclose(found, mean.to(found), rtol=1e-2, atol=1e-3 * float(found.abs().max())):
        return "the mean of all values, as they are masked with a finite number"
    return "a mean of the values"
