"""Whether the parameters of heads are what their module computes with, and nothing else's: what may be read, changed
or replaced.

`check_owned` is for what reads weights, `check_copied` for what computes the same with a copy, and `check_changeable`
for what changes them. The last two call each linear map on one row with a stand-in for its weight, so that whatever
lies between the two is found by its effect. `sharers` finds memory of two parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from headwise.base.run import without_memory
from headwise.errors import ConfigError
from headwise.kernels.compiling import stance
from headwise.kernels.graph import has_no_numbers, in_graph
from headwise.nn.layout import Part

Model = TypeVar("Model", bound=nn.Module)
LABELS = 61  # numbers of a stand-in are below it, exact in every floating dtype


def check_owned(place: str, module: nn.Module, parts: Iterable[Part]) -> None:
    """ConfigError for a map computed from more than its parameter, as an adapter around it does; `place` names its
    module. Weights that a hook computes before each call, as `torch.nn.utils.weight_norm` does, are brought up to
    date."""
    for part in parts:
        owner, kind = part.owner, type(part.owner)
        passed_on = isinstance(getattr(kind, part.name, None), property) and not parametrize.is_parametrized(owner)
        if passed_on or not hasattr(owner, part.name):
            what = f"{kind.__module__}.{kind.__qualname__}"
            raise ConfigError(
                f"{place}: {_name(module, owner)} is {what}, which has no {part.name} of its own: an adapter or a "
                f"quantized module. Merge the adapter into the weights, or load the model unquantized"
            )
        for hook in list(owner._forward_pre_hooks.values()):
            if part.name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None)):
                with torch.no_grad():
                    hook(owner, ())


def check_copied(place: str, module: nn.Module, parts: Iterable[Part]) -> None:
    """Raise ConfigError if a copy of the weights would not compute what the module computes: `check_owned`, and as
    `check_changeable`, but weights may be computed from others."""
    parts = list(parts)
    check_owned(place, module, parts)
    check_forward(place, module)
    check_maps(place, module, parts)


def check_changeable(place: str, module: nn.Module, parts: Iterable[Part]) -> None:
    """Raise ConfigError if a change of these parameters would not be one of what the module computes: `check_plain` and
    `check_maps`. place, module: as in `check_owned`."""
    parts = list(parts)
    check_plain(place, module, parts)
    check_maps(place, module, parts)


def check_plain(place: str, module: nn.Module, parts: Iterable[Part]) -> None:
    """Raise ConfigError for weights that are quantized, or computed from others (parametrizations, hooks, masks,
    adapters), and for a module whose `forward` was replaced on the instance."""
    for part in parts:
        for owner, name, x in tensors(part):
            what = f"{type(part.owner).__name__}.{part.name}"
            if not isinstance(x, Tensor):
                raise ConfigError(f"{place}: {what} is not a tensor; quantized modules are not supported")
            if not x.is_floating_point():
                raise ConfigError(
                    f"{place}: {part.name} is {x.dtype}: quantized weights are not supported; load them unquantized"
                )
            held = owner._parameters if part.letter in "qkvo" else {**owner._buffers, **owner._parameters}
            if type(local(x.data)) is not Tensor or id(held.get(name)) != id(x):
                raise ConfigError(
                    f"{place}: {what} is not a plain parameter but a parametrization, a mask, an adapter or a "
                    f"quantized tensor; merge it into the weights first"
                )
            if owner is part.owner and (x.ndim <= part.axis or x.shape[part.axis] < part.start + part.width):
                raise ConfigError(f"{place}: {what} has shape {tuple(x.shape)}, a part of its size; gather it first")
    check_forward(place, module)


def check_maps(place: str, module: nn.Module, parts: Iterable[Part]) -> None:
    """Raise ConfigError for linear maps that compute with more than their weight. Nothing is changed; hooks of these
    maps are called with one row. Maps of DTensors are not called."""
    for part in parts:
        plain = part.name == "weight" and part.owner._parameters.get("weight") is not None
        if plain and part.owner is not module and part.letter in "qkvo":
            _check_computes(place, module, part)


def check_state(model: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Raise ConfigError if the weights of a model have other names than those of a new one, which is to load them."""
    with without_memory():
        new = build().state_dict().keys()
    if different := sorted(model.state_dict().keys() ^ new):
        raise ConfigError(
            f"model: {different[0]!r} is a weight of it or of a new {type(model).__name__}, not of both, so that it "
            f"could not be loaded: a parametrization, a mask or an adapter; merge it into the weights first"
        )


def tensors(part: Part) -> Iterator[tuple[nn.Module, str, Any]]:
    """(module, name, tensor) of the parameters of a part."""
    x = part.tensor
    if isinstance(x, nn.ParameterList):
        yield from ((x, str(i), each) for i, each in enumerate(x))
    else:
        yield part.owner, part.name, x


def check_forward(place: str, module: nn.Module) -> None:
    """Raise ConfigError for a `forward` on the instance that is no wrapper of the class's, as `functools.wraps` marks
    it."""
    function, owner = _forward(module)
    kept = owner is module and any(vars(kind).get("forward") is function for kind in type(module).__mro__)
    if not kept:
        raise ConfigError(
            f"{place}: the forward of {type(module).__name__} was replaced on the instance, and what it computes with "
            f"the weights is not known; restore it first (del module.forward), or mark a wrapper by functools.wraps"
        )


def copied(model: Model, memo: dict[int, Any] | None = None) -> Model:
    """A deepcopy. ConfigError where a forward that was replaced on the instance would call the original."""
    result = deepcopy(model, memo)
    own = set(result.modules())
    for name, module in result.named_modules():
        owner = _forward(module)[1]
        if not isinstance(owner, nn.Module) or owner not in own:
            raise ConfigError(
                f"copy: the forward of {name or 'the model'} ({type(module).__name__}) was replaced on the instance, "
                f"and that of a copy would call the original; restore it first (del module.forward), or leave out copy"
            )
    return result


def _forward(module: nn.Module) -> tuple[Any, Any]:
    """The function that is called in the end, as far as wrappers name it, and the module that it is called with."""
    found: Any = vars(module).get("forward")
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    if found is None:
        return type(module).forward, module
    if isinstance(found, nn.Module):  # as of a compiled module
        return None, found
    if isinstance(found, partial):
        owner, *more = found.args or (None,)
        return found if more or found.keywords else found.func, owner
    return getattr(found, "__func__", found), getattr(found, "__self__", None)


class Owned(NamedTuple):
    """A tensor of a model: its qualified name, the module that holds it, its name there."""

    path: str
    owner: nn.Module
    name: str
    tensor: Tensor

    @property
    def region(self) -> tuple[Any, ...]:
        """What is equal for tensors that are one."""
        x = local(self.tensor)
        return x.device, x.data_ptr() or id(x), x.dtype, x.shape, x.stride()


def sharers(model: nn.Module) -> dict[tuple[nn.Module, str], list[Owned]]:
    """(module, name) of every parameter and buffer of a model → those in whose memory it lies, itself among them. A
    module at two names is listed with both."""
    held = [
        Owned(f"{path}.{name}".lstrip("."), module, name, x)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, x in (*module._parameters.items(), *module._buffers.items())
        if x is not None and x.layout is torch.strided and not is_lazy(x)
    ]
    extents: dict[Any, list[tuple[int, int, Owned]]] = defaultdict(list)
    for one in held:
        x = local(one.tensor)
        first = x.data_ptr() if x.numel() else 0
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) * x.element_size()
        extents[x.device if first else id(x)].append((first, first + last, one))
    found: dict[tuple[nn.Module, str], list[Owned]] = {}
    for several in extents.values():
        together: list[Owned] = []
        end = -1
        for first, last, one in sorted(several, key=lambda each: each[:2]):
            if first > end:
                together = []
            together.append(one)
            end = max(end, last)
            found[one.owner, one.name] = together
    return found


def check_unshared(place: str, parts: Iterable[Part], together: Mapping[tuple[nn.Module, str], list[Owned]]) -> None:
    """Raise ConfigError for parameters in whose memory another one lies. together: `sharers` of the model."""
    for part in parts:
        for owner, name, _ in tensors(part):
            one, *others = together[owner, name]
            if others:
                raise shared(place, one, others[0])


def shared(place: str, one: Owned, other: Owned) -> ConfigError:
    """The error for two tensors in one memory."""
    what = "are one tensor" if one.region == other.region else "share memory"
    return ConfigError(
        f"{place}: {one.path!r} and {other.path!r} {what}, and changing one would change both. Give each module its "
        f"own weights first (deepcopy)"
    )


def eagerly() -> AbstractContextManager[Any]:
    """A context in which compiled code runs as it is written; it may leave out hooks that are newer than it."""
    return nullcontext() if torch.compiler.is_compiling() else stance("force_eager")


def local(x: Tensor) -> Tensor:
    """The part of a DTensor that is on this rank; other tensors as they are."""
    found: Tensor = getattr(x, "_local_tensor", x)
    return found


def _name(module: nn.Module, owner: nn.Module) -> str:
    return next((name for name, child in module.named_modules() if child is owner), "") or "the module"


@torch.no_grad()
def _check_computes(place: str, module: nn.Module, part: Part) -> None:
    """Call a linear map on one row, with a stand-in for its weight and 0 for its bias: the output must be that of the
    stand-in, whose numbers change along the axis of the heads."""
    owner, x = part.owner, part.tensor
    assert isinstance(x, Tensor)
    if x.ndim != 2 or local(x) is not x or has_no_numbers(x) or in_graph():
        return
    inputs = part.axis if part.letter == "o" else 1 - part.axis
    labels = (torch.arange(x.shape[part.axis], device=x.device) % LABELS + 1).to(x.dtype)
    stand_in = {"weight": labels.unsqueeze(1 - part.axis).expand_as(x)}
    if (bias := owner._parameters.get("bias")) is not None:
        stand_in["bias"] = torch.zeros_like(bias)
    row = x.new_zeros(1, 1, x.shape[inputs])
    row[..., -1] = 1.0
    expected = labels[-1].expand(x.shape[1 - inputs]) if inputs == part.axis else labels
    try:
        with torch.autocast(x.device.type, enabled=False), eagerly():
            found = functional_call(owner, stand_in, (row,))
        same = isinstance(found, Tensor) and torch.equal(found.flatten(), expected)
        why = "does not compute with its weight alone"
    except Exception as error:  # code of the module, its wrappers and hooks
        same, why = False, f"cannot be called on one row ({type(error).__name__}: {error})"
    if not same:
        raise ConfigError(
            f"{place}: {_name(module, owner)} ({type(owner).__name__}) {why}, as with an adapter, a hook or a forward "
            f"that was replaced, so a change of the weight may have no effect; merge or remove it first"
        )
