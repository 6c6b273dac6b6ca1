"""The roles by definition, the scores of every head for a role or relation, and the labels that heads earn by them."""

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.head_roles.tally import Tally, pooled
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.stats import ClassMass
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import plain
from headwise.wording import Bilingual, joined, tr

VERSION = "roles-3"  # of the definitions below; scores of different versions do not compare

# A score must also be at least this far between a uniform head (0) and a perfect one (1): on a short text a uniform
# head has much weight on any key.
EXCESS = 0.2
# The fewest eligible queries of a label or a tendency: if all of ten are alike, so are three quarters of such queries,
# at a confidence of 95 % (Clopper & Pearson 1934).
ROWS = 10
SURE = 0.95  # the least share of the draws of the bootstrap in which a label holds
# Of a tendency: the least weight, and its least ratio to the weight of a uniform head.
TENDENCY, LIFT = 0.2, 2.0
# Least weight of a row on keys other than the first for the scores without the first key.
LEFT = 0.01

CLARK = "Clark et al. 2019, 1906.04341 §3"
VOITA = "Voita et al. 2019, 1905.09418 §4"
OURS = "headwise"


@dataclass(frozen=True)
class Definition:
    """A role. unit: "mass" (share of a row's weight), "rows" (of rows), "nats", "share" (of the largest possible
    entropy), or "excess" (over a baseline, 1 is the largest possible)."""

    name: str
    word: Bilingual
    what: Bilingual  # the score
    threshold: float  # the least score of a head that plays the role
    source: str
    limit: str  # source of the threshold
    colour: str
    unit: str = "mass"
    given: str = ""  # the argument of `roles` that it requires, or ""
    rows: int = ROWS  # the fewest eligible rows; more where random heads reach the threshold on as few

    def holds(self, score: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Whether a score is enough, given that of a uniform head; boolean, False for NaN."""
        with np.errstate(invalid="ignore", divide="ignore"):
            enough = score >= self.threshold
            if self.unit in ("mass", "rows"):  # where a uniform head has it all, no head shows more
                enough &= (uniform < 1.0 - 1e-6) & (score - uniform >= EXCESS * (1.0 - uniform))
        return enough


DEFINITIONS: dict[str, Definition] = {
    d.name: d
    for d in (
        Definition(
            "previous", tr("previous"), tr("weight on the key before"), 0.5, CLARK, CLARK, "#4e79a7"
        ),
        Definition("self", tr("itself"), tr("weight on the query's own key"), 0.5, CLARK, CLARK, "#8c6bb1"),
        Definition("next", tr("next"), tr("weight on the key after"), 0.5, CLARK, CLARK, "#5b8ff9"),
        Definition(
            "offset", tr("offset"), tr("rows whose largest weight is at the best offset"), 0.9, VOITA,
            VOITA, "#2a9d9f", unit="rows",
        ),
        Definition(
            "first", tr("first"), tr("weight on the first key"), 0.3, "Xiao et al. 2023, 2309.17453",
            "Gu et al. 2024, 2410.10781 (sink metric)", "#c44e52",
        ),
        Definition(
            "local", tr("nearby"),
            tr("weight within the radius"), 0.9, "Beltagy et al. 2020, 2004.05150", OURS, "#e08214"
        ),
        Definition(
            "broad", tr("broad"), tr("entropy of the weights"), 3.8, CLARK, CLARK, "#3f9b6c", unit="nats"
        ),
        Definition(
            "even", tr("even"),
            tr("entropy of the weights over its largest value, ln of the keys in sight"), 0.9, CLARK, OURS, "#94a83a",
            unit="share",
        ),
        Definition(
            "separator", tr("separator"),
            tr("weight on white space and markers such as [SEP]"), 0.6, CLARK, CLARK, "#7a6a53",
            given="pieces",
        ),
        Definition(
            "punctuation", tr("punctuation"),
            tr("weight on punctuation"), 0.6, CLARK, CLARK, "#d37295", given="pieces"
        ),
        Definition(
            "duplicate", tr("same token"), tr("weight on earlier occurrences of the query's token"), 0.5,
            "Wang et al. 2022, 2211.00593", OURS, "#b8860b", given="tokens",
        ),
        Definition(
            "induction", tr("induction"),
            tr("weight on the tokens after earlier occurrences of the query's token"), 0.5,
            "Olsson et al. 2022, 2209.11895 (prefix matching)", OURS, "#c2339b", given="tokens",
        ),
        Definition(
            "rare", tr("rare"),
            tr("weight on the least frequent tokens of the input"), 0.5, VOITA, OURS, "#64748f", given="frequencies"
        ),
        # With the embeddings of the vocabulary shuffled, the heads of trained models reach 0.04; 0.1 is also the margin
        # above the best simple rule that is required of relations.
        Definition(
            "semantic", tr("similar meaning"),
            tr("similarity of embeddings beyond that of matched pairs, over that of the most similar key"), 0.1, OURS,
            OURS, "#5b4fd1", unit="excess", given="embeddings", rows=50,
        ),
    )
}  # fmt: skip

# For relations: the least margin above the best simple rule, and the least number of cases.
MARGIN = 0.1
MARGIN_SOURCE = VOITA
CASES = 20


# [CLS], [SEP], <s>, </s>, <pad>, <|endoftext|>, <extra_id_0>
MARKER = re.compile(r"\[[A-Z]+\]|<\|[^|]+\|>|</?[A-Za-z_]+\d*>")


def token_ids(tokens: Any, b: int, m: int) -> Tensor:
    """Check the integers of m tokens; return them as [b or 1, m]."""
    ids = torch.as_tensor(tokens)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DTypeError(f"tokens: expected integers [{m}] or [{b}, {m}], got {ids.dtype}")
    ids = torch.atleast_2d(ids)
    if ids.ndim != 2 or ids.shape[1] != m or len(ids) not in (1, b):
        raise ShapeError(f"tokens: shape {tuple(ids.shape)} does not fit; expected ({m},) or ({b}, {m}), one a token")
    return ids.cpu().long()


def token_vectors(embeddings: Any, ids: Tensor) -> Tensor:
    """Check a table of embeddings [vocabulary, d]; return the row of each token, [b or 1, m, d]."""
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point():
        came = str(embeddings.dtype) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise DTypeError(f"embeddings: expected a floating-point tensor [vocabulary, d], got {came}")
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ShapeError(f"embeddings: shape {tuple(embeddings.shape)}, expected [vocabulary, d]")
    kinds, at = ids.unique(return_inverse=True)
    if int(kinds[0]) < 0 or int(kinds[-1]) >= len(embeddings):
        raise ShapeError(
            f"embeddings: {len(embeddings)} rows, but tokens holds {int(kinds[0])} to {int(kinds[-1])}; give the input "
            f"embedding of the model that read these tokens"
        )
    rows = embeddings.detach()[kinds.to(embeddings.device)].float().cpu()
    wrong = ~rows.isfinite().all(-1)
    if bool(wrong.any()):
        raise ConfigError(f"embeddings: row {int(kinds[wrong][0])} has non-finite values; expected finite ones")
    return rows[at]


def texts(pieces: Any, b: int, m: int) -> list[list[str]]:
    """Check the texts of the tokens; return one list, or one for each batch entry."""
    rows = [pieces] if all(isinstance(piece, str) for piece in pieces) else list(pieces)
    for row in rows:
        if not isinstance(row, Sequence) or not all(isinstance(piece, str) for piece in row):
            raise DTypeError("pieces: expected the text of each token, a list of strings or one list a batch entry")
        if len(row) != m:
            raise ShapeError(f'pieces: {len(row)} of them for {m} tokens; give the text of each token ("" for none)')
    if len(rows) not in (1, b):
        raise ShapeError(f"pieces: {len(rows)} lists for a batch of {b}")
    return [list(row) for row in rows]


def is_marker(piece: str) -> bool:
    """Whether the piece is a marker outside the text, such as [SEP] or <|endoftext|>."""
    return MARKER.fullmatch(piece) is not None


def classes_of(pieces: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """Boolean [b or 1, m] for separators (white space and markers) and for punctuation."""
    found: dict[str, list[Tensor]] = {"separator": [], "punctuation": []}
    for row in pieces:
        marker = torch.tensor([is_marker(piece) for piece in row])
        blank = ClassMass.of_tokens(row, "separator").members[0]
        marks = ClassMass.of_tokens(row, "punctuation").members[0]
        found["separator"].append(blank | marker)
        found["punctuation"].append(marks & ~marker)
    return {name: torch.stack(rows) for name, rows in found.items()}


def rare_keys(ids: Tensor, seen: Tensor, frequencies: Mapping[int, float] | Tensor, share: float) -> Tensor:
    """The keys of the rarest tokens in sight (`seen` [b or 1, m]) up to `share` of them, at least one, boolean [b or 1,
    m]: the rarest token of a sentence of 20 or fewer (Voita et al. 2019)."""
    if not 0.0 < share < 1.0:
        raise ConfigError(f"rare={share}: expected a share of the keys, more than 0 and less than 1")
    wide = max(len(ids), len(seen))
    ids, seen = ids.expand(wide, -1), seen.expand(wide, -1)
    found = torch.zeros(ids.shape, dtype=torch.bool)
    for row, real, members in zip(ids, seen, found, strict=True):
        kinds, place, counts = torch.unique(row[real], return_inverse=True, return_counts=True)
        often = torch.tensor([_frequency(frequencies, int(kind)) for kind in kinds], dtype=torch.float64)
        order = often.argsort(stable=True)
        before = counts[order].cumsum(0) - counts[order]
        taken = torch.zeros(len(kinds), dtype=torch.bool)
        taken[order[before < share * len(place)]] = True
        members[real] = taken[place]
    return found


def _frequency(frequencies: Mapping[int, float] | Tensor, token: int) -> float:
    if isinstance(frequencies, Mapping):
        return float(frequencies.get(token, 0))
    if not 0 <= token < len(frequencies):
        raise ShapeError(f"frequencies: {len(frequencies)} of them, but tokens holds {token}; give one for each token")
    return float(frequencies[token])


LISTED = 8  # heads that are printed


@dataclass(frozen=True)
class Label:
    """A role that a head plays on this input, or tends to.

    Attributes:
        text: as printed, such as "offset −3", which has a Chinese version for a defined role; role: its name in
            `Roles`.
        score, threshold: of the head, and required; confidence: share of the draws of a block bootstrap that reach the
            threshold; source: of the threshold.
        rows: eligible queries, whose mean the score is; uniform: the score of a head with equal weights on them.
        sure: False for a tendency, which has less than the score or the confidence that a label requires.
    """

    text: str
    role: str
    score: float
    threshold: float
    confidence: float
    source: str
    rows: int
    uniform: float
    sure: bool = True

    def __str__(self) -> str:
        return str(self.words)

    @property
    def name(self) -> Bilingual:
        """The text, in both languages; a tendency is called so."""
        return joined([self.text]) if self.sure else tr("tendency: {role}", role=self.text)

    @property
    def words(self) -> Bilingual:
        """Name and score."""
        return joined([self.name, f"{self.score:.2f}"], " ")


class Scored(ABC):
    """Scores of all heads. Prints the heads that score most, by the first column of its table."""

    @property
    @abstractmethod
    def table(self) -> HeadTable:
        """The scores, with a title."""

    @property
    def _top(self) -> HeadTable:
        table = self.table
        top = table.top(next(iter(table)), LISTED)
        heads, more = len(table.places), len(table.places) - len(top.places)
        left = f"; {more} of {heads} heads are not shown" if more and top.places else ""
        return top.titled(f"{table.title}{left if top.places else f'; known for none of the {heads} heads'}")

    def __repr__(self) -> str:
        return repr(self._top)

    def _repr_html_(self) -> str:
        return self._top._repr_html_()


@dataclass(frozen=True, repr=False)
class RoleScore(Scored):
    """The scores of every head for one role; arrays are [layers, heads], NaN where no row is eligible.

    Attributes:
        definition: the role, its unit and threshold.
        mass: the score, mean over eligible rows (queries with at least one such key in sight).
        uniform: the score of a head with equal weights on all keys in sight, mean over the same rows.
        coverage: eligible rows over the rows with any key in sight.
        without_first: the scores with weights renormalised without the first key, over the rows that then keep at least
            1 % of their weight; None where this has no meaning.
        offset, weight: of the role "offset" alone: the best offset, and the mean weight there.
    """

    definition: Definition
    mass: np.ndarray
    uniform: np.ndarray
    coverage: np.ndarray
    tally: Tally
    without_first: "RoleScore | None" = None
    offset: np.ndarray | None = None
    weight: np.ndarray | None = None

    @property
    def lift(self) -> np.ndarray:
        """mass / uniform: 1 is no preference; NaN where the baseline is 0, and for an excess over it."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where((self.uniform > 0) & (self.definition.unit != "excess"), self.mass / self.uniform, np.nan)

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the middle 95 % of the score over the draws of a block bootstrap."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NaN for a head without an eligible row
            low, high = np.nanquantile(self._drawn[0], (0.025, 0.975), axis=0)
        return low, high

    @cached_property
    def confidence(self) -> np.ndarray:
        """Share of the draws in which the score is enough for the role. Draws without eligible rows count as not
        enough; 0 with fewer than two stretches of rows."""
        if self.tally.total.shape[1] < 2:
            return np.zeros(self.mass.shape)
        return self.definition.holds(*self._drawn).mean(0)

    @property
    def rows(self) -> np.ndarray:
        """The number of eligible rows, [layers, heads]."""
        return self.tally.count.sum(1)

    @property
    def holds(self) -> np.ndarray:
        """Whether the head has the role, boolean: the score is enough, on enough rows, in 95 % of the draws."""
        return self.enough(SURE)

    def enough(self, confidence: float) -> np.ndarray:
        """As `holds`, with another confidence."""
        found = self.definition.holds(self.mass, self.uniform) & (self.rows >= self.definition.rows)
        return found & (self.confidence >= confidence) if found.any() else found

    @property
    def tends(self) -> np.ndarray:
        """Whether a fifth of the weight, and twice that of a uniform head, is on such keys, on enough rows; boolean."""
        if self.definition.unit != "mass":
            return np.zeros(self.mass.shape, bool)
        with np.errstate(invalid="ignore"):
            return (self.mass >= np.maximum(TENDENCY, LIFT * self.uniform)) & (self.rows >= self.definition.rows)

    @property
    def _drawn(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tally.drawn()

    @property
    def column(self) -> HeadColumn:
        """The score with its interval."""
        d = self.definition
        return HeadColumn(self.mass, unit=d.unit, description=d.what, error=np.stack(self.interval, -1))

    @property
    def table(self) -> HeadTable:
        """The score with its interval, the baseline, the share of eligible rows, and the confidence."""
        columns: dict[str, Any] = {
            "score": self.column, "uniform": self.uniform, "lift": self.lift, "rows": self.coverage
        }  # fmt: skip
        if self.offset is not None:
            columns["offset"] = self.offset
        d = self.definition
        title = f"{d.word}: {d.what} ({d.unit}); threshold {d.threshold:g}"
        return HeadTable({**columns, "confidence": self.confidence}, title=title)

    def label(self, at: tuple[int, int], sure: bool = True) -> Label:
        """The label, or the tendency, of the head at (layer, head)."""
        d = self.definition
        text = d.word
        if self.offset is not None:
            by = f"{int(self.offset[at]):+d}".replace("-", "−")
            text = joined([d.word, by], " ")
        return Label(
            text, d.name, float(self.mass[at]), d.threshold, float(self.confidence[at]), d.limit, int(self.rows[at]),
            float(self.uniform[at]), sure,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None where no row is eligible."""
        low, high = self.interval
        arrays = {
            "mass": self.mass, "uniform": self.uniform, "lift": self.lift, "coverage": self.coverage, "low": low,
            "high": high, "confidence": self.confidence,
        }  # fmt: skip
        if self.offset is not None and self.weight is not None:
            arrays |= {"offset": self.offset, "weight": self.weight}
        found: dict[str, Any] = {name: plain(x) for name, x in arrays.items()}
        d = self.definition
        found |= {"what": d.what, "unit": d.unit, "threshold": d.threshold, "source": d.source, "limit": d.limit}
        if self.without_first is not None:
            found["without_first"] = {
                name: plain(getattr(self.without_first, name)) for name in ("mass", "uniform", "lift", "coverage")
            }
        return found


def of_tally(definition: Definition, tally: Tally, rows: Tally) -> RoleScore:
    """The means of a tally; `rows` counts all rows with any key in sight."""
    mass, uniform = tally.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        coverage = tally.count.sum(1) / rows.total.sum(1)
    return RoleScore(definition, mass, uniform, coverage, tally)


@dataclass(frozen=True, repr=False)
class Choice(Scored):
    """How often each head gives most weight to the right one of a few candidates, beside rules without weights."""

    right: np.ndarray  # right answers [layers, groups, heads]; the bootstrap draws groups, such as sentences
    cases: np.ndarray  # [groups], cases with something to choose from
    total: int  # of all cases, those with a masked right candidate included
    rules: Mapping[str, int] = field(default_factory=dict)  # simple rules → the number of cases in which each is right

    @property
    def accuracy(self) -> np.ndarray:
        """Share of right answers [layers, heads]; NaN without cases."""
        return self._tally.mean()[0]

    @property
    def count(self) -> int:
        """The number of cases."""
        return int(self.cases.sum())

    @property
    def coverage(self) -> float:
        """Cases with something to choose from, over all cases."""
        return self.count / self.total if self.total else float("nan")

    @property
    def rule(self) -> str:
        """The best of the simple rules; "" if there is none."""
        return max(self.rules, key=lambda name: self.rules[name], default="")

    @property
    def baseline(self) -> float:
        """The accuracy of the best simple rule."""
        return self.rules.get(self.rule, 0) / self.count if self.count else float("nan")

    @cached_property
    def confidence(self) -> np.ndarray:
        """Share of bootstrap draws in which the head beats the baseline by MARGIN, [layers, heads]; 0 for one group."""
        if len(self.cases) < 2:
            return np.zeros_like(self.accuracy)
        drawn, _ = self._tally.drawn()
        with np.errstate(invalid="ignore"):
            return (drawn >= self.baseline + MARGIN).mean(0)

    @property
    def better(self) -> np.ndarray:
        """Heads better than the baseline by MARGIN, on CASES cases or more; boolean [layers, heads]."""
        if self.count < CASES:
            return np.zeros(self.accuracy.shape, bool)
        return self.accuracy >= self.baseline + MARGIN

    @property
    def table(self) -> HeadTable:
        """The share of right answers, and the confidence that it is above the baseline."""
        rule = f"{self.rule or 'no rule'}: {self.baseline:.3f}" if self.count else "nothing to choose from"
        title = f"share of right answers in {self.count} of {self.total} cases; {rule}"
        return HeadTable({"right": self.accuracy, "confidence": self.confidence}, title=title)

    @property
    def _tally(self) -> Tally:
        count = np.broadcast_to(self.cases[None, :, None], self.right.shape).astype(np.float64)
        return Tally(self.right, count, np.zeros_like(self.right))

    def merge(self, other: "Choice") -> "Choice":
        """The answers on both inputs."""
        right = np.concatenate((self.right, other.right), 1)
        cases = np.concatenate((self.cases, other.cases))
        rules = {name: self.rules.get(name, 0) + other.rules.get(name, 0) for name in {**self.rules, **other.rules}}
        return Choice(pooled(right), pooled(cases[None])[0], self.total + other.total, rules)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for unknown ones."""
        return {
            "accuracy": plain(self.accuracy), "confidence": self.confidence.tolist(), "cases": self.count,
            "coverage": self.coverage if self.total else None, "baseline": self.baseline if self.count else None,
            "rule": self.rule,
        }  # fmt: skip
