"""What the rules of registry_models.py do not find by themselves: fields and classes of stubborn model types."""

from collections.abc import Callable
from typing import Any

# Model type → fields of its configuration.
EXTRAS: dict[str, dict[str, Any]] = {}

# Model type → name of the class in its modelling file.
CLASSES: dict[str, str] = {}

# Model type → what its forward is called with.
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {}

# Model types whose generate takes no padding.
PAD_FREE: frozenset[str] = frozenset()
