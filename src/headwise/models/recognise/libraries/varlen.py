"""`torch.nn.attention.varlen.varlen_attn`: packed sequences."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headwise.models.recognise.libraries.base import FusedCall, Library, first_of, masked
from headwise.models.recognise.libraries.packed import Packed, packed, windowed
from headwise.models.recognise.tracked import Lost, Tracked


def _varlen(given: dict[str, Any], out: Any, function: Callable[..., Any], seen: Tracked) -> FusedCall:
    if given.get("block_table") is not None:
        raise Lost("keys in pages (block_table)")
    q, k, v = given["query"], given["key"], given["value"]
    made = first_of(out)
    cu_seq_k = given["cu_seq_q"] if given.get("cu_seq_k") is None else given["cu_seq_k"]

    def arranged(out: Tensor) -> Packed:
        return packed(q, k, v, out, given["cu_seq_q"], cu_seq_k, given.get("seqused_k"))

    tensors, mask, again = arranged(made)
    scale = given.get("scale")
    return FusedCall(
        *tensors, ("bnhd", "bmhd", "bmhe", "bnhe"),
        (("mul", q.shape[-1] ** -0.5 if scale is None else scale),
         *masked(mask, windowed(*(given.get("window_size") or (-1, -1))))),
        heads=True, restore=again, returned=made, arrange=lambda x: arranged(x)[0][3],
    )  # fmt: skip


LIBRARIES = (Library("torch.nn.attention.varlen", ("varlen_attn",), _varlen),)
