"""What every design asks of its sizes, of its options and of what it is called with."""

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from operator import index

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, DTypeError

# What stands before the options in every constructor.
_SIZES = frozenset({"self", "d_model", "num_heads"})


def size(name: str, value: object, least: int = 1) -> int:
    """A whole number of at least `least`, also one of NumPy's, as an int; ConfigError that names it otherwise."""
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name}={value!r}: expected a whole number of at least {least}")
    return number


def parameters_of(design: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """The options of a design's constructors, its own before those that it hands options on to."""
    found: dict[str, inspect.Parameter] = {}
    for kind in design.__mro__:
        if "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
        named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in _SIZES}
        found = named | found
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break  # it hands nothing on
    return found


def check_option(owner: str, option: str, value: object, known: Iterable[str]) -> None:
    """Raise for an option that is not known, with the nearest and all that are."""
    known = list(known)
    if option not in known:
        close = get_close_matches(option, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"{option}={value!r}: {hint}{owner} takes {', '.join(known)}")


def check_input(module: nn.Module, name: str, x: object) -> None:
    """Raise if x is no tensor, or of a dtype that no weight of the module has.

    Autocast converts floating dtypes, so they are let through there; inside torch.compile PyTorch itself looks.
    """
    if not isinstance(x, Tensor):
        raise DTypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if torch.compiler.is_compiling():
        return
    first = next(module.parameters(), None)
    if first is None or x.dtype == first.dtype:
        return
    dtypes = {p.dtype: None for p in module.parameters() if p.is_floating_point()}  # quantised weights say nothing
    if not dtypes or x.dtype in dtypes or (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        return
    have = " and ".join(str(dtype) for dtype in dtypes)
    wanted = str(next(iter(dtypes))).removeprefix("torch.")
    raise DTypeError(
        f"{name} is {x.dtype}, but the weights of {type(module).__name__} are {have}; convert one of them, for "
        f"example {name}.to(torch.{wanted})"
    )


def check_cache(cache: object) -> None:
    """Raise if this has not what a module asks of a cache."""
    if cache is not None and not all(hasattr(cache, name) for name in ("seen", "limits", "append")):
        raise DTypeError(f"cache: expected a headwise cache such as KVCache(), got {type(cache).__name__}")
