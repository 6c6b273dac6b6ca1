"""What functions of positions read beside their arguments: results that were computed from them stay right as long as
that is the same."""

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor

Made = TypeVar("Made")
_PLAIN = (int, float, str, bool, type(None), types.BuiltinFunctionType)
_FIXED = (
    "torch",
    "math",
    "operator",
    "builtins",
)  # packages whose names nobody changes, unlike those of a user's module
State = tuple[Any, ...]


class Kept:
    """Results by the functions that they were computed from, which are freed with them."""

    def __init__(self) -> None:
        self._results: WeakKeyDictionary[Callable[..., Any], dict[Any, tuple[State, Any]]] = WeakKeyDictionary()

    def made(
        self, functions: Sequence[Callable[..., Any] | None], tensors: Sequence[Tensor | None], key: Any,
        make: Callable[[], Made],
    ) -> Made:  # fmt: skip
        """make(), or its result for the same key, if it was computed from these tensors, unchanged, and if these
        functions have read the same since. The result must not refer to the functions.

        Only plain functions are known to read the same: of numbers, tensors that were not written to, and other plain
        functions.
        """
        given = [one for one in functions if one is not None]
        states = [*(state_of(one) for one in given), *(_state(one, 1) for one in tensors)]
        if not given or any(state is None for state in states):
            return make()
        state: State = (*(one and ref(one) for one in functions), *states)
        results = self._results.setdefault(given[0], {})
        if key in results and results[key][0] == state:
            found: Made = results[key][1]
            return found
        found = make()
        results[key] = state, found
        return found


def state_of(function: Any, depth: int = 8) -> State | None:
    """What a function reads beside its arguments; None if that is not known."""
    if not isinstance(function, types.FunctionType) or not depth:
        return None
    values: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    try:
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is empty so far
        return None
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        values += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    found = tuple(_state(value, depth - 1) for value in values)
    return None if any(one is None for one in found) else found


def _state(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return None if value.is_inference() else (_Same(value), value._version)
    package = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    fixed = isinstance(value, types.ModuleType | type) and str(package).partition(".")[0] in _FIXED
    if fixed or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        parts = tuple(_state(one, depth) for one in value)
        return None if any(one is None for one in parts) else (type(value), parts)
    return state_of(value, depth)


class _Same:
    """Equal for one and the same tensor only, which it does not keep."""

    def __init__(self, x: Tensor) -> None:
        self._of: ReferenceType[Tensor] = ref(x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._of() is not None and self._of() is other._of()

    def __hash__(self) -> int:
        return 0
