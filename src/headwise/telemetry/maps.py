"""The maps of a record, by the names of modules."""

from typing import Any

from headwise.errors import closest
from headwise.telemetry.lens import Kept, hook, hook_and_layer


class Maps(dict[str, Any]):
    """name of the module → `AttentionMap` or `Picture`, in the order of the calls.

    `maps["blocks.3.attn.hook_pattern"]`, as TransformerLens names the weights of layer 3, is the fourth of them; what
    else is known of that layer has TransformerLens's names too (`headwise.telemetry.lens`).

    Attributes:
        kept: the argument `maps` of the record. kept_of: name → what the record keeps beside the map (`values=True`).
    """

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.kept_of: dict[str, Kept] = {}

    def __missing__(self, name: str) -> Any:
        """What TransformerLens calls so; KeyError with the closest names otherwise."""
        named = hook_and_layer(str(name))
        if named is not None and named[1] < len(self):
            layer = [*self][named[1]]
            try:
                return hook(named[0], self[layer], self.kept_of.get(layer))
            except KeyError as error:
                raise KeyError(f"record.maps[{name!r}]: {error.args[0]}") from None
        if not self:
            why = (
                "it keeps none: give hw.watch(…, maps='lazy')" if self.kept == "none" else "no forward was measured yet"
            )
            raise KeyError(f"record.maps[{name!r}]: {why}")
        close = closest(name, self) or [*self][:3]
        meant = ", ".join(map(repr, close))
        raise KeyError(f"record.maps[{name!r}]: no such module among {len(self)}; did you mean {meant}?")
