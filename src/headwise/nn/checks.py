"""Checks of the sizes, options and inputs of a design."""

import inspect
from collections.abc import Iterable
from numbers import Real
from operator import index

import numpy as np
import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, DTypeError, unknown_option
from headwise.rule import check_dense
from headwise.spread import check_local

# Arguments before the options in every constructor.
_SIZES = frozenset({"self", "d_model", "num_heads"})


def size(name: str, value: object, least: int = 1) -> int:
    """Return a whole number of at least `least`, Python's or NumPy's, as int; ConfigError otherwise."""
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(
            f"{name}={value!r}: expected a whole number of at least {least}",
            f"{name}={value!r}：应为不小于 {least} 的整数",
        )
    return number


def flag(name: str, value: object) -> bool:
    """Return an option that is on or off as bool; ConfigError for anything but True and False, or 1 and 0."""
    if not isinstance(value, (bool, int, np.bool_)) or value not in (True, False):
        raise ConfigError(f"{name}={value!r}: expected True or False")
    return bool(value)


def check_share(name: str, value: object) -> None:
    """Raise ConfigError for anything but a number from 0 to 1, 1 excluded."""
    if not isinstance(value, Real) or not 0.0 <= float(value) < 1.0:
        raise ConfigError(f"{name}={value!r}: expected 0 <= {name} < 1")


def parameters_of(design: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the options of a design's constructor, its own before those of base classes that it passes options to."""
    found: dict[str, inspect.Parameter] = {}
    for kind in design.__mro__:
        if "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
        named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in _SIZES}
        found = named | found
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break  # it passes no options on
    return found


def check_option(owner: str, option: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigError for an unknown option, with the closest match and all known options."""
    known = list(known)
    if option not in known:
        raise unknown_option(option, value, owner, known)


def check_input(module: nn.Module, name: str, x: object) -> None:
    """Raise DTypeError if x is not a dense tensor, or has a dtype that no weight of the module has; ConfigError under
    PyTorch's context parallelism.

    Under autocast any floating dtype is accepted, as it is converted; inside torch.compile nothing is checked.
    """
    if not isinstance(x, Tensor):
        raise DTypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if torch.compiler.is_compiling():
        return
    check_local()
    first = next(module.parameters(), None)
    check_dense(name, x)
    if first is None or x.dtype == first.dtype:
        return
    dtypes = {p.dtype: None for p in module.parameters() if p.is_floating_point()}  # quantized weights do not count
    if not dtypes or x.dtype in dtypes or (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        return
    have = " and ".join(str(dtype) for dtype in dtypes)
    expected = str(next(iter(dtypes))).removeprefix("torch.")
    raise DTypeError(
        f"{name} is {x.dtype}, but the weights of {type(module).__name__} are {have}; convert one of them, for "
        f"example {name}.to(torch.{expected})"
    )


def check_cache(cache: object) -> None:
    """Raise DTypeError if this is not a cache."""
    if cache is None:
        return
    if isinstance(cache, type) or not all(hasattr(cache, name) for name in ("seen", "limits", "append")):
        given = f"the class {cache.__name__}" if isinstance(cache, type) else type(cache).__name__
        raise DTypeError(f"cache: expected a headwise cache such as KVCache(), got {given}")
