"""The pass in which recognised attention is computed both ways: what it certifies, and what is remarked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.kernels.events import within
from headwise.map import AttentionMap
from headwise.masks import Causal
from headwise.models.difference import Difference, difference
from headwise.models.frames import user_line
from headwise.models.hooks import arguments
from headwise.models.recognise.attention import Attention, assembled
from headwise.models.recognise.axes import are_of, own_dims
from headwise.models.recognise.following import Following, following
from headwise.models.recognise.multiplied import summed_factors
from headwise.models.recognise.products import Contraction
from headwise.models.recognise.publisher import explained, not_followed, nothing, numbered
from headwise.models.recognise.scores import HIDES, allows
from headwise.models.recognise.tracked import UNEXPECTED, Followed, Lost, Tracked, Values, unexpected
from headwise.rule import own_dtypes
from headwise.table.show import as_html, as_text


@dataclass(frozen=True)
class Verdict:
    """One attention of a model, or something close to it, beside `attend`.

    Attributes:
        name: the module's qualified name; name#2, name#3, … from its second call on.
        same: whether it is the same function, so that `attach` computes it, unless a remark says that it keeps a
            function of another package.
        function: the call of `attend` that it is, or is closest to; "" if there is none.
        reason: what is different, if it is not the same.
        difference: the largest relative difference between a row of its result and that of `function`; ∞ where one of
            both is NaN, NaN if both are everywhere; None if there is no such call. allowed: the largest that rounding
            explains.
        gradients: the largest relative difference of the gradients of queries, keys and values, in the Frobenius norm;
            None if they were not compared: with dropout, or where gradients are not recorded; NaN if they are NaN.
        remarks: what is unusual, though it may be intended: another scale, an inverted mask, fully masked queries,
            rows that are NaN or infinite on both sides, which were not compared.
        line: `file:line` of the code.
    """

    name: str
    same: bool
    function: str
    reason: str
    difference: float | None
    allowed: float | None
    gradients: float | None
    remarks: tuple[str, ...]
    line: str

    def __str__(self) -> str:
        what = f"the same function as {self.function}" if self.same else self.reason
        return "; ".join((f"{self.name or '(the model)'}: {what}", *self.remarks))


@dataclass(frozen=True, eq=False)
class Certificate(Sequence[Verdict]):
    """The attention of a model, call by call; it prints itself as a table.

    Attributes:
        verdicts: in the order of the pass; what is no attention comes last.
        output: what the model returned.
    """

    verdicts: tuple[Verdict, ...]
    output: object

    @property
    def same(self) -> bool:
        """Whether every attention is the same function as a call of `attend`; what is no attention does not count."""
        return all(one.same for one in self.verdicts if one.function or one.same)

    def __getitem__(self, index: Any) -> Any:
        """A verdict by its number or by its name."""
        if isinstance(index, str):
            return {one.name: one for one in reversed(self.verdicts)}[index]
        return self.verdicts[index]

    def __len__(self) -> int:
        return len(self.verdicts)

    def __repr__(self) -> str:
        return as_text(_HEAD, [_row(one) for one in self.verdicts], words=2, gap="  ") + "".join(
            f"\n{note}" for note in self._notes()
        )

    def _repr_html_(self) -> str:
        return as_html(_HEAD, [_row(one) for one in self.verdicts], notes=self._notes())

    def _notes(self) -> list[str]:
        """What is different, and remarks, with the line of the code."""
        found = []
        for one in self.verdicts:
            place = f" ({Path(one.line).name})" if one.line else ""
            said = [*([] if one.same else [one.reason]), *one.remarks]
            found += [f"{one.name or '(the model)'}{place}: {what}" for what in said]
        return list(dict.fromkeys(found))


_HEAD = ["module", "verdict", "largest difference", "of gradients"]


def _row(one: Verdict) -> list[str]:
    if one.same:
        what = f"the same function as {one.function}"
    elif not one.function:
        what = "no softmax attention, or not followed"
    elif one.difference is not None and one.difference != one.difference:
        what = f"NaN or infinite, so that it was not compared with {one.function}"
    elif one.difference is not None and one.allowed is not None and one.difference <= one.allowed:
        what = f"equal here, but not the same function as {one.function}"
    else:
        what = f"differs from {one.function}"
    numbers = ("–" if x is None else f"{x:.1g}" for x in (one.difference, one.gradients))
    return [one.name or "(the model)", what, *numbers]


LARGEST = 1 << 22  # cells of a mask that are looked at


def _remarks(a: Attention, amap: AttentionMap) -> Iterator[str]:
    """Another scale than 1/√d, a mask that may be inverted, fully masked queries, dropout."""
    d = a.q.shape[3]
    usual = d**-0.5
    if abs(a.scale / usual - 1) > 4 * torch.finfo(a.dtype).eps:
        yield f"its scale is {a.scale:.4g}, not 1/√{d} = {usual:.4g}" + (": there is none" if a.scale == 1 else "")
    b, h, n, m = amap.shape
    hidden = amap.lse == -torch.inf
    if a.mask is not None and n > 1 and b * n * m <= LARGEST:
        allowed = a.mask.to_dense(n, m, batch=b, heads=h).expand(b, h, n, m)
        if n <= m and allows(Causal(), lambda rows: ~allowed[:, :, rows.start : rows.stop], (b, h, n, m)):
            yield "queries attend to exactly the keys that Causal() masks: its mask may be inverted"
        elif n == m and bool(allowed.tril(-1).any()) and not bool(allowed.diagonal(dim1=2, dim2=3).any()):
            yield "no query attends to its own key"
    if bool(hidden.any()):
        count = int(hidden.any(1).sum())
        what = _result(a, hidden)
        yield f"{count} fully masked quer{'y' if count == 1 else 'ies'}: their result is {what}, where attend returns 0"
    if a.dropout_p:
        yield f"a share of {a.dropout_p:g} of its weights is dropped; headwise drops others, with the same probability"


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
    with torch.inference_mode(False), torch.enable_grad(), within(own_code=True), following(Following(calls.seen)):
        output = model(*args, **kwargs)
    rest = [
        Verdict(one.name, False, "", one.reason, None, None, None, (), one.line)
        for one in not_followed(calls.seen) if (one.name, one.reason) not in calls.refused
    ]  # fmt: skip
    if not calls.found and not rest:
        raise nothing(model, calls.seen, "certify")
    return Certificate((*numbered(calls.found), *rest), output)


class _Calls:
    """The verdicts of a forward pass. refused: names and reasons of those that are no attention as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = Tracked({module: name for name, module in model.named_modules()}, self._values)
        self.seen.on_refused = self._refused
        self.found: list[Verdict] = []
        self.refused: set[tuple[str, str]] = set()

    def _values(self, given: Values) -> None:
        """Weights are multiplied by values."""
        given.record.done = True
        if not self._compared(given, explained(given.x, "").removesuffix("; ")):
            given.record.done = False
            self._refused(given.of, given.x, given.at, given.out)

    def _refused(self, product: Contraction, x: Followed, at: int, out: Tensor) -> None:
        """Weights are multiplied by something, but that is no attention, or not followed."""
        assert x.softmax is not None
        reason, running = x.softmax.reason, x.softmax.modules
        closest = _closest(product, x, at)
        if closest is not None and self._compared(Values(product, closest[0], at, closest[1], out), reason):
            self.refused.add((self.seen.modules[running[0]] if running else "", reason))

    def _compared(self, given: Values, reason: str) -> bool:
        """Append the verdict on a call, and why it is not `attend` if known; False if nothing compares with it."""
        product, x, at, _, out = given
        place = self.seen.place(given.product)
        try:
            with own_dtypes(out):
                a = assembled(given)
                mine, amap = a.attended()
                with torch.no_grad():
                    apart, allowed = a.compared(mine.detach(), amap, every=not reason)
                values = product.right if at == 0 else product.left
                inputs = [given.product.of.left, given.product.of.right, values]
                gradients = None if a.dropout_p or reason else _gradients(a, mine, out, inputs, amap)
        except (Lost, *UNEXPECTED) as error:
            given.record.reason = unexpected(error)
            return False
        if not reason and (differs := apart.reason("its result", "that of attention", allowed)):
            reason = differs
        elif gradients == torch.inf:
            reason = "its gradients are not those of attention: they do not flow through all of it, or are not finite"
        self.found.append(Verdict(
            "" if place is None else place[1], not reason, _call(a), reason, apart.worst, allowed, gradients,
            (*_remarks(a, amap), *filter(None, [apart.remark]),
             *([f"attach keeps {given.record.function}: {x.own}"] if x.own else [])), user_line(),
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
    weak = [step.kind == "fill" and not step.coef <= HIDES for step in x.steps]
    steps = tuple(step._replace(coef=-torch.inf) if one else step for step, one in zip(x.steps, weak, strict=True))
    return x.but(steps=steps, softmax=replace(x.softmax, keys=keys), lost="", note=""), sides[0]


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
