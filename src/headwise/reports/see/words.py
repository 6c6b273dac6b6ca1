"""What heads do, in a few words."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from headwise.analysis.head_roles import DEFINITIONS, Roles
from headwise.reports.see.places import Places

TENDENCY = 0.2  # of the weight, from which on a pattern is worth a word
LIFT = 2.0  # and so many times what looking everywhere alike would give
T = TypeVar("T")


def patterns(found: Sequence[Roles], places: Places) -> list[list[str]]:
    """What each head does most, at most two patterns with their scores: first the roles that it is sure to play, then
    what has at least a fifth of its weight and twice what looking everywhere alike would give; "mixed" if nothing, and
    "" where there is no head. `found` is that of each layer."""
    return _each(found, places, pattern, "")


def roles_in_words(found: Sequence[Roles], places: Places) -> list[list[list[str]]]:
    """The roles that each head is sure to play, with their scores."""
    return _each(found, places, roles_of, [])


def roles_of(found: Roles, head: int) -> list[str]:
    """Those of one head, from the roles of its layer."""
    return [str(label) for label in found.labels(0, head)]


def pattern(found: Roles, head: int) -> str:
    """What one head does most, from the roles of its layer."""
    sure = found.labels(0, head)
    said = {label.role for label in sure}
    tendencies = []
    for name, score in found.items():
        if DEFINITIONS[name].unit != "mass" or name in said:
            continue
        mass, uniform = np.nan_to_num(score.mass[0, head]), np.nan_to_num(score.uniform[0, head])
        if mass >= max(TENDENCY, LIFT * uniform):
            tendencies.append((float(mass), DEFINITIONS[name].word))
    # Nearby holds its neighbours' weight too: say it last.
    tendencies.sort(key=lambda tendency: (tendency[1] == DEFINITIONS["local"].word, -tendency[0]))
    words = [str(label) for label in sure] + [f"{word} {mass:.2f}" for mass, word in tendencies]
    return ", ".join(words[:2]) or "mixed"


def _each(found: Sequence[Roles], places: Places, say: Callable[[Roles, int], T], nothing: T) -> list[list[T]]:
    return [
        [say(layer, head) if head < count else nothing for head in range(places.most)]
        for layer, count in zip(found, places.counts, strict=True)
    ]
