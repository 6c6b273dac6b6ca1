"""`certify(model, batch)`: which attention of a model is the same function as `attend`, and what is different."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.errors import ConfigError
from headwise.events import within
from headwise.map import AttentionMap
from headwise.models.batches import arguments
from headwise.models.difference import Difference, difference
from headwise.models.recognise.attention import Attention, assembled, names
from headwise.models.recognise.axes import are_of, own_dims
from headwise.models.recognise.following import following
from headwise.models.recognise.frames import modules_in_call, user_line
from headwise.models.recognise.multiplied import summed_factors
from headwise.models.recognise.products import Contraction
from headwise.models.recognise.publisher import explained, not_followed, nothing
from headwise.models.recognise.report import named
from headwise.models.recognise.scores import HIDES
from headwise.models.recognise.tracked import UNEXPECTED, Followed, Lost, Step, Tracked, unexpected
from headwise.models.replace.certificate import Certificate, Verdict
from headwise.models.replace.remarks import remarks_of
from headwise.rule import own_dtypes


def certify(model: nn.Module, batch: Any) -> Certificate:
    """Run a model once and compare every attention in it with `attend`: the result and the gradients of queries, keys
    and values. What is not the same function is compared with the closest call of `attend`, and the reason is named.

    >>> import torch, headwise as hw
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x):
    ...         scores = (x @ x.mT).masked_fill(torch.ones(5, 5).triu(1) == 1, -torch.inf)
    ...         return scores.softmax(-1) @ x
    >>> found = hw.models.certify(Attention(), torch.randn(2, 5, 4))
    >>> found[0].function, found[0].remarks
    ('attend(q, k, v, mask=Causal(), scale=1)', ('its scale is 1, not 1/√4 = 0.5: there is none',))

    Args:
        model: any module, in its present mode. batch: a tensor, a tuple of arguments or a mapping of keyword arguments.
    Returns:
        The `Certificate`: a sequence of `Verdict`s that prints as a table.
    Raises:
        ConfigError: if there is nothing close to attention in the model.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"certify(model): expected an nn.Module, got {type(model).__name__}")
    args, kwargs = arguments(batch)
    calls = _Calls(model)
    with torch.inference_mode(False), torch.enable_grad(), within(own_code=True), following(calls.seen):
        output = model(*args, **kwargs)
    rest = [
        Verdict(one.name, False, "", one.reason, None, None, None, (), one.line)
        for one in not_followed(calls.seen) if (one.name, one.reason) not in calls.refused
    ]  # fmt: skip
    if not calls.found and not rest:
        raise nothing(model, calls.seen, "certify")
    numbered = named([one.name for one in calls.found])
    found = [replace(one, name=name) for one, name in zip(calls.found, numbered, strict=True)]
    return Certificate((*found, *rest), output)


class _Calls:
    """The verdicts of a forward pass. refused: names and reasons of those that are no attention as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {module: name for name, module in model.named_modules()}
        self.seen = Tracked(self.modules, self._values)
        self.seen.on_refused = self._refused
        self.found: list[Verdict] = []
        self.refused: set[tuple[str, str]] = set()

    def _values(self, product: Contraction, x: Followed, at: int, side: int, out: Tensor) -> None:
        """Weights are multiplied by values."""
        assert x.softmax is not None
        x.softmax.done = True
        if not self._compared(product, x, at, side, out, explained(x, "").removesuffix("; ")):
            x.softmax.done = False
            self._refused(product, x, at, out)

    def _refused(self, product: Contraction, x: Followed, at: int, out: Tensor) -> None:
        """Weights are multiplied by something, but that is no attention, or not followed."""
        assert x.softmax is not None
        reason, running = x.softmax.reason, x.softmax.modules
        closest = _closest(product, x, at)
        if closest is not None and self._compared(product, closest[0], at, closest[1], out, reason):
            self.refused.add((self.modules[running[0]] if running else "", reason))

    def _compared(self, product: Contraction, x: Followed, at: int, side: int, out: Tensor, reason: str) -> bool:
        """Append the verdict on a call; False if there is nothing to compare it with.

        Args:
            reason: why it is not the same function as `attend`, if that is known.
        """
        assert x.product is not None
        assert x.softmax is not None
        place = names(x.product, modules_in_call(self.modules), self.modules)
        try:
            with own_dtypes(out):
                a = assembled(product, x, at, side, out)
                mine, amap = attend(a.q, a.k, a.v, mask=a.mask, scale=a.scale, score=a.scores, return_map=True)
                with torch.no_grad():
                    apart, allowed = a.compared(mine.detach(), amap, every=not reason)
                values = product.right if at == 0 else product.left
                inputs = [x.product.of.left, x.product.of.right, values]
                gradients = None if a.dropout_p or reason else _gradients(a, mine, out, inputs, amap)
        except (Lost, *UNEXPECTED) as error:
            x.softmax.reason = str(error) if isinstance(error, Lost) else unexpected(error)
            return False
        if not reason and (differs := apart.reason("its result", "that of attention", allowed)):
            reason = differs
        elif gradients == torch.inf:
            reason = "its gradients are not those of attention: they do not flow through all of it, or are not finite"
        self.found.append(Verdict(
            "" if place is None else place[1], not reason, _call(a), reason, apart.worst, allowed, gradients,
            (*remarks_of(a, amap), *filter(None, [apart.remark]),
             *([f"attach keeps {x.softmax.function}: {x.own}"] if x.own else [])), user_line(),
        ))  # fmt: skip
        return True


def _closest(product: Contraction, x: Followed, at: int) -> tuple[Followed, int] | None:
    """What is known of weights, changed so that it is attention, and the operand of the keys: softmax over the axis
    that the values are summed over, masked scores of −∞, and nothing else that is not followed."""
    if x.product is None or x.softmax is None or x.extended:
        return None
    keys = summed_factors(product, x, at)
    sides = [side for side in (0, 1) if are_of(keys, own_dims(x.product, side))]
    if not sides:
        return None
    steps = tuple(_masking(step) for step in x.steps)
    return x.but(steps=steps, softmax=replace(x.softmax, keys=keys), lost="", note=""), sides[0]


def _masking(step: Step) -> Step:
    return step._replace(coef=-torch.inf) if step.kind == "fill" and not step.coef <= HIDES else step


def _gradients(a: Attention, mine: Tensor, out: Tensor, inputs: list[Tensor], amap: AttentionMap) -> float | None:
    """The largest relative difference of the gradients of the inputs; ∞ where only one of both has any, NaN where they
    are NaN because of fully masked queries, or on both sides; None if none is recorded."""
    given = [x for x in inputs if x.requires_grad and not x.is_meta]
    if not given or not mine.requires_grad:
        return None
    seen = (amap.lse != -torch.inf).to(out.dtype)[..., None]
    weights = torch.randn_like(out) * a.restore(seen.expand_as(a.out))
    if not out.requires_grad:
        return torch.inf
    theirs = torch.autograd.grad(out, given, weights, retain_graph=True, allow_unused=True)
    ours = torch.autograd.grad(a.restore(mine).to(out.dtype), given, weights, retain_graph=True, allow_unused=True)
    found = Difference()
    for own, other in zip(theirs, ours, strict=True):
        if own is None or other is None:
            found = found.joined(Difference(0.0 if own is other else torch.inf, rows=1))
            continue
        noise = torch.finfo(a.dtype).eps * float(weights.norm())  # of gradients that are 0 but for rounding
        if bool(own.isnan().any()) and not bool(seen.all()):
            return torch.nan  # of fully masked queries, which spread to all
        found = found.joined(difference(other.reshape(1, -1), own.reshape(1, -1), noise=noise))
    return torch.inf if found.worst > _GRADIENTS * torch.finfo(a.dtype).eps ** 0.5 else found.worst


_GRADIENTS = 10.0


def _call(a: Attention) -> str:
    """The call of `attend`, for a reader."""
    mask = "" if a.mask is None else f"mask={a.mask!r}, "
    scores = f", score={a.scores!r}" if a.scores else ""
    dropout = f", dropout_p={a.dropout_p:g}" if a.dropout_p else ""
    keys = f"[:, :, :{a.k.shape[2]}]" if a.cut else ""
    return f"attend(q, k{keys}, v{keys}, {mask}scale={a.scale:.4g}{scores}{dropout})"
