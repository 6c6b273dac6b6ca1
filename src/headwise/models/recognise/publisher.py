"""`recognise(model, …)`: the attention in a forward pass; and how it is published to those who subscribe to it."""

import re
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from headwise.errors import ConfigError, warn
from headwise.kernels.call import sum_finite
from headwise.kernels.events import call_name, in_backward, subscribed, subscribers_of, within
from headwise.kernels.graph import is_batched
from headwise.kernels.spread import held_by
from headwise.map import AttentionMap
from headwise.map.attention import attend_to
from headwise.models.adapters.places import computed
from headwise.models.frames import modules_in_call, user_line
from headwise.models.hooks import Hook, around
from headwise.models.recognise.attention import Attention, Call, assembled
from headwise.models.recognise.following import (
    Following,
    OtherThreads,
    compile_with,
    compiled_parts,
    following,
    not_in_one_graph,
    uncompiled,
)
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
from headwise.table.show import as_html, as_text


def recognise(model: nn.Module, *args: Any, **kwargs: Any) -> "Recognition":
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


@dataclass(frozen=True, eq=False)
class Recognised(Call):
    """An attention call that was recognised, and its map.

    Attributes:
        q, k, v: [b, h, n, d], [b, h_kv, m, d] and [b, h_kv, m, d_v], detached, as they were multiplied (after rotary
            positions). Keys and values that were repeated for groups of heads are not repeated here, and those at the
            end that the mask hides from all queries are left out if it shows that the queries precede them.
        scale: factor on q·k, wherever the code applies it.
        mask: as a headwise mask; None if every key is visible. scores: soft cap, biases, learned sinks.
        dropout_p: of the weights.
        traced: whether it is known which axis holds heads, because queries or keys were traced back to a layer whose
            output was split, or the function defines it. If not, heads are the last of two or more leading axes, and
            the table has a question mark.
        name: the module's qualified name; name#2, name#3, … from its second call on.
        map: the weights, before dropout.
        error: the largest relative difference between a row of the map and of the code's own weights, where it made
            any, and between rows of the outputs, where there was no dropout.
        line: `file:line` of the code that multiplies weights and values.
        remark: how many rows are NaN or infinite on both sides, and were not compared; "" if there are none.
    """

    name: str
    map: AttentionMap
    error: float
    line: str
    remark: str

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.k.shape[1]

    def __repr__(self) -> str:
        values = zip(_HEAD[1:], _row(self)[1:], strict=True)
        return f"Recognised({self.name!r}, {', '.join(f'{name}={value}' for name, value in values)})"


@dataclass(frozen=True)
class NotFollowed:
    """A softmax, or something close to attention, that is no attention or is not followed.

    Attributes:
        name: the module's qualified name. reason: what it is, or what is not followed. line: `file:line` of the code.
    """

    name: str
    reason: str
    line: str

    @property
    def reason_and_line(self) -> str:
        """The reason, and the line in parentheses."""
        return self.reason + (f" ({Path(self.line).name})" if self.line else "")

    def __str__(self) -> str:
        return f"{self.name or '(the model)'}: {self.reason_and_line}"


@dataclass(frozen=True, eq=False)
class Recognition(Sequence[Recognised]):
    """The attention calls of one forward pass; it prints itself as a table.

    Attributes:
        calls: those that are recognised, in the order of the pass.
        not_followed: what else was seen, with reasons.
        output: what the model returned.
    """

    calls: tuple[Recognised, ...]
    not_followed: tuple[NotFollowed, ...]
    output: object

    def maps(self) -> dict[str, AttentionMap]:
        """name → map, in the order of the pass."""
        return {call.name: call.map for call in self.calls}

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        """A call by its number or by its name."""
        if isinstance(index, str):
            return {call.name: call for call in self.calls}[index]
        return self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        lines = [as_text(_HEAD, [_row(call) for call in self.calls], words=1, gap="  ")] if self.calls else []
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        return as_html(_HEAD, [_row(call) for call in self.calls], notes=self._notes())

    def _notes(self) -> list[str]:
        remarks = [f"{call.name or '(the model)'}: {call.remark}" for call in self.calls if call.remark]
        return [*remarks, *(f"not followed: {one}" for one in self.not_followed)]


_HEAD = ["module", "heads", "KV heads", "queries", "keys", "head_dim", "scale", "mask", "scores", "dropout", "error"]


def _row(call: Recognised) -> list[str]:
    _, h, n, m = call.map.shape
    scores = ", ".join(map(repr, call.scores)) or "–"
    return [
        call.name or "(the model)", str(h) + "?" * (not call.traced), str(call.num_kv_heads), str(n), str(m),
        str(call.q.shape[3]),
        f"{call.scale:.4g}", "none" if call.mask is None else repr(call.mask), scores, f"{call.dropout_p:g}",
        f"{call.error:.1g}",
    ]  # fmt: skip


def numbered(calls: Iterable[Any]) -> tuple[Any, ...]:
    """Calls with numbers in their names where a module is called again."""
    found: dict[str, Any] = {}
    for call in calls:
        name = call_name(call.name, found)
        found[name] = replace(call, name=name)
    return tuple(found.values())


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
        # aside: modules whose attention headwise computes, with all modules in them; known: whether any is watched.
        # begin: called before an entrance is, returns whether it called `follow`; end: after it, may call `close`.
        self._modules, self._aside = {module: name for name, module in model.named_modules()}, aside
        parts = compiled_parts(model.named_modules())
        self._part, self._name = bool(parts), (parts[0] if parts else "") or type(model).__name__
        self._caller, self._known, self._begin, self._end = caller, known, begin, end
        self._warned = False  # that it runs uncompiled
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
        if not self._begin(module):
            compile_with(callback)
            return
        self._callback = callback
        if (self._part or callback) and not self._warned:
            self._warned = True
            how = "compiled" if self._part else "called by compiled code"
            more = "; watch(every=…) measures fewer" if self._caller == "watch" else ""
            warn(
                f"{self._caller}(model): {self._name} is {how}. Attention is recognised in the code that was compiled, "
                f"so that in measured forwards it runs uncompiled{more}",
            )

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
        learned = torch.is_grad_enabled() and any(one.differentiable for one in subscribers_of(place[0]))
        # The graph keeps tensors as they are: gradient checkpointing, which does not repeat this, must not count them.
        unseen = saved_tensors_hooks(lambda x: (x.detach(), x._version), _as_saved) if learned else nullcontext()
        try:
            with torch.set_grad_enabled(learned), unseen, own_dtypes(out):
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


def _as_saved(saved: tuple[Tensor, int]) -> Tensor:
    """ConfigError if a tensor was changed in place since, which PyTorch does not look at where hooks save."""
    x, version = saved
    if x._version != version:
        raise ConfigError(
            "the map of a recognised attention has no gradients any more: a tensor of its call ({what}: q, k, or of "
            "its mask or scores) was changed in place since; let the code of the model change a copy",
            what=f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}",
        )
    return x


def _checked(
    attention: Attention, rows: int | None, made: list[Tensor], doubts: list[str], *given: Tensor,
    return_map: bool = True, **options: Any,
) -> tuple[Tensor, AttentionMap]:  # fmt: skip
    """`attend_to`, compared with the code; Lost if it differs, or is no call of `attend`. `made` gets its output and
    log-sum-exp, `doubts` the reason why nothing could be compared, if both are NaN or infinite everywhere."""
    try:
        out, amap = attend_to(*given, return_map=True, **options)
        with torch.no_grad():
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
    made[:] = [out.detach(), amap.lse.detach()]
    return out, amap


def _result(attention: Attention, own: Tensor, packed: bool, out: Tensor, lse: Tensor) -> Tensor:
    """What the code computed, as it is now: `out`, but for dropout, and for fully masked queries, which get a mean of
    values (or 0, if `packed`) from code that masks with finite numbers."""
    hidden = (lse == -torch.inf)[..., None]
    if not attention.dropout_p and not bool(hidden.any()):
        return out
    own = own.masked_fill(hidden if packed else hidden & own.isnan(), 0.0)
    return own if attention.dropout_p else torch.where(hidden, own.to(out.dtype), out)
