"""What is measured of every head for a report."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headwise.reports.data import Statistic
from headwise.reports.see.places import Places
from headwise.stats import MEASURES, ClassMass, Measure, Measurements

SHOWN = (
    "entropy", "normalized_entropy", "effective_keys", "top1_mass", "max_logit", "mean_distance", "local_mass",
    "sink_mass", "previous_mass", "self_mass", "received_mass",
)  # fmt: skip
BOTH_WAYS = (*SHOWN[:-1], "next_mass", SHOWN[-1])  # where tokens see later ones too
OF_ROWS = ("entropy", "normalized_entropy", "effective_keys", "top1_mass", "max_logit", "sink_mass", "received_mass")
OF_TOKENS = {
    "punctuation_mass": "Weight on punctuation marks, mean over queries.",
    "special_mass": "Weight on special tokens such as [CLS], [SEP] and <s>, mean over queries.",
}


def wanted(causal: bool, pieces: list[list[str]] | None, special: list[list[bool]]) -> list[str | Measure]:
    """What to measure of maps over these tokens, a list of m for each batch entry; pieces are None, and special ones
    [], where nobody knows them."""
    found: list[str | Measure] = list(SHOWN if causal else BOTH_WAYS)
    if pieces is None:
        return found
    marks = [ClassMass.of_tokens(row).members for row in pieces]
    found.append(ClassMass(torch.cat(marks) & ~torch.tensor(special), "punctuation_mass"))
    if any(map(any, special)):
        found.append(ClassMass(torch.tensor(special), "special_mass"))
    return found


def statistics(results: Sequence[Measurements], places: Places) -> list[Statistic]:
    """One `Statistic` a measure from the measurements of each layer (the mean over a batch)."""
    found = []
    for name in results[0]:
        values = places.stacked([result[name].mean(0).cpu().numpy() for result in results])
        found.append(statistic(name, values))
    return found


def statistic(name: str, values: np.ndarray) -> Statistic:
    """A measure of all heads with its unit and what it is."""
    if name in OF_TOKENS:
        return Statistic(name, values, "mass", OF_TOKENS[name])
    if name not in MEASURES:
        return Statistic(name, values, "", "")
    measure = MEASURES[name]()
    return Statistic(name, values, measure.unit, _first_sentence(measure))


def _first_sentence(measure: Any) -> str:
    text = re.sub(r"\s+", " ", type(measure).__doc__ or "").strip()
    return re.split(r"(?<=[.:;])\s", text, maxsplit=1)[0].rstrip(":;")
