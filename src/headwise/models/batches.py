"""A batch as the arguments of a model."""

from collections.abc import Mapping
from typing import Any


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: those of a mapping by name, those of a tuple or list in order, else one."""
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})
