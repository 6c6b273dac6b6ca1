"""`F.scaled_dot_product_attention`, which a `TorchFunctionMode` intercepts."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.masks import Causal
from headwise.models.recognise.libraries.base import FusedCall, take
from headwise.models.recognise.tracked import Tracked

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def scaled_dot_product_attention(seen: Tracked, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> None:
    """Take note of a call."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    q, k, v = (given[name] for name in _NAMES[:3])
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
    rest = {name: value for name, value in given.items() if name not in (*_NAMES[:3], "dropout_p")}
    letters = _letters(q, k, v, out, bool(given.get("enable_gqa")))
    take(seen, FusedCall(
        q, k, v, out, letters, tuple(steps), dropout_p=dropout_p,
        plain=lambda: F.scaled_dot_product_attention(q, k, v, **rest),
    ), record)  # fmt: skip


def _letters(q: Tensor, k: Tensor, v: Tensor, out: Tensor, grouped: bool) -> tuple[str, str, str, str]:
    """Letters of [..., n, d], [..., m, d], [..., m, e] and [..., n, e], whose leading dimensions broadcast."""
    count = out.ndim - 2
    lead = "abcijklopqrstuvwxyz"[: count - 1] + "h" * (count > 0)
    found = []
    for x, last in ((q, "nd"), (k, "md"), (v, "me"), (out, "ne")):
        here = lead[count - (x.ndim - 2) :]
        sizes = zip(here, x.shape[:-2], out.shape[count - len(here) : count], strict=True)
        own = [one if size == whole or (grouped and one == "h") else "1" for one, size, whole in sizes]
        found.append("".join(own) + last)
    return tuple(found)  # type: ignore[return-value]
