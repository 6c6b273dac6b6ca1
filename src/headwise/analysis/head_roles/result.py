"""What `roles` gives: a score of every head for every role, and labels with their confidence."""

import json
import os
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import replace
from typing import Any

import numpy as np

from headwise.analysis.head_roles import show
from headwise.analysis.head_roles.choices import Choice
from headwise.analysis.head_roles.collect import Collected
from headwise.analysis.head_roles.definitions import DEFINITIONS, MARGIN, MARGIN_SOURCE, VERSION
from headwise.analysis.head_roles.score import Label, RoleScore, label, of_tally
from headwise.analysis.head_roles.tally import Tally
from headwise.errors import ConfigError, ShapeError
from headwise.files import atomic_path
from headwise.table.show import plain

SURE = 0.95  # of a label, unless another confidence is asked for
# A head that looks at one neighbour looks nearby too: the weaker word is left out.
IMPLIED = {"local": ("previous", "self", "next", "offset"), "even": ("broad",)}
BESIDE = {-1: "previous", 0: "self", 1: "next"}


class Roles(Mapping[str, RoleScore]):
    """Roles of all heads on one input, or on several that were merged: role → `RoleScore`. Prints itself as a table.

    Attributes:
        shape: (layers, heads). version: of the definitions.
        syntax: "relation, direction" → `Choice`, {} without arcs; coreference: a `Choice`, None without mentions.
        reach: offsets were looked for within ± so many.
    """

    version = VERSION

    def __init__(
        self, collected: Collected, reach: int, syntax: Mapping[str, Choice], coreference: Choice | None
    ) -> None:
        self._collected, self.reach = collected, reach
        self.syntax, self.coreference = dict(syntax), coreference
        self.shape = (collected.rows.total.shape[0], collected.rows.total.shape[2])
        self._scores = {name: self._score(name) for name in DEFINITIONS if name in (*collected.roles, "offset")}

    def __getitem__(self, name: str) -> RoleScore:
        return self._scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    # Those of `Mapping` would print all of the table.
    def keys(self) -> KeysView[str]:
        """Names of the roles."""
        return self._scores.keys()

    def values(self) -> ValuesView[RoleScore]:
        """Their scores."""
        return self._scores.values()

    def items(self) -> ItemsView[str, RoleScore]:
        """Both."""
        return self._scores.items()

    @property
    def rows(self) -> int:
        """Queries that see something, in the layer and head that has most of them."""
        return int(self._collected.rows.total.sum(1).max())

    @property
    def olsson(self) -> np.ndarray:
        """Prefix matching as the mean over all matching pairs (query, key), [layers, heads]: a perfect head gets 1 only
        if every query has one match; 0.5 on a start token and 25 tokens said four times. NaN without tokens.
        Source: Olsson et al. 2022, 2209.11895."""
        return self._induction_over(self._collected.entries)

    @property
    def tl_mul(self) -> np.ndarray:
        """Weight on matching keys over all weight, [layers, heads], as TransformerLens' head detector gives with
        "mul": a perfect head gets the coverage. NaN without tokens."""
        return self._induction_over(self._collected.mass)

    def labels(self, layer: int, head: int, confidence: float = SURE) -> list[Label]:
        """The roles of a head of which we are that sure, the clearest first; none if it plays none of them here."""
        if not (0 <= layer < self.shape[0] and 0 <= head < self.shape[1]):
            raise ShapeError(f"labels(layer={layer}, head={head}): there are {self.shape[0]} × {self.shape[1]} heads")
        if not 0.0 <= confidence <= 1.0:
            raise ConfigError(f"confidence={confidence}: expected 0 to 1")
        at, found = (layer, head), {}
        for name, score in self._scores.items():
            if score.holds[at] and score.confidence[at] >= confidence:
                found[name] = label(score, at)
        if "offset" in found:
            offset = self["offset"].offset
            assert offset is not None
            if BESIDE.get(int(offset[at])) in found:
                del found["offset"]
        for weaker, stronger in IMPLIED.items():
            if any(name in found for name in stronger):
                found.pop(weaker, None)
        return [*self._chosen(at, confidence), *sorted(found.values(), key=lambda x: -x.score / x.threshold)]

    def merge(self, other: "Roles") -> "Roles":
        """Both inputs as one, for a corpus: rows are pooled, exactly; stretches of rows are joined where there are more
        than 256. Both must come from the same heads and the same arguments."""
        mine, theirs = self._collected, other._collected
        same = self.shape == other.shape and self.reach == other.reach and list(self) == list(other)
        if not same:
            raise ConfigError(
                f"merge: {self.shape} heads with {', '.join(self)} within ±{self.reach}, and {other.shape} heads with "
                f"{', '.join(other)} within ±{other.reach}; give inputs of one model, asked the same"
            )
        joined = {name: getattr(mine, name).merge(getattr(theirs, name)) for name in ("hits", "near", "rows", "mass")}
        for name in ("roles", "without_first"):
            joined[name] = {role: x.merge(getattr(theirs, name)[role]) for role, x in getattr(mine, name).items()}
        entries = mine.entries.merge(theirs.entries) if mine.entries and theirs.entries else None
        syntax = {**other.syntax, **self.syntax}
        syntax |= {name: self.syntax[name].merge(other.syntax[name]) for name in self.syntax if name in other.syntax}
        one, two = self.coreference, other.coreference
        coreference = one.merge(two) if one and two else one or two
        return Roles(Collected(**joined, entries=entries), self.reach, syntax, coreference)

    def table(self, confidence: float = SURE) -> str:
        """All heads: labels of that confidence, and the scores; under them what a uniform head would score."""
        return show.table(self, *self._shown(confidence))

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return show.html(self, *self._shown(SURE))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON; None for what is not known."""
        layers, heads = (range(size) for size in self.shape)
        found: dict[str, Any] = {
            "version": self.version, "scope": "on this input", "shape": list(self.shape), "rows": self.rows,
            "roles": {name: score.to_dict() for name, score in self._scores.items()},
            "labels": [[[vars(label) for label in self.labels(i, j)] for j in heads] for i in layers],
            "syntax": {name: choice.to_dict() for name, choice in self.syntax.items()},
            "coreference": self.coreference.to_dict() if self.coreference else None,
        }  # fmt: skip
        if "induction" in self:
            found["roles"]["induction"] |= {"olsson": plain(self.olsson), "tl_mul": plain(self.tl_mul)}
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` as JSON, whole or not at all."""
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False), encoding="utf-8")

    def _shown(self, confidence: float) -> tuple[list[list[str]], list[str]]:
        """Labels of each head, and what stands under a table."""
        layers, heads = self.shape
        words = [
            [", ".join(label.text for label in self.labels(i, j, confidence)) for j in range(heads)]
            for i in range(layers)
        ]  # fmt: skip
        remarks = show.remarks(self.shape, self.rows, self.version, confidence)
        return words, [*show.choices(self._asked), *remarks]

    @property
    def _asked(self) -> dict[str, Choice]:
        """Relations, and coreference if there are mentions."""
        return self.syntax if self.coreference is None else {**self.syntax, "coreference": self.coreference}

    def _score(self, name: str) -> RoleScore:
        c = self._collected
        definition = DEFINITIONS[name]
        if name == "offset":
            share, weight = np.nan_to_num(c.hits.mean()[0], nan=-1.0), np.nan_to_num(c.near.mean()[0], nan=-1.0)
            best = (share + 1e-6 * weight).argmax(-1)  # of equal shares, the one with more weight
            score = of_tally(definition, c.hits.at(best), c.rows)
            return replace(score, offset=best - self.reach, weight=c.near.at(best).mean()[0])
        score = of_tally(definition, c.roles[name], c.rows)
        if name not in c.without_first:
            return score
        return replace(score, without_first=of_tally(definition, c.without_first[name], c.rows))

    def _induction_over(self, per: Tally | None) -> np.ndarray:
        if "induction" not in self._collected.roles or per is None:
            return np.full(self.shape, np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._collected.roles["induction"].total.sum(1) / per.total.sum(1)

    def _chosen(self, at: tuple[int, int], confidence: float) -> list[Label]:
        """Labels from arcs and mentions."""
        found = []
        for name, choice in self._asked.items():
            if choice.better[at] and choice.confidence[at] >= confidence:
                found.append(
                    Label(
                        name, "coreference" if choice is self.coreference else "syntax", float(choice.accuracy[at]),
                        choice.baseline + MARGIN, float(choice.confidence[at]), MARGIN_SOURCE,
                    )
                )  # fmt: skip
        return sorted(found, key=lambda label: label.threshold - label.score)
