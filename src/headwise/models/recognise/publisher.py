"""`recognise(model, …)`: the attention in a forward pass; and how it is published to those who subscribe to it."""

import re
from collections.abc import Callable, Container, Iterable
from contextlib import ExitStack
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import ConfigError, warn
from headwise.kernels.call import sum_finite
from headwise.kernels.events import in_backward, subscribed, subscribers_of, within
from headwise.kernels.graph import is_batched
from headwise.kernels.spread import held_by
from headwise.map import AttentionMap
from headwise.map.attention import attend_to
from headwise.models.adapters.places import computed
from headwise.models.hooks import Hook, around
from headwise.models.recognise.attention import Attention, assembled
from headwise.models.recognise.following import (
    Following,
    OtherThreads,
    compile_with,
    compiled_parts,
    following,
    not_in_one_graph,
    uncompiled,
)
from headwise.models.recognise.frames import modules_in_call, user_line
from headwise.models.recognise.report import NotFollowed, Recognised, Recognition, numbered
from headwise.models.recognise.tracked import (
    UNEXPECTED,
    Followed,
    Lost,
    NotFinite,
    Softmax,
    Tracked,
    Values,
    unexpected,
)
from headwise.models.replace.deferred import Deferred
from headwise.publishing import attended
from headwise.rule import own_dtypes


def recognise(model: nn.Module, *args: Any, **kwargs: Any) -> Recognition:
    """Run a model once, without gradients, and return every attention call in it, whoever wrote the model.

    The model runs in its present mode, training or evaluation. Known are `F.scaled_dot_product_attention`,
    `flex_attention`, `varlen_attn`, the functions of flash-attn and xFormers, `nn.MultiheadAttention` with the layers
    made of it, and attention that is written out: a product of queries and
    keys, scaling, soft cap, biases and masks in any spelling, softmax, dropout, and a product with the values. A call
    is returned only if headwise's weights for it equal those of the code; the rest is listed with its reason.

    Args:
        model: any module. args, kwargs: its arguments.
    Returns:
        The `Recognition`: a sequence of `Recognised` calls, with `.maps()` and `.not_followed`.
    Raises:
        ConfigError: if no attention was recognised, with what was looked for and what came nearest.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"recognise(model): expected an nn.Module, got {type(model).__name__}")
    found: list[Recognised] = []

    def values(given: Values) -> None:
        place = seen.place(given.product)
        try:
            with own_dtypes(given.out):
                a = assembled(given)
                mine, amap = a.attended()
                apart = a.check(mine, amap, every=True)
        except (Lost, *UNEXPECTED) as error:
            given.record.reason = explained(given.x, unexpected(error))
            return
        given.record.done = True
        name = "" if place is None else place[1]
        found.append(Recognised(**a.shared, name=name, map=amap, error=apart.worst, line=user_line(),
                                remark=apart.remark))  # fmt: skip

    seen = Tracked({module: name for name, module in model.named_modules()}, values)
    with torch.no_grad(), within(own_code=True), following(Following(seen)):
        output = model(*args, **kwargs)
    if not found:
        raise nothing(model, seen, "recognise")
    return Recognition(numbered(found), not_followed(seen), output)


def explained(x: Followed, reason: str) -> str:
    """The reason, with what was done to the weights after the softmax."""
    return f"the weights are changed after the softmax, by {x.note}; {reason}" if x.note else reason


def not_followed(seen: Tracked) -> tuple[NotFollowed, ...]:
    """Softmaxes of which no attention came, and what else is close to attention."""
    left: list[Softmax] = [*(one for one in seen.softmaxes if not one.done), *seen.near]
    left = [one for one in left if not one.modules or one.modules[0] not in seen.aside]
    found = [NotFollowed(seen.modules[one.modules[0]] if one.modules else "", one.reason, one.line) for one in left]
    done = {seen.modules[one.modules[0]] for one in seen.softmaxes if one.done and one.modules}
    named = {one.name for one in found} | done
    inside = [f"{name}." for name in named]
    lost = [  # modules whose class is called an attention, and in which nothing was seen
        (name, type(module).__name__) for module, name in seen.modules.items()
        if re.search("attention|attn", type(module).__name__, re.IGNORECASE)
        and not any(f"{one}.".startswith(f"{name}." if name else "") for one in named)
        and not any(f"{name}.".startswith(one) for one in inside)
        and not any(part in seen.aside or computed(part) for part in module.modules())
        and not isinstance(module, torch.jit.ScriptModule)
    ]  # fmt: skip
    reason = "nothing was recognised in this {}: it was not called, or compiled code computes its attention"
    found += [
        NotFollowed(name, reason.format(kind), "") for name, kind in lost
        if not any(name.startswith(f"{other}.") for other, _ in lost)
    ]  # fmt: skip
    opaque = [name for module, name in seen.modules.items() if isinstance(module, torch.jit.ScriptModule)]
    outer = [name for name in opaque if name.rpartition(".")[0] not in opaque or not name]
    found += [NotFollowed(name, "compiled by TorchScript, so that its functions are not seen", "") for name in outer]
    return tuple(dict.fromkeys(found))


def nothing(model: nn.Module, seen: Tracked, caller: str) -> ConfigError:
    """The error of `caller` for a model without attention: what was looked for, and what came nearest."""
    left = [str(one) for one in not_followed(seen)[:4]]
    if any(map(computed, model.modules())):
        also = f"; beside it: {'; '.join(left)}" if left else ""
        return ConfigError(
            f"{caller}(model): headwise computes the attention of this model; use watch or observe, or, if it is "
            f"attached, detach it first{also}"
        )
    products = seen.products
    nearest = "; ".join(left) or (
        f"{products} product{'s' * (products != 1)} of two tensors without a softmax" if products else
        "no softmax, and no product of two tensors that the model computed"
    )  # fmt: skip
    return ConfigError(
        f"{caller}(model): no attention in {type(model).__name__}; looked for F.scaled_dot_product_attention, "
        f"flex_attention and other fused functions, nn.MultiheadAttention, and softmax of a product of queries and "
        f"keys, multiplied by values; nearest: {nearest}"
    )


SOME = 16  # rows


class FollowedForward:
    """Recognises attention in forwards of a model, one at a time, in its thread and those that it starts, uncompiled;
    compares, measures and publishes it, with δ in the backward pass. What the model computes does not change."""

    def __init__(
        self, model: nn.Module, aside: Container[nn.Module], caller: str, *, known: bool,
        begin: Callable[[nn.Module], bool], end: Callable[[nn.Module, Any], None],
    ) -> None:  # fmt: skip
        """
        Args:
            aside: modules whose attention headwise computes, with all modules in them. known: whether any is watched.
            caller: the function that a user called. begin: called before an entrance is; returns whether it called
                `follow`. end: called after it, with the result; may call `close`.
        """
        self._modules, self._aside = {module: name for name, module in model.named_modules()}, aside
        parts = compiled_parts(model.named_modules())
        self._part, self._name = bool(parts), (parts[0] if parts else "") or type(model).__name__
        self._caller, self._known, self._begin, self._end = caller, known, begin, end
        self._warned = False
        self._whole: set[nn.Module] = set()  # modules of which a whole output was compared
        self._threads = OtherThreads(self._modules)
        self._forward = ExitStack()
        self._callback: Any = None  # what compiled code in that thread until then
        self.seen: Tracked | None = None  # in the last forward that was followed
        self.home: int | None = None  # the thread in which a forward is followed
        self.stays = False  # whether the call that begins is of compiled code, in which layers of headwise are seen

    def hooks(self, entrances: Iterable[nn.Module]) -> list[RemovableHandle]:
        """Register the hooks with which forwards are seen in all threads."""
        for hook in (Hook.__call__, FollowedForward._before, FollowedForward._after):
            uncompiled(hook)
        own = [handle for entrance in entrances for handle in around(entrance, self._before, self._after)]
        return own + self._threads.hooks()

    def _before(self, module: nn.Module, args: Any) -> None:
        not_in_one_graph(self._caller)
        callback = compile_with(None)
        self.stays = bool(callback and self._known)
        if self._begin(module):
            self._callback = callback
            self._warn()
        else:
            compile_with(callback)

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        inside, callback = self.home == get_ident(), self._callback
        try:
            self._end(module, result)
        finally:
            if inside and self.home != get_ident():
                compile_with(callback)

    def follow(self) -> None:
        """Follow a forward in this thread from now on."""
        self.close()
        self.home, self.seen = get_ident(), Tracked(self._modules, self._publish, self._aside)
        self._forward.enter_context(following(Following(self.seen)))
        self._forward.enter_context(self._threads.followed(self.seen))

    def close(self) -> None:
        """Follow it no more."""
        self.home = None
        self._forward.close()

    def _warn(self) -> None:
        """Say once that a model that is compiled, or called by compiled code, runs uncompiled."""
        if self._warned or not (self._part or self._callback):
            return
        self._warned = True
        how = "compiled" if self._part else "called by compiled code"
        more = "; watch(every=…) measures fewer" if self._caller == "watch" else ""
        warn(
            f"{self._caller}(model): {self._name} is {how}. Attention is recognised in the code that was compiled, so "
            f"that in measured forwards it runs uncompiled{more}",
        )

    def _publish(self, given: Values) -> None:
        """Weights are multiplied by values."""
        x, out, record = given.x, given.out, given.record
        now = modules_in_call(self._modules, given.product.modules)
        place = next(((one, self._modules[one]) for one in now if one in given.product.modules), None)
        weights = (given.of.left, given.of.right)[given.at]
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
                a = assembled(given)
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
            first, second = None if x.answer is None else x.answer.arrange, a.arrange
            arrange = second if first is None else lambda y: second(first(y))
            own = a.out.detach() if x.answer is None else arrange(returned.detach())
            result = _result(a, own, bool(record.function), *made)

            def publish(grad: Tensor) -> None:  # δ of each head and query; it must not hold `returned`
                with torch.no_grad():
                    dtype = torch.promote_types(result.dtype, torch.float32)
                    delta = (arrange(grad).to(dtype) * result.to(dtype)).sum(-1)
                for receiver in receivers:
                    receiver(delta)

            returned.register_hook(publish)


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


def _result(attention: Attention, own: Tensor, packed: bool, out: Tensor, lse: Tensor) -> Tensor:
    """What the code computed, as it is now: `out`, but for dropout, and for fully masked queries, which get a mean of
    values (or 0, if `packed`) from code that masks with finite numbers."""
    hidden = (lse == -torch.inf)[..., None]
    if not attention.dropout_p and not bool(hidden.any()):
        return out
    own = own.masked_fill(hidden if packed else hidden & own.isnan(), 0.0)
    return own if attention.dropout_p else torch.where(hidden, own.to(out.dtype), out)
