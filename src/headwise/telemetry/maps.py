"""The maps of a record, by the names of modules."""

import re
from typing import Any

from headwise.errors import closest

# Names of TransformerLens for the weights of layer i; all other hook names of its attention are no maps.
_PATTERN = re.compile(r"blocks\.(\d+)\.attn\.hook_pattern")


class Maps(dict[str, Any]):
    """name of the module → `AttentionMap` or `Picture`, in the order of the calls.

    `maps["blocks.3.attn.hook_pattern"]`, as TransformerLens names the weights of layer 3, is the fourth of them.

    Attributes:
        kept: the argument `maps` of the record.
    """

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept

    def __missing__(self, name: str) -> Any:
        """The map of that layer; KeyError with the closest names otherwise."""
        found = _PATTERN.fullmatch(str(name))
        if found and int(found[1]) < len(self):
            return [*self.values()][int(found[1])]
        if not self:
            why = (
                "it keeps none: give hw.watch(…, maps='lazy')" if self.kept == "none" else "no forward was measured yet"
            )
            raise KeyError(f"record.maps[{name!r}]: {why}")
        close = closest(name, self) or [*self][:3]
        meant = ", ".join(map(repr, close))
        raise KeyError(f"record.maps[{name!r}]: no such module among {len(self)}; did you mean {meant}?")
