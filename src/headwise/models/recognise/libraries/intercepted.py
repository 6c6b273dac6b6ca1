"""Functions of Python that are called wherever they were imported: their code is replaced for a while."""

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

_OnCall = Callable[[str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_lock = Lock()
_originals: dict[str, tuple[Any, types.FunctionType, _OnCall, int]] = {}  # function, as it was, callback, users


def _instead(*args: Any, **kwargs: Any) -> Any:
    from headwise.models.recognise.libraries.intercepted import called

    return called("KEY", args, kwargs)


def called(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function of this key, by way of the callback."""
    _, original, on_call, _ = _originals[key]
    module, _, name = key.rpartition(".")
    return on_call(module, name, original, args, kwargs)


@contextmanager
def intercepted(names: list[tuple[str, str]], on_call: _OnCall) -> Iterator[None]:
    """Within it, a call of one of these functions, in any thread, is on_call(module, name, function as it was, args,
    kwargs).

    Args:
        names: modules and the names of functions of Python in them; what is not imported, or not there, is left out.
    """
    entered: list[str] = []
    try:
        with _lock:
            for module, name in names:
                function = getattr(sys.modules.get(module), name, None)
                if isinstance(function, types.FunctionType) and not _under_another_name(f"{module}.{name}", function):
                    _enter(f"{module}.{name}", function, on_call)
                    entered.append(f"{module}.{name}")
        yield
    finally:
        with _lock:
            for key in entered:
                _leave(key)


def arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _under_another_name(key: str, function: types.FunctionType) -> bool:
    return any(at is function and one != key for one, (at, *_) in _originals.items())


def _enter(key: str, function: types.FunctionType, on_call: _OnCall) -> None:
    if key in _originals:
        at, original, callback, users = _originals[key]
        _originals[key] = at, original, callback, users + 1
        return
    code = function.__code__
    original = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__, original.__dict__ = function.__kwdefaults__, function.__dict__
    _originals[key] = function, original, on_call, 1
    constants = tuple(key if one == "KEY" else one for one in _instead.__code__.co_consts)
    function.__code__ = _instead.__code__.replace(co_consts=constants, co_freevars=code.co_freevars)


def _leave(key: str) -> None:
    function, original, on_call, users = _originals[key]
    if users > 1:
        _originals[key] = function, original, on_call, users - 1
        return
    function.__code__ = original.__code__
    del _originals[key]
