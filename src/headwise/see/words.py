"""What heads do, in a few words."""

import numpy as np

from headwise.science.roles import DEFINITIONS, Roles

TENDENCY = 0.2  # of the weight, from which on a pattern is worth a word
LIFT = 2.0  # and so many times what looking everywhere alike would give


def patterns(found: Roles) -> list[list[str]]:
    """What each head does most, at most two patterns with their scores: first the roles that it is sure to play, then
    what has at least a fifth of its weight and twice what looking everywhere alike would give; "mixed" if nothing."""
    layers, heads = found.shape
    return [[_pattern(found, layer, head) for head in range(heads)] for layer in range(layers)]


def roles_in_words(found: Roles) -> list[list[list[str]]]:
    """The roles that each head is sure to play, with their scores."""
    layers, heads = found.shape
    return [[[str(label) for label in found.labels(i, j)] for j in range(heads)] for i in range(layers)]


def _pattern(found: Roles, layer: int, head: int) -> str:
    sure = found.labels(layer, head)
    said = {label.role for label in sure}
    at = (layer, head)
    tendencies = []
    for name, score in found.items():
        if DEFINITIONS[name].unit != "mass" or name in said:
            continue
        mass, uniform = np.nan_to_num(score.mass[at]), np.nan_to_num(score.uniform[at])
        if mass >= max(TENDENCY, LIFT * uniform):
            tendencies.append((float(mass), DEFINITIONS[name].word))
    # Nearby holds its neighbours' weight too: say it last.
    tendencies.sort(key=lambda tendency: (tendency[1] == DEFINITIONS["local"].word, -tendency[0]))
    words = [str(label) for label in sure] + [f"{word} {mass:.2f}" for mass, word in tendencies]
    return ", ".join(words[:2]) or "mixed"
