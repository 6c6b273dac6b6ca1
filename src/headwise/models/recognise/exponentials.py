"""Softmax that is written out: the sum of the exponentials, and what is added to it."""

from typing import Any

import torch
from torch import Tensor

from headwise.models.recognise.followed import Followed, Step
from headwise.models.recognise.layout import merged
from headwise.models.recognise.tracked import Tracked

NEGLIGIBLE = 1e-5  # added to a sum of 1 or more against a division by 0


def changed_total(x: Followed, kind: str, first: Tensor, other: Any) -> Followed | None:
    """What is known of the sum of exponentials `first`, x, after a function of it: log, or an addition of the
    exponential of a sink's logit, such as 1; None after another."""
    if kind == "log":
        return x.but(stage="lse")
    if kind != "add" or x.sink is not None or first.ndim != len(x.layout.dims) or first.shape[-1] != 1:
        return None
    shift = _shift(x.steps)
    if shift is not None and isinstance(other, int | float) and abs(other) < NEGLIGIBLE:
        return x
    added = other.detach().double() if isinstance(other, Tensor) else torch.tensor(float(other), dtype=torch.double)
    if not bool((added >= 0).all()):
        return None
    column = added.log() if shift is None else added.log() - shift
    return x.but(sink=(column.expand(first.shape), x.layout))


def log_of(seen: Tracked, x: Followed, y: Followed, first: Tensor, lse: Tensor, out: Tensor) -> Followed:
    """scores − log-sum-exp, the logarithm of a softmax."""
    record = seen.record(out, x.lost or y.lost)
    if lse.ndim == first.ndim and x.product is y.product and x.steps is y.steps:
        dims = [i for i, (one, two) in enumerate(zip(first.shape, lse.shape, strict=True)) if one != two]
        factors = [factor for i in dims for factor in x.layout.dims[i]]
        record.keys, record.single = merged(sorted(factors, key=lambda one: -one[1])), not dims
    elif not record.reason:
        record.reason = "the log-sum-exp of other scores is subtracted"
    return x.but(stage="log", softmax=record, lost=y.lost, note="", sink=y.sink)


def _shift(steps: tuple[Step, ...]) -> Tensor | None:
    """What was added to the scores of each query, such as minus the largest; None if nothing was."""
    shift = None
    for step in steps:
        if step.kind == "mul" and shift is not None:
            shift = shift * step.value
        elif step.kind == "add" and isinstance(step.value, Tensor) and step.value.ndim and step.value.shape[-1] == 1:
            added = step.value.detach().double() * step.coef
            shift = added if shift is None else shift + added
    return shift
