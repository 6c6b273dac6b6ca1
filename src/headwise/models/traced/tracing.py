"""Which numbers of which parameters belong to each head, by derivatives."""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from headwise.kernels.events import within
from headwise.models.hooks import arguments
from headwise.models.recognise.attention import Attention, assembled
from headwise.models.recognise.following import Following, name_of
from headwise.models.recognise.products import NAMES as PRODUCTS, contraction
from headwise.models.recognise.tracked import UNEXPECTED, Lost, Tracked, Values, learned, unexpected
from headwise.models.traced import (
    DIGITS,
    TRACED,
    Slices,
    Source,
    Traced,
    heads_in,
    is_plain,
    owner_of,
    slices_of,
    sources_of,
    whole,
)
from headwise.models.traced.sizes import Call, replaced, suspects, with_sizes
from headwise.rule import own_dtypes


@dataclass(eq=False)
class Result:
    """The result of one attention call, on its way to the output projection."""

    leaf: Tensor  # the result, a leaf of the graph of what follows
    arrange: Callable[[Tensor], Tensor]  # a tensor of its shape, as [b, h, n, d_v]
    shape: tuple[int, int, int, int]  # that shape
    known: Traced  # of its inputs
    running: list[tuple[nn.Module, Call]]  # the modules that were running, the innermost first
    output: nn.Module | None = None  # the projection, once it is found
    weight: tuple[Tensor, int] | None = None  # its weight, and the axis of its inputs
    batch_first: bool = True  # whether it receives [b, n, h·d_v]
    unheard: str = "no linear map receives the outputs of its heads"  # why it cannot be found
    arrived: bool = False

    def arrives(self, x: Any, module: nn.Module | None, weight: Tensor, axis: int) -> None:
        """Note an input x of a linear map of `module`, None for a function; axis: that of the weight's inputs."""
        if not isinstance(x, Tensor) or not x.requires_grad or self._grad(x, torch.ones_like(x)) is None:
            return
        self.arrived = True
        try:
            self.batch_first = self._order(x)
        except Lost as reason:
            self.unheard = str(reason)
            return
        if module is None:
            self.unheard = "its output projection is a function, not a module that is called"
            return
        self.output, self.weight, self.unheard = module, (weight, axis), ""

    def _order(self, x: Tensor) -> bool:
        """Whether x is [b, n, h·d_v], not [n, b, h·d_v]; Lost if it is not Concat(head_1 … head_h)."""
        b, h, n, d = self.shape
        width = x.shape[-1]
        labels = torch.arange(width, device=x.device)
        if width != h * d:
            raise Lost(f"its heads have {h * d} outputs, and the next map has {width} inputs")
        for digit in (labels % DIGITS, labels // DIGITS):
            grad = self._grad(x, digit.to(x.dtype).expand_as(x))
            assert grad is not None
            expected = digit.to(x.dtype).view(h, 1, d).expand(b, h, n, d)
            if not torch.equal(self.arrange(grad), expected):
                raise Lost("its heads are changed, or reordered, before the next linear map")
        if x.ndim == 2:
            if b > 1:
                raise Lost("its output projection receives batch and queries as one axis")
            return True
        rows = (torch.arange(x.shape[0], device=x.device) % DIGITS).to(x.dtype)
        grad = self._grad(x, rows.view(-1, *[1] * (x.ndim - 1)).expand_as(x))
        assert grad is not None
        at = self.arrange(grad)[:, 0, :, 0]  # [b, n]
        if x.shape[0] == b and torch.equal(at, rows[:, None].expand(b, n)):
            return True
        if x.ndim == 3 and x.shape[0] == n and torch.equal(at, rows.expand(b, n)):
            return False
        raise Lost("its output projection receives queries in an order that is not known")

    def _grad(self, x: Tensor, weights: Tensor) -> Tensor | None:
        (grad,) = torch.autograd.grad(x, self.leaf, weights, retain_graph=True, allow_unused=True)
        return grad


def trace(model: nn.Module, batch: Any, taken: Collection[nn.Module]) -> None:
    """Run the model once, in evaluation mode, and keep what is known of heads, but of modules in `taken`."""
    args, kwargs = arguments(batch)
    pass_ = _Pass(model, taken)
    with _unchanged(model), torch.inference_mode(False), torch.enable_grad(), within(own_code=True):
        with pass_:
            model(*args, **kwargs)
        found = {module: pass_.result(module, calls) for module, calls in pass_.calls.items()}
    for module, what in found.items():
        vars(module)[TRACED] = what
    pass_.seen.forget()


class _Pass(Following):
    """A forward pass, in which the outputs of layers and of attention are leaves of the graph. calls: of attention, by
    module."""

    def __init__(self, model: nn.Module, taken: Collection[nn.Module]) -> None:
        self.modules = {module: name for name, module in model.named_modules()}
        super().__init__(Tracked(self.modules, self._values))
        self.parameters: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in self.modules:
            for name, parameter in module._parameters.items():
                self.parameters[id(parameter)].append((module, name))
        self.taken = taken
        self.sources: list[Source] = []
        self.calls: dict[nn.Module, list[Result]] = defaultdict(list)
        self.leaf: Tensor | None = None  # the result of the attention that was just computed

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if self.leaf is not None:
            out, self.leaf = self.leaf.clone(), None
        elif isinstance(out, Tensor):
            out = self._layer(name_of(func), args, dict(kwargs or {}), out)
        return out

    def _layer(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        """A layer was called: its output, cut off from what came before."""
        source = _source(name, args, kwargs)
        known = self.seen.known(out)
        if source is None or known is None or not out.is_floating_point() or not torch.is_grad_enabled():
            return out
        x, weight, bias, axis = source
        held = self.parameters.get(id(weight), ())
        running = _running(self.modules)
        owner = next((one for one, _ in held if running and one is running[0][0]), None)
        given = running[0][1].args[0] if owner is not None and running[0][1].args else x
        for call in (call for calls in self.calls.values() for call in calls):
            if not call.arrived:
                call.arrives(given, owner, weight, 1 - axis)
        leaf = out.detach().requires_grad_()
        new = leaf.clone()
        self.sources.append(Source(leaf, name, weight, bias, axis))
        self.seen.remember(new, known)
        return new

    def _values(self, given: Values) -> None:
        out, record = given.out, given.record
        place = self.seen.place(given.product)
        if place is None or place[0] in self.taken:
            return
        try:
            with own_dtypes(out):
                a = assembled(given)
                with torch.no_grad():
                    mine, amap = a.attended()
                    a.check(mine, amap, every=True)
                known = self._inputs(a)
        except (Lost, *UNEXPECTED) as error:
            record.reason = unexpected(error)
            return
        record.done = True
        self.leaf = out.detach().requires_grad_()
        b, h, n, _ = a.q.shape
        running = [
            (module, Call(*tree_map_only(Tensor, lambda x: whole(x).detach().clone(), tuple(call))))
            for module, call in _running(self.modules)
        ]
        shape = b, h, n, a.v.shape[3]
        self.calls[place[0]].append(Result(self.leaf, a.arrange, shape, known, running))

    def _inputs(self, a: Attention) -> Traced:
        """What is known of the layers that made queries, keys and values."""
        h = a.q.shape[1]
        known = Traced(h, a.k.shape[1], a.q.shape[3], a.v.shape[3])
        spans, plain = {}, True
        slices: list[Slices] = []
        try:
            for letter, x, what in (("q", a.q, "queries"), ("k", a.k, "keys"), ("v", a.v, "values")):
                found = sources_of(x, self.sources)
                if len(found) != 1:
                    raise Lost(
                        f"its {what} are made by {len(found)} linear maps, not by one" if found else
                        f"its {what} are not made by a linear map, or gradients are not recorded there"
                    )  # fmt: skip
                if found[0].axis < 0:
                    raise Lost(f"its {what} are made by {found[0].made_by}, not by a linear map with a matrix")
                spans[letter] = span = heads_in(x, found[0], what)
                plain &= letter == "v" or is_plain(x, found[0], span)
                slices += slices_of(letter, found[0], span, "query", self.parameters)
        except Lost as reason:
            return replace(known, missing=str(reason))
        count = spans["k"].count
        if spans["q"].count != h or spans["v"].count != count:
            return replace(known, missing=f"it has {count} heads of keys and {spans['v'].count} of values")
        slices = [
            one if one.letter == "q" or count == h else replace(one, heads="key") for one in slices
        ]  # fmt: skip
        return replace(known, num_kv_heads=count, slices=tuple(slices), plain=plain)

    def result(self, module: nn.Module, calls: list[Result]) -> Traced:
        """What is known of a module after the pass."""
        found = [self._with_output(call) for call in calls]
        first = found[0]
        if any(replace(one, batch_first=first.batch_first) != first for one in found[1:]):
            reason = f"it computes {len(found)} attentions with different maps"
            return replace(first, slices=(), missing=reason, output=None, unheard=reason)
        if first.missing:
            return replace(first, missing=first.missing + suspects(first, module))
        return with_sizes(first, module, calls[0].running)

    def _with_output(self, call: Result) -> Traced:
        known = replace(call.known, output=call.output, unheard=call.unheard, batch_first=call.batch_first)
        if known.missing:
            return known
        if call.weight is None:
            return replace(known, slices=(), missing=call.unheard)
        weight, axis = call.weight
        try:
            owner, name = owner_of(weight, "o", self.parameters)
        except Lost as reason:
            return replace(known, slices=(), missing=str(reason))
        d = known.value_dim
        return replace(
            known, slices=(*known.slices, Slices("o", owner, name, axis, "query", 0, d, d, weight.shape[axis]))
        )


def _source(
    name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Tensor, Tensor | None, int] | None:  # fmt: skip
    """The input, weight, bias and the weight's axis of outputs (−1 if it is no matrix) of a call of a linear map."""
    if name == "linear":
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return given["input"], given["weight"], given.get("bias"), 0
    if name.startswith("conv") and len(args) > 1 and isinstance(args[1], Tensor):
        return args[0], args[1], None, -1
    if name not in PRODUCTS or (found := contraction(name, args, kwargs)) is None:
        return None
    if not learned(found.right) or learned(found.left):
        return (found.right, found.left, None, -1) if learned(found.left) else None
    if found.right.ndim != 2 or found.out[-1:] != found.b[-1]:
        return found.left, found.right, None, -1
    weight, axis = found.right, 1
    if (
        weight._base is not None
        and weight.shape == weight._base.shape[::-1]
        and weight.stride() == weight._base.stride()[::-1]
    ):
        weight, axis = weight._base, 0
    return found.left, weight, found.added, axis


def _running(modules: Mapping[nn.Module, str]) -> list[tuple[nn.Module, Call]]:
    """The modules whose forward is running, the innermost first, and the arguments of their calls."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    code = nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is code and frame.f_locals["self"] in modules:
            found.append((frame.f_locals["self"], Call(frame.f_locals["args"], frame.f_locals["kwargs"])))
        frame = frame.f_back
    return found


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Within it, the model is in evaluation mode, and one of transformers makes no cache, which a second call could not
    take; afterwards all attributes are what they were."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    cached = [config for config in configs if getattr(config, "use_cache", None) is True]
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for module in model.modules():  # graphs of torch.export have no eval()
        module.training = False
    for config in cached:
        config.use_cache = False
    try:
        yield
    finally:
        for config in cached:
            config.use_cache = True
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for module, attributes, buffers in before:
            replaced(vars(module), attributes)
            replaced(module._buffers, buffers)
