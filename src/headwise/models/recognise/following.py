"""The mode that intercepts every function of PyTorch while a model runs, in all its threads, uncompiled."""

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from headwise.kernels.compiling import stance
from headwise.kernels.events import original
from headwise.models.frames import runs
from headwise.models.hooks import around
from headwise.models.recognise.chains import see
from headwise.models.recognise.functions import LIBRARIES
from headwise.models.recognise.libraries import FusedCall, Library, arguments, first_of, intercepted, take
from headwise.models.recognise.tracked import IGNORED, OPAQUE, RETURN_OTHERS, SAME, VIEWS, Tracked, unexpected

IN_GRAPH = (
    "{}(model): the model is called by a module that was compiled with fullgraph=True, in which attention cannot be "
    "recognised; give the module that torch.compile returned, which then runs uncompiled"
)


def compiled_parts(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The names of those of these modules that torch.compile has compiled."""
    if "torch._dynamo" not in sys.modules:
        return []
    kind = torch._dynamo.OptimizedModule
    return [
        ".".join(part for part in name.split(".") if part != "_orig_mod") for name, module in modules
        if isinstance(module, kind) or getattr(module, "_compiled_call_impl", None) is not None
    ]  # fmt: skip


def uncompiled(hook: Callable[..., Any]) -> None:
    """Never compile this function: torch.compile would set its callback again after it, over `compile_with`."""
    from torch._dynamo.eval_frame import skip_code  # its import takes as long as that of PyTorch

    skip_code(hook.__code__)


def not_in_one_graph(caller: str) -> None:
    """In such a hook: raise if the code that is compiled must be one graph."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=IN_GRAPH.format(caller))  # the error of fullgraph=True


def compile_with(callback: Any) -> Any:
    """Set the callback that compiles the frames of this thread, None for none; returns the one until now. `set_stance`
    and `disable` hold for whole calls, not from a hook before a call to a hook after it."""
    return set_eval_frame(callback)


# PyTorch's function without its first lines, which would hand the whole of it to the mode again.
_mha = F.multi_head_attention_forward
_OPENED = types.FunctionType(
    _mha.__code__, {**_mha.__globals__, "has_torch_function": lambda tensors: False}, _mha.__name__, _mha.__defaults__
)


def name_of(func: Any) -> str:
    """The name of a function; of an operator of a graph, such as aten.add.Tensor, that of the function it overloads."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


Kind = Literal["attribute", "heads", "operator", "ignored", "seen"]
_kinds: dict[Any, tuple[str, Kind]] = {}


def _kind(func: Any) -> tuple[str, Kind]:
    """The name of a function, and whether it reads an attribute that is not followed, is that of nn.MultiheadAttention,
    computes a whole attention, or is ignored; kept, as each call needs it."""
    name = name_of(func)
    kind: Kind = "seen"
    attention = ("attention" in name or "attn" in name) and name != "scaled_dot_product_attention"  # not followed
    if name == "__get__":
        name = func.__self__.__name__
        kind = "seen" if name in VIEWS or name in SAME else "attribute"
    elif func is _mha:
        kind = "heads"
    elif name in OPAQUE or (isinstance(func, _OPERATORS) and attention):
        kind = "operator"
    elif name in IGNORED:
        kind = "ignored"
    # Others may hold a user's tensors.
    own = type(func) is not types.FunctionType or (func.__module__ or "").partition(".")[0] == "torch"
    if own and type(func) in _LASTING and not isinstance(getattr(func, "__self__", None), Tensor):
        _kinds[func] = name, kind
    return name, kind


Self = TypeVar("Self", bound="Following")


class Following(TorchFunctionMode):
    """Follows tensors while it is open. PyTorch does not take its fused paths of whole layers within it."""

    def __init__(self, seen: Tracked) -> None:
        super().__init__()
        self.seen = seen
        self._home, self.over = 0, False

    def __enter__(self: Self) -> Self:
        # Modes of this thread that ended in another one, as far as no other mode was entered since.
        while (modes := _get_current_function_mode_stack()) and isinstance(modes[-1], Following) and modes[-1].over:
            _pop_mode()
        self._home = get_ident()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """In another thread, out of reach of the modes, it does nothing until the next mode in its thread begins."""
        if get_ident() == self._home:
            super().__exit__(*error)
        else:
            self.over = True

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if self.over:
            return func(*args, **kwargs)
        name, kind = (_kinds.get(func) if type(func) in _LASTING else None) or _kind(func)
        if kind == "attribute":
            return func(*args, **kwargs)
        if kind == "heads":
            with self:
                return _OPENED(*args, **kwargs)
        out = self.call(func, name, args, kwargs)
        if kind == "operator":
            called = str(func) if isinstance(func, _OPERATORS) else f"torch.{name_of(func)}"
            reason = f"computed by the operator {called} in compiled code, whose parts are not seen"
            self.seen.record(out, reason, near=True)
        elif kind == "seen" and (isinstance(out, Tensor) or name in RETURN_OTHERS):
            seen = self.seen
            try:
                see(seen, func, name, args, kwargs, out)
            except Exception as error:  # following it must not disturb the model
                seen.record(out, f"{name}: {unexpected(error)}")
            while seen.ready:  # what subscribers raise is raised through the model
                seen.on_values(seen.ready.pop())
        return out

    def call(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute the function."""
        return func(*args, **kwargs)

    def instead(self, library: Library, name: str, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """What a function of another package returns, computed in another way; None if it has to be called."""
        return None

    def after(self, call: FusedCall | None, out: Any) -> Any:
        """What is returned of a function of another package that was called, and noted as `call`."""
        return out

    def note(
        self, library: Library, name: str, function: Callable[..., Any], given: dict[str, Any], out: Any
    ) -> FusedCall | None:
        """Take note of a call of a function of another package with these arguments by name, which returned `out`, or a
        tensor without numbers. Returns what it computes; None if it is not followed."""
        seen = self.seen
        record = seen.record(first_of(out), f"{library.module}.{name}")
        record.function = name
        call = None
        try:
            call = library.read(given, out, function, seen)
            call = replace(call, own=call.own or library.own(given, out))
            take(seen, call, record)
        except Exception as error:
            record.reason = f"{name}: {unexpected(error)}"
        while seen.ready:
            seen.on_values(seen.ready.pop())
        return call


@contextmanager
def following(mode: Following) -> Iterator[None]:
    """Within it, tensors are followed. Compiled models run uncompiled, so that their functions are seen."""
    try:
        with stance("force_eager"), intercepted(list(_READERS), _library), mode:
            yield
    finally:
        mode.seen.forget()


_OPERATORS = (OpOverload, OpOverloadPacket)
_LASTING = frozenset({
    *_OPERATORS, types.BuiltinFunctionType, types.FunctionType, types.MethodDescriptorType, types.MethodWrapperType,
    types.WrapperDescriptorType,
})  # fmt: skip
_READERS = {(library.module, name): library for library in LIBRARIES for name in library.names}


def _library(
    module: str, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call of a function of another package, of which nothing inside is followed."""
    modes = [one for one in _get_current_function_mode_stack() if isinstance(one, Following)]
    if not modes:
        return function(*args, **kwargs)
    library = _READERS[module, name]
    with _without(modes[0]), stance("default"):
        try:
            given = arguments(function, args, kwargs)
        except TypeError:  # which it raises itself
            return function(*args, **kwargs)
        for mode in modes:
            out = mode.instead(library, name, function, given)
            if out is not None:  # and published, to those who watch
                return out
        out = function(*args, **kwargs)
        for mode in modes:
            out = mode.after(mode.note(library, name, function, given, out), out)
    return out


@contextmanager
def _without(mode: TorchFunctionMode) -> Iterator[None]:
    """Within it, this mode and those above it are off, as they are for the functions that a function calls."""
    off: list[Any] = []
    try:
        while not off or off[-1] is not mode:
            off.append(_pop_mode())
        yield
    finally:
        while off:
            _push_mode(off.pop())


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class OtherThreads:
    """Follows calls of these modules and of replicas in other threads, as a `TorchFunctionMode` belongs to one. Its
    hooks stay: PyTorch iterates over them where a forward ends with an error."""

    def __init__(self, modules: Mapping[nn.Module, str]) -> None:
        self._modules = modules
        self._seen: Tracked | None = None  # of the forward that is running
        self._home = 0  # its thread, and the others
        self._running: dict[int, tuple[nn.Module, Following, Tracked, Tracked]] = {}

    def hooks(self) -> list[RemovableHandle]:
        """Register those that follow calls."""
        if compiled_parts((name, module) for module, name in self._modules.items()):
            return []  # what torch.compile has compiled has no hooks that are registered later
        # Layers of PyTorch compute no attention, or are known; those of a transformer would not take their fused path.
        own = [
            module for module in self._modules if not isinstance(module, torch.jit.ScriptModule)
            and (not type(module).__module__.startswith("torch.nn.modules.") or isinstance(module, _CONTAINERS))
        ]  # fmt: skip
        return [handle for module in own for handle in around(module, self._before, self._after)]

    @contextmanager
    def followed(self, seen: Tracked) -> Iterator[None]:
        """Within it, the forward that `seen` belongs to runs in this thread."""
        self._seen, self._home = seen, get_ident()
        try:
            yield
        finally:
            self._seen = None

    def _before(self, module: nn.Module, args: Any) -> None:
        seen = self._seen  # None in most code that torch.compile traces
        if seen is None or (here := get_ident()) == self._home:
            return
        if here in self._running:
            if runs(here, self._running[here][0]):
                return
            self._ended(here).over = True  # without hooks, such as by the end of the thread
        if original(module, self._modules) in self._modules:  # which a copy of it, with its hooks, is not
            other = Tracked(seen.modules, seen.on_values, seen.aside)
            mode = Following(other)
            mode.__enter__()
            self._running[here] = module, mode, other, seen

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        if not self._running:  # as in most code that torch.compile traces
            return
        if (here := get_ident()) in self._running and self._running[here][0] is module:
            self._ended(here).__exit__(None, None, None)

    def _ended(self, thread: int) -> Following:
        """The mode of a call that has ended in a thread."""
        _, mode, other, seen = self._running.pop(thread)
        seen.join(other)
        return mode
