"""Whether a reader's value is ours: shapes, numbers within a tolerance, and where they first differ."""

import math
from typing import Any

import torch
from torch import Tensor

from headwise.wording import Message

MOST = 2**63 - 1  # the largest whole number in a tensor


def difference(theirs: Any, ours: Any, tolerance: float) -> Message | None:
    """None if the values agree, otherwise where they differ first. Lists and tuples are not told apart, nor are numbers
    and tensors without axes."""
    if isinstance(ours, tuple | list):
        return _listed(theirs, ours, tolerance)
    if isinstance(ours, str) or ours is None:
        return None if theirs == ours and type(theirs) is type(ours) else _kind(theirs, ours)
    mine, other = _tensor(ours), _tensor(theirs)
    if mine is None or other is None:
        return _kind(theirs, ours)
    if mine.shape != other.shape:
        return Message(
            "shapes-differ", "the shape is {theirs}, expected {ours}", "形状是 {theirs}，应为 {ours}",
            theirs=str(list(other.shape)), ours=str(list(mine.shape)),
        )  # fmt: skip
    near = 0.0 if _is_whole(mine) and _is_whole(other) else tolerance
    wrong = ~torch.isclose(_wide(other), _wide(mine), rtol=near, atol=near, equal_nan=True)
    if not wrong.any():
        return None
    at = wrong.nonzero()[0].tolist()
    return Message(
        "numbers-differ", "{count} of {all} numbers differ, first at {at}: {theirs}, expected {ours}",
        "{all} 个数中有 {count} 个不同，第一处在 {at}：是 {theirs}，应为 {ours}",
        count=int(wrong.sum()), all=wrong.numel(), at=str(at), theirs=_number(other[tuple(at)]),
        ours=_number(mine[tuple(at)]),
    )  # fmt: skip


def _listed(theirs: Any, ours: Any, tolerance: float) -> Message | None:
    if isinstance(theirs, Tensor) and theirs.ndim:
        theirs = list(theirs)
    if not isinstance(theirs, tuple | list):
        return _kind(theirs, ours)
    if len(theirs) != len(ours):
        return Message(
            "lengths-differ", "{theirs} values, expected {ours}", "有 {theirs} 个值，应为 {ours} 个",
            theirs=len(theirs), ours=len(ours),
        )  # fmt: skip
    for place, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if found := difference(one, other, tolerance):
            return Message(
                "value-differs", "value {place}: {found}", "第 {place} 个值：{found}", place=place, found=found
            )
    return None


def _kind(theirs: Any, ours: Any) -> Message:
    return Message(
        "kinds-differ", "{theirs}, expected {ours}", "是 {theirs}，应为 {ours}", theirs=described(theirs),
        ours=described(ours),
    )  # fmt: skip


def described(value: Any) -> str:
    """A value in a line: small tensors with their numbers, large ones with their shape."""
    if isinstance(value, Tensor):
        shape = "×".join(map(str, value.shape)) or "scalar"
        if value.numel() <= 24:
            numbers = value.tolist()
            return f"[{shape}] {_rounded(numbers)}" if value.ndim else _rounded(numbers)
        return f"[{shape}] {_rounded(value.flatten()[:4].tolist())[:-1]}, …]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    return _rounded(value)


def _rounded(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_rounded, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _number(value: Tensor) -> str:
    return _rounded(value.item())


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, int) and abs(value) > MOST:
        return torch.tensor(math.copysign(math.inf, value))
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if isinstance(value, tuple | list):
        parts = [_tensor(one) for one in value]
        known = [one for one in parts if one is not None]
        if not parts:
            return torch.empty(0)
        if len(known) == len(parts) and len({one.shape for one in known}) == 1:
            return torch.stack(known if len({one.dtype for one in known}) == 1 else list(map(_wide, known)))
    return None


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
