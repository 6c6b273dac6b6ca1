"""Attention that is recognised, published to the subscribers of `headwise.events`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention import attend_to
from headwise.events import in_backward, subscribed
from headwise.map import AttentionMap
from headwise.models.recognise.attention import Attention, assembled, names
from headwise.models.recognise.followed import UNEXPECTED, Followed, Lost, unexpected
from headwise.models.recognise.following import following
from headwise.models.recognise.frames import modules_in_call
from headwise.models.recognise.products import Contraction
from headwise.models.recognise.recogniser import explained
from headwise.models.recognise.tracked import Tracked
from headwise.models.replace.deferred import Deferred
from headwise.publishing import attended
from headwise.rule import own_dtypes


@contextmanager
def recognising(modules: Mapping[nn.Module, str]) -> Iterator[Tracked]:
    """Within it, attention of these modules that has subscribers is recognised in this thread, computed by headwise
    with the measures of the subscribers, compared with the result of the code, and published. What the model computes
    does not change.

    Returns:
        What was seen; `not_followed` lists what is no attention.
    """

    def on_values(product: Contraction, x: Followed, at: int, side: int, out: Tensor) -> None:
        record = x.softmax
        assert record is not None
        assert x.product is not None
        place = names(x.product, modules_in_call(modules), modules)
        replaced = isinstance((product.left, product.right)[at], Deferred)  # it was computed, and published, by attach
        if place is None or replaced or not subscribed(place[0]) or in_backward():
            record.done = True  # nobody wants to know
            return
        try:
            with torch.no_grad(), own_dtypes(out):
                a = assembled(product, x, at, side, out)
                attended(
                    place[0], a.q, a.k, a.v, to_itself=a.to_itself, compute=partial(_checked, a), mask=a.mask,
                    scale=a.scale, score=a.scores,
                )  # fmt: skip
            record.done = True
        except Lost as reason:
            record.reason = explained(x, str(reason))

    seen = Tracked(modules, on_values)
    with following(seen):
        yield seen


def _checked(attention: Attention, *given: Tensor, return_map: bool = True, **options: Any) -> tuple[
    Tensor, AttentionMap
]:  # fmt: skip
    """`attend_to`, compared with the code; Lost if it differs, or is no call of `attend`."""
    try:
        out, amap = attend_to(*given, return_map=True, **options)
        attention.check(out, amap, every=False)
    except UNEXPECTED as error:
        raise Lost(unexpected(error)) from error
    return out, amap
