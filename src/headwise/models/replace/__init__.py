"""Attention of any model, computed by `attend` where it is certain that it is the same function.

In its first forward pass a model computes everything itself, and each attention that is recognised is compared with
`attend` (verdicts by module, line and form of the computation). From the next pass on, products of queries and keys at
certified places are `Deferred`: tensors that are written down and not computed. What is done to them is written down
too, until they are multiplied by values; then `attend` computes the result. Whatever else reads a deferred tensor gets
exactly the numbers that the code would have computed, and the call is computed by its own code.

Here are the passes of a model.

deferred     tensors that are not computed, and the mode that defers
certifying   a pass in which everything is compared, what it returns, and remarks
"""

from contextlib import ExitStack
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import ConfigError, warn
from headwise.kernels import events
from headwise.kernels.events import here as settings, in_backward, subscribers_of
from headwise.map.attention import attend_to
from headwise.models.frames import Calls, in_checkpoint
from headwise.models.hooks import arguments
from headwise.models.recognise.attention import assembled
from headwise.models.recognise.following import compile_with, following, not_in_one_graph, uncompiled
from headwise.models.recognise.publisher import explained, nothing
from headwise.models.recognise.tracked import UNEXPECTED, Followed, Lost, NotFinite, Tracked, Values, unexpected
from headwise.models.replace.deferred import Deferred, Deferring, Place, without_shifts
from headwise.publishing import attended
from headwise.rule import own_dtypes

Key = tuple[Any, ...]
READ = "its scores or weights are read before they are multiplied by values"


class Replacement:
    """Recognises attention in each forward pass of a model. What a pass certifies is replaced from the next one on."""

    def __init__(self, model: nn.Module, apart: frozenset[nn.Module] = frozenset()) -> None:
        self.model = model
        self.modules = {module: name for name, module in model.named_modules()}
        self.computed: dict[str, str] = {}  # name of a module → why its attention is computed by its own code
        self.taken: set[str] = set()  # names of the modules of which headwise has computed, or can compute, a call
        self._apart = apart  # modules whose attention is computed in another way already
        self._verdicts: dict[Place, dict[Key, str]] = {}  # why not; "" if it is the same function
        self._certified: dict[Place, frozenset[Key]] = {}  # as of the beginning of the last forward
        self._orders: dict[tuple[Place, Key], tuple[int, ...]] = {}  # of the dimensions in memory
        self._open: dict[int, _Open] = {}  # by thread
        self._calls = Calls()
        self._handles: list[RemovableHandle] = []
        self._checked = False

    @property
    def attached(self) -> tuple[str, ...]:
        """Names of the modules whose attention is computed by headwise, or will be from the next forward on."""
        return tuple(name for name in self.modules.values() if self.computed.get(name) == "")

    @property
    def skipped(self) -> dict[str, str]:
        """name → why a module's attention is computed by its own code."""
        return {name: why for name, why in self.computed.items() if why}

    def check(self, seen: Tracked) -> None:
        """Raise ConfigError if a whole forward has certified nothing; warn of what cannot be replaced."""
        if not self.computed:
            if self._apart:
                return
            self.close()
            raise nothing(self.model, seen, "attach")
        for one in seen.softmaxes:  # of functions of other packages that are not followed
            if one.function and not one.done and one.modules and one.modules[0] not in self._apart:
                self.computed.setdefault(self.modules[one.modules[0]], f"{one.reason} ({Path(one.line).name})")
        listed = "; ".join(f"{name or type(self.model).__name__}: {why}" for name, why in self.skipped.items())
        if not self.attached and not self._apart:
            self.close()
            raise ConfigError(
                f"attach(model): headwise computes no attention of {type(self.model).__name__} as its own code does: "
                f"{listed}"
            )
        if listed:
            warn(f"attach(model): not attached: {listed}")

    def open(self) -> None:
        """Follow every forward pass from now on."""
        for hook in (self._before, self._after):
            uncompiled(hook)
        for module in self.modules:
            if module is self.model or not type(module).__module__.startswith("torch.nn."):
                self._handles += [
                    module.register_forward_pre_hook(self._before),
                    module.register_forward_hook(self._after, prepend=True, always_call=True),  # nested in others
                ]

    def close(self) -> None:
        """Compute everything as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        here = self._open.pop(get_ident(), None)
        if here is not None:
            here.close()

    def run(self, batch: Any) -> None:
        """Call the model once, with its own code, without gradients; certify what can be; ConfigError if nothing."""
        args, kwargs = arguments(batch)
        here = self._open[get_ident()] = _Open(self)
        self._checked = True
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                self.model(*args, **kwargs)
        finally:
            self._open.pop(get_ident(), None)
            here.close()
        self.check(here.seen)

    def _before(self, module: nn.Module, args: Any) -> None:
        """Runs before a call of a module: an outermost call begins a forward, or its repetition in a backward pass."""
        not_in_one_graph("attach")
        callback = compile_with(None)
        # A copy of the model has the hooks too.
        if module not in self.modules or not self._calls.begin(module) or settings().own_code:
            compile_with(callback)
            return
        if (interrupted := self._open.pop(get_ident(), None)) is not None:
            interrupted.close()
        if not in_backward():
            self._certified = {
                place: frozenset(key for key, why in keys.items() if not why) for place, keys in self._verdicts.items()
            }
        self._open[get_ident()] = _Open(self, callback)

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        if module not in self.modules or not self._calls.end(module):
            return
        here = self._open.pop(get_ident(), None)
        if here is None:
            return
        try:
            here.close()
            if module is self.model and result is not None and not self._checked:
                self._checked = True
                self.check(here.seen)
            softmaxes = here.seen.softmaxes if events.editing and result is not None else []
            done = {one.modules[0] for one in softmaxes if one.done and one.modules} | self._apart
            for one in softmaxes:
                if not one.done and one.modules and one.modules[0] not in done and is_edited(one.modules[0]):
                    raise not_edited(self.modules[one.modules[0]], f"{one.reason} ({Path(one.line).name})")
        finally:
            compile_with(here.callback)

    def values(self, mode: "_Open", given: Values) -> None:
        """Weights are multiplied by values."""
        x, out = given.x, given.out
        given.record.done = True
        place = mode.seen.place(given.product)
        if place is None or place[0] in self._apart:
            return
        module, name = place
        running = given.product.modules
        where, key = (running[0] if running else None, given.product.line), key_of(given, mode.dropout_p)
        fused = out.is_meta and not isinstance(out, Deferred)
        waiting, why = fused or (isinstance(out, Deferred) and not out.made), ""
        if waiting:
            why = own_code(out, x)
            if key in self._certified.get(where, ()) and not why:
                try:
                    made = self._attended(module, given, mode.dropout_p)
                    made = in_order(made, self._orders.get((where, key)))
                except Lost as reason:
                    why = str(reason)
                else:
                    self.computed[name] = ""
                    if isinstance(out, Deferred):
                        out.set(made)
                    else:
                        mode.resolved = made
                    return
            if why:
                self.computed[name] = why
            if fused:
                return
            out = out.dense() if isinstance(out, Deferred) else out
            given = given._replace(out=out)
        known = self._verdicts.setdefault(where, {})
        if not in_backward():
            self._orders[where, key] = order_of(out)
            if key not in known:
                try:
                    self.computed[name] = known[key] = self._compared(name, given)
                except NotFinite as reason:  # a later call may show what it is
                    self.computed[name] = str(reason)
            elif not waiting and key in self._certified.get(where, ()):
                own = "its own function computed it in the last call"
                why = self.computed[name] = READ if where in mode.deferred else self.computed.get(name) or own
            elif not waiting or known[key]:
                self.computed[name] = known[key]
        if known.get(key) == "":
            self.taken.add(name)
        if is_edited(module):
            if why := why or known.get(key, self.computed.get(name) or "its form was not compared"):
                raise not_edited(name, why)
            try:
                made = self._attended(module, given, mode.dropout_p)
            except Lost as reason:
                raise not_edited(name, str(reason)) from None
            mode.edited = in_order(made, order_of(out))

    def _compared(self, name: str, given: Values) -> str:
        """Why a call of that module must not be replaced; "" if `attend` computes the same. Raises NotFinite."""
        x = given.x
        if x.own:
            return _said(x)
        if x.note:
            return explained(x, "the same function only for these numbers").split("; ")[0]
        if in_checkpoint():
            return "a part of its forward is called by torch.utils.checkpoint; checkpoint whole modules instead"
        try:
            with torch.no_grad(), own_dtypes(given.out):
                a = assembled(given)
                mine, amap = a.attended()
                found = a.check(mine, amap, every=False)
            if found.remark:
                warn(f"attach(model): {name or type(self.model).__name__}: {found.remark}")
        except NotFinite:
            raise
        except (Lost, *UNEXPECTED) as error:
            return unexpected(error)
        return ""

    def _attended(self, module: nn.Module, given: Values, dropout_p: float) -> Tensor:
        """The result of the code, computed by `attend`."""
        out, plain = given.out, without_shifts(given.x)
        assert plain is not None
        q = given.of.right if given.at == 0 else given.of.left  # of the device of the call
        # Modes of others, such as that of `watch`, would see how it is computed.
        with own_dtypes(q), torch._C.DisableTorchFunction():
            a = assembled(given._replace(x=plain, out=torch.empty(out.shape, dtype=out.dtype, device="meta")))
            made, _ = attended(
                module, a.q, a.k, a.v, to_itself=a.to_itself, at_end=a.at_end, unplaced=a.unplaced, compute=_computed,
                mask=a.mask, scale=a.scale, score=a.scores, dropout_p=max(a.dropout_p, dropout_p),
            )  # fmt: skip
            return a.restore(made).to(out.dtype)


def _computed(*given: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """`attend_to`; Lost if these are no arguments of it. What subscribers raise is raised through the model."""
    try:
        return attend_to(*given, **options)
    except UNEXPECTED as error:
        if settings().edited is not None:  # an edit that does not fit the call
            raise
        raise Lost(unexpected(error)) from error


def is_edited(module: nn.Module) -> bool:
    """Whether the attention of a module is to be computed with edits."""
    return bool(events.editing) and any(one.edits for one in subscribers_of(module))


def not_edited(name: str, why: str) -> ConfigError:
    """The error for a call that has edits, but is computed by the code of the module."""
    return ConfigError(f"intervene(handle): {name or 'the model'} was not edited, as its own code computed it: {why}")


class _Open(Deferring):
    """A forward pass of one thread, and torch.compile's callback from before it."""

    def __init__(self, of: Replacement, callback: Any = None) -> None:
        super().__init__(Tracked(of.modules, lambda given: of.values(self, given)))
        self.callback, self.stack = callback, ExitStack()
        self.certified = frozenset(place for place, keys in of._certified.items() if keys)
        self.stack.enter_context(following(self))

    def close(self) -> None:
        """End it, without a reference to itself, so that it is freed at once."""
        self.stack.close()
        self.seen.on_values = lambda given: None


def key_of(given: Values, dropout_p: float) -> Key:
    """What was done between the two products, without the numbers: calls with the same key have the same form."""
    x, first, softmax = given.x, given.product, given.record
    shifts = [isinstance(v := step.value, Tensor) and (v.ndim == 0 or v.shape[-1] == 1) for step in x.steps]
    steps = tuple(step.kind for step, shift in zip(x.steps, shifts, strict=True) if not shift)
    letters = (first.of.a, first.of.b, first.of.out, given.of.a, given.of.b, given.of.out)
    return (
        steps, letters, given.at, given.side, x.stage, x.note, x.sink is not None, bool(x.dropout_p or dropout_p),
        first.dtype, softmax.dtype, softmax.function,
    )  # fmt: skip


def _said(x: Followed) -> str:
    """Why a function of another package has to be called itself, with its name and the line."""
    assert x.softmax is not None
    return f"{x.softmax.function}: {x.own} ({Path(x.softmax.line).name})"


def order_of(x: Tensor) -> tuple[int, ...]:
    """The dimensions in the order of their strides, the largest first: code may take a view that requires it."""
    strides = x.stride()
    return tuple(sorted(range(x.ndim), key=lambda i: (-strides[i], i)))


def in_order(x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The same tensor with that order in memory, without gaps."""
    if order is None or len(order) != x.ndim:
        return x.contiguous()
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.ndim)])


def own_code(out: Tensor, x: Followed) -> str:
    """Why a call must be computed as it is written, although its form is certified; "" if there is no reason."""
    if x.own:
        return _said(x)
    if without_shifts(x) is None:
        return "something that differs between keys is computed from its scores and added to them"
    if not isinstance(out, Deferred):
        return ""
    lineage = list(out.lineage())
    if any(one.made for one in lineage):
        return READ
    if any(one.made_by in ("detach", "data") or not one.graph for one in lineage) and out.requires_grad:
        return "gradients do not flow through all of it"
    return ""
