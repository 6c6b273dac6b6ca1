"""Attention that is recognised, published to the subscribers of `headwise.events`."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.attention import attend_to
from headwise.events import in_backward, subscribed, subscribers_of
from headwise.kernels.call import sum_finite
from headwise.kernels.graph import is_batched
from headwise.map import AttentionMap
from headwise.models.recognise.attention import Attention, assembled, names
from headwise.models.recognise.followed import UNEXPECTED, Followed, Lost, NotFinite, unexpected
from headwise.models.recognise.following import following
from headwise.models.recognise.frames import modules_in_call
from headwise.models.recognise.products import Contraction
from headwise.models.recognise.recogniser import explained
from headwise.models.recognise.threads import OtherThreads
from headwise.models.recognise.tracked import Tracked
from headwise.models.replace.deferred import Deferred
from headwise.publishing import attended
from headwise.rule import own_dtypes
from headwise.spread import held_by

SOME = 16  # rows


class Publisher:
    """Recognises attention of these modules that has subscribers, computes it with the measures of the subscribers,
    compares it with the result of the code, and publishes it, with δ in the backward pass. What the model computes does
    not change. Modules that it calls in other threads, as `nn.DataParallel` does, are seen too.

    Args:
        aside: those of the modules whose attention headwise computes, with all modules in them.
    """

    def __init__(self, modules: Mapping[nn.Module, str], aside: Container[nn.Module] = ()) -> None:
        self._modules, self._aside = modules, aside
        self._whole: set[nn.Module] = set()  # modules of which a whole output was compared
        self._threads = OtherThreads(modules)

    def hooks(self) -> list[RemovableHandle]:
        """Register the hooks with which forwards are seen in all threads."""
        return self._threads.hooks()

    @contextmanager
    def forward(self) -> Iterator[Tracked]:
        """One forward pass of the model.

        Returns:
            What was seen; `not_followed` lists what is no attention.
        """
        seen = Tracked(self._modules, self._publish, self._aside)
        with following(seen), self._threads.followed(seen):
            yield seen

    def _publish(self, product: Contraction, x: Followed, at: int, side: int, out: Tensor) -> None:
        """Weights are multiplied by values."""
        record = x.softmax
        assert record is not None
        assert x.product is not None
        now = modules_in_call(self._modules, x.product.modules)
        place = names(x.product, now, self._modules)
        weights = (product.left, product.right)[at]
        replaced = isinstance(weights, Deferred) and not weights.made  # attach computed and published it
        if place is None or replaced or now[0] in self._aside or not subscribed(place[0]) or in_backward():
            record.done = True  # nothing is subscribed to it
            return
        if any(one.edits for one in subscribers_of(place[0])):
            record.done = True  # `attach` computes and publishes it, or raises
            return
        if is_batched(out):
            record.reason = "torch.func.vmap has batched it, and statistics need its numbers"
            return
        made: list[Tensor] = []
        doubts: list[str] = []
        rows = SOME if place[0] in self._whole and not x.note else None  # of changed weights, only some rows may differ
        try:
            with torch.no_grad(), own_dtypes(out):
                try:
                    a = assembled(product, x, at, side, out)
                except UNEXPECTED as error:
                    raise Lost(unexpected(error)) from error
                compute = partial(_checked, a, rows, made, doubts)
                attended(
                    place[0], a.q, a.k, a.v, to_itself=a.to_itself, at_end=a.at_end, unplaced=a.unplaced,
                    compute=compute, mask=a.mask, scale=a.scale, score=a.scores,
                )  # fmt: skip
            if doubts:  # it is published as it is, and `unwatched` lists it too
                record.reason = doubts[0]
            else:
                record.done = True
                self._whole.add(place[0])
        except Lost as reason:
            record.reason, record.nonfinite = explained(x, str(reason)), isinstance(reason, NotFinite)
            return
        told = [one for one in subscribers_of(place[0]) if one.on_delta]
        returned = out if x.answer is None else x.answer.returned
        if told and returned.requires_grad:
            held = held_by(place[0], a.q, a.k, a.v)
            receivers = [partial(one.on_delta, one.name(place[0]), held) for one in told if one.on_delta]
            first = None if x.answer is None else x.answer.arrange
            arrange = a.arrange if first is None else partial(_both, first, a.arrange)
            own = a.out.detach() if x.answer is None else arrange(returned.detach())
            result = _result(a, own, bool(record.function), *made)
            hook = partial(_publish_delta, receivers, result, arrange)  # which must not hold `returned`
            returned.register_hook(hook)


def _publish_delta(
    receivers: Sequence[Callable[[Tensor], Any]],
    out: Tensor,
    arrange: Callable[[Tensor], Tensor],
    grad: Tensor,
) -> None:
    """Publish δ of each head and query, from the gradient of the output of the code."""
    with torch.no_grad():
        dtype = torch.promote_types(out.dtype, torch.float32)
        delta = (arrange(grad).to(dtype) * out.to(dtype)).sum(-1)
    for receiver in receivers:
        receiver(delta)


def _checked(
    attention: Attention, rows: int | None, made: list[Tensor], doubts: list[str], *given: Tensor,
    return_map: bool = True, **options: Any,
) -> tuple[Tensor, AttentionMap]:  # fmt: skip
    """`attend_to`, compared with the code; Lost if it differs, or is no call of `attend`. `made` gets its output and
    log-sum-exp, `doubts` the reason why nothing could be compared, if both are NaN or infinite everywhere."""
    try:
        out, amap = attend_to(*given, return_map=True, **options)
        every_row = rows is None or not sum_finite(out, attention.out)  # NaN may be in any row
        attention.check(out, amap, every=False, rows=None if every_row else rows)
    except NotFinite as reason:
        if not reason.both:
            raise
        doubts.append(str(reason))
    except UNEXPECTED as error:
        if options.pop("measures", ()):
            _checked(attention, rows, made, doubts, *given, **options)  # if it is the call that fails
            raise
        raise Lost(unexpected(error)) from error
    made[:] = [out, amap.lse]
    return out, amap


def _both(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return second(first(x))


def _result(attention: Attention, own: Tensor, packed: bool, out: Tensor, lse: Tensor) -> Tensor:
    """What the code computed, as it is now: `out`, but for dropout, and for fully masked queries, which get a mean of
    values from code that masks with finite numbers.

    Args:
        own: what it computed. packed: whether fully masked queries get 0, or are padding beside packed sequences.
    """
    hidden = (lse == -torch.inf)[..., None]
    if not attention.dropout_p and not bool(hidden.any()):
        return out
    own = own.masked_fill(hidden if packed else hidden & own.isnan(), 0.0)
    return own if attention.dropout_p else torch.where(hidden, own.to(out.dtype), out)
