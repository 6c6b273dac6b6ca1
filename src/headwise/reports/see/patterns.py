"""The strongest pattern and the roles of heads, in a few words."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from headwise.analysis.head_roles import DEFINITIONS, Roles
from headwise.reports.messages import message
from headwise.reports.see.places import Places
from headwise.wording import Bilingual, in_language, joined

TENDENCY = 0.2  # the least share of the weight of a pattern that is named
LIFT = 2.0  # the least ratio of that weight to the weight under uniform attention
T = TypeVar("T")


def patterns(found: Sequence[Roles], places: Places) -> list[list[str]]:
    """The strongest patterns of each head, at most two, with their scores: first its roles with high confidence, then
    those with at least a fifth of its weight and twice the weight under uniform attention. "mixed" if there are none,
    "" where a layer has no such head. found: the roles of each layer."""
    return _each(found, places, pattern, "")


def roles_in_words(found: Sequence[Roles], places: Places) -> list[list[list[str]]]:
    """The roles of each head with high confidence, with their scores."""
    return _each(found, places, roles_of, [])


def roles_of(found: Roles, head: int) -> list[str]:
    """The roles of one head, from those of its layer."""
    return [_scored(label.text, label.score) for label in found.labels(0, head)]


def pattern(found: Roles, head: int) -> str:
    """The strongest patterns of one head, from the roles of its layer."""
    named = {label.role for label in found.labels(0, head)}
    tendencies = []
    for name, score in found.items():
        if DEFINITIONS[name].unit != "mass" or name in named:
            continue
        mass, uniform = np.nan_to_num(score.mass[0, head]), np.nan_to_num(score.uniform[0, head])
        if mass >= max(TENDENCY, LIFT * uniform):
            tendencies.append((float(mass), DEFINITIONS[name].word))
    # "nearby" includes the weight of the closest positions, so it comes last.
    tendencies.sort(key=lambda tendency: (tendency[1] == DEFINITIONS["local"].word, -tendency[0]))
    words = roles_of(found, head) + [_scored(word, mass) for mass, word in tendencies]
    return joined(words[:2]) or message("mixed")


def _scored(word: str, score: float) -> Bilingual:
    return Bilingual(f"{word} {score:.2f}", f"{in_language(word, 'zh')} {score:.2f}")


def _each(found: Sequence[Roles], places: Places, words: Callable[[Roles, int], T], nothing: T) -> list[list[T]]:
    return [
        [words(layer, head) if head < count else nothing for head in range(places.most)]
        for layer, count in zip(found, places.counts, strict=True)
    ]
