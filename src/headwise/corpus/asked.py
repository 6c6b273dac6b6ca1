"""The measures of a sweep by their names, and the heads that are kept."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.corpus.moments import OfRows, OfWindows, varied
from headwise.corpus.windows import Window
from headwise.errors import ConfigError
from headwise.lm.loading import Subject
from headwise.stats import GIVEN, MEASURES, ClassMass, DuplicateMass, InductionMass, Measure
from headwise.telemetry.options import MEASURES as USUAL

# Those that read the tokens, made anew for each batch of windows.
OF_TOKENS: dict[str, Callable[[Tensor], Measure]] = {"duplicate_mass": DuplicateMass, "induction_mass": InductionMass}
# Classes of tokens by what stands in them.
CLASSES = {"punctuation_mass": "punctuation", "separator_mass": "separator"}
DEFAULT = (*USUAL, "previous_mass", "self_mass")


@dataclass(frozen=True)
class Asked:
    """Which measures, by name."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> "Asked":
        """ConfigError for an unknown one, with those that are near, or for one that is named twice."""
        if isinstance(names, str):
            names = [names]
        known = [*MEASURES, *OF_TOKENS, *CLASSES]
        for name in names:
            if name in known:
                continue
            if name in GIVEN:
                raise ConfigError(f"measures: {name!r} requires token ids; available by name are {', '.join(CLASSES)}")
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ConfigError(f"measures: unknown measure {name!r}; {meant}`headwise measures` lists all")
        if not names:
            raise ConfigError("measures=(): give at least one; `headwise measures` lists all")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"measures: {twice.pop()!r} is given twice")
        return cls(tuple(names))

    def classes(self, pieces: Sequence[str]) -> dict[str, Tensor]:
        """The tokens of a text that are of each class, name → [n] boolean."""
        wanted = [name for name in self.names if name in CLASSES]
        return {name: ClassMass.of_tokens(list(pieces), CLASSES[name]).members[0] for name in wanted}

    def known(self) -> tuple[OfRows | OfWindows, ...]:
        """Each by name, for its unit and what it is over; those of tokens have not been told of any."""
        none = torch.zeros(1, 0, dtype=torch.long)
        return tuple(self.measures(none, ()))

    def measures(self, ids: Tensor, batch: Sequence[Window]) -> list[OfRows | OfWindows]:
        """Those for a batch of windows, whose ids are [b, n]."""
        return [varied(self._one(name, ids, batch)) for name in self.names]

    def _one(self, name: str, ids: Tensor, batch: Sequence[Window]) -> Measure:
        if name in OF_TOKENS:
            return OF_TOKENS[name](ids)
        if name not in CLASSES:
            return MEASURES[name]()
        members = torch.zeros(ids.shape, dtype=torch.bool)
        for i, window in enumerate(batch):
            members[i, : len(window.ids)] = window.classes[name]
        return ClassMass(members.to(ids.device), name=name)


@dataclass(frozen=True)
class Head:
    """layer: its number in forward order; name: of the attention module; head: its number."""

    layer: int
    name: str
    head: int


def chosen(subject: Subject, layers: Sequence[int] | None, heads: Sequence[int] | None) -> list[Head]:
    """The heads that are kept: of these layers, with these numbers; None for all.

    Raises:
        ConfigError: for a layer or a head that the model does not have, or if none is left.
    """
    count, most = len(subject.layers), max(subject.heads)
    for what, wanted, there in (("layers", layers, count), ("heads", heads, most)):
        for number in wanted or ():
            if not 0 <= number < there:
                raise ConfigError(f"{what}: {number} does not exist in {subject.name}; expected 0 to {there - 1}")
    kept = [
        Head(i, name, head)
        for i, (name, width) in enumerate(zip(subject.layers, subject.heads, strict=True))
        for head in range(width)
        if (layers is None or i in layers) and (heads is None or head in heads)
    ]
    if not kept:
        raise ConfigError(f"layers={layers}, heads={heads}: selects no head of {subject.name}")
    return kept
