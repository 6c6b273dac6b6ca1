"""`roles`: a score of every head for every role, and labels with their confidence, as tables."""

import json
import os
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.checks import head_name
from headwise.analysis.head_roles.collect import Collected, Inputs, collect
from headwise.analysis.head_roles.relations import Mention, Placed, coreference, syntax
from headwise.analysis.head_roles.score import (
    DEFINITIONS,
    MARGIN,
    MARGIN_SOURCE,
    ROWS,
    SURE,
    VERSION,
    Choice,
    Label,
    RoleScore,
    classes_of,
    of_tally,
    rare_keys,
    texts,
    token_ids,
    token_vectors,
)
from headwise.analysis.head_roles.tally import DRAWS, Sight, Tally
from headwise.base.files import write_text
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.map import AttentionMap
from headwise.publishing.tokens import token_map
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import as_html, as_text, plain


def roles(
    maps: AttentionMap | Sequence[AttentionMap],
    *,
    tokens: Any = None,
    pieces: Any = None,
    frequencies: Mapping[int, float] | Tensor | None = None,
    embeddings: Tensor | None = None,
    arcs: Sequence[Placed] = (),
    mentions: Sequence[Mention] = (),
    reach: int = 8,
    radius: int = 8,
    rare: float = 0.05,
) -> "Roles":
    """Score every head for every role on this input, and label the heads with the roles that they play.

    Memory is O(n): one pass of the kernel a layer for entropies and classes of keys, and a few products a query for the
    rest. Queries and keys are one sequence; the queries are aligned to its end. If a cache has dropped tokens,
    distances are those between the tokens, and `tokens` and `pieces` are of all tokens, also of the dropped ones.

    Args:
        maps: one for each layer, all with the same size and number of heads.
        tokens: integers [m] or [b, m], for repeats and induction.
        pieces: the text of each token, a list of m strings or one list a batch entry, for separators and punctuation.
        frequencies: of the tokens in some corpus, token → count or one number a token, for rare tokens; requires
            `tokens`.
        embeddings: the rows of the model's input embedding by token, [vocabulary, d], for similar meaning; requires
            `tokens`. With `pieces`, separators and punctuation have no meaning.
        arcs: sentences with their trees, as `place_words` returns them, for syntax.
        mentions: of entities, for coreference; with `pieces` or `tokens`, equal head words are another baseline.
        reach: the best offset is searched in −reach … reach. radius: of nearby keys, in tokens.
        rare: share of the keys that count as rare.
    Returns:
        `Roles`: role → `RoleScore` with arrays [layers, heads], and `labels(layer, head)`.
    Raises:
        ShapeError, DTypeError, ConfigError: naming the argument.
    Source: Clark et al. 2019, 1906.04341; Voita et al. 2019, 1905.09418; Olsson et al. 2022, 2209.11895; Wang et al.
    2022, 2211.00593; Gu et al. 2024, 2410.10781; of each threshold in `headwise.analysis.head_roles.score.DEFINITIONS`.
    """
    layers = _layers(maps)
    b, m = layers[0].shape[0], layers[0].rule.grid.tokens
    for name, value in (("reach", reach), ("radius", radius)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}: expected a whole number of tokens, at least 1")
    ids = None if tokens is None else token_ids(tokens, b, m)
    rows = None if pieces is None else texts(pieces, b, m)
    classes = {} if rows is None else classes_of(rows)
    if frequencies is not None:
        if ids is None:
            raise ConfigError("frequencies: requires tokens=, the integers that they are the frequencies of")
        classes["rare"] = rare_keys(ids, _seen(layers[0]), frequencies, rare)
    vectors = None
    if embeddings is not None:
        if ids is None:
            raise ConfigError("embeddings: requires tokens=, the integers that its rows belong to")
        vectors = token_vectors(embeddings, ids)
    gap = next((amap.rule.grid.gap for amap in layers if amap.rule.grid.gap.size), None)
    for name, what in (("arcs", arcs), ("mentions", mentions)):
        if what and gap is not None:
            raise ConfigError(
                f"{name}: a cache has dropped tokens {gap.start} to {gap.stop - 1}, which they may refer to; expected "
                f"the maps of a full pass"
            )
    collected = collect(layers, Inputs(ids, vectors, classes, reach, radius))
    heads = ids.tolist() if rows is None and ids is not None else rows
    return Roles(
        collected,
        reach,
        syntax(layers, list(arcs)) if arcs else {},
        coreference(layers, list(mentions), heads) if mentions else None,
    )


def _layers(maps: AttentionMap | Sequence[AttentionMap]) -> list[AttentionMap]:
    layers = [maps] if isinstance(maps, AttentionMap) else list(maps)
    if not layers:
        raise ConfigError("maps: got none; give the map of each layer, as attend(…, return_map=True) returns them")
    for index, amap in enumerate(layers):
        if not isinstance(amap, AttentionMap):
            raise DTypeError(f"maps[{index}]: expected an AttentionMap, got {type(amap).__name__}")
        if amap.shape != layers[0].shape:
            raise ShapeError(f"maps[{index}]: {tuple(amap.shape)}, expected the {tuple(layers[0].shape)} of maps[0]")
        if extra := amap.rule.grid.extra:
            raise ConfigError(
                f"maps[{index}]: its first {extra} keys are no tokens, as of add_bias_kv or add_zero_attn of "
                f"nn.MultiheadAttention, which roles are not defined for"
            )
        if amap.rule.grid.tokens != layers[0].rule.grid.tokens:
            raise ShapeError(
                f"maps[{index}]: of {amap.rule.grid.tokens} tokens, and maps[0] of {layers[0].rule.grid.tokens}; "
                f"expected maps of the same tokens"
            )
    if 0 in layers[0].shape:
        raise ShapeError(f"maps: {tuple(layers[0].shape)} [batch, heads, queries, keys]; expected none of them 0")
    return [token_map(amap, (), ()) for amap in layers]  # those of `attend` have rows of padding


def _seen(amap: AttentionMap) -> Tensor:
    """Which tokens are in sight of any query, boolean [b or 1, t]."""
    grid, seen = amap.rule.grid, Sight(amap.rule).seen()
    found = torch.zeros(len(seen), grid.tokens, dtype=torch.bool)
    found[:, grid.key_tokens()] = seen
    return found


# A head that attends to one neighbour also attends nearby: the weaker label is left out.
IMPLIED = {"local": ("previous", "self", "next", "offset"), "even": ("broad",)}
BESIDE = {-1: "previous", 0: "self", 1: "next"}
Row = list[str]
MOSTLY = 0.5  # the least share of the weight nearby that is on one neighbour, for a tendency to be named by it


class Roles(Mapping[str, RoleScore]):
    """Roles of all heads on one input, or on several merged ones: role → `RoleScore`. Prints itself as a table.

    Attributes:
        shape: (layers, heads). version: of the definitions.
        syntax: "relation, direction" → `Choice`, {} without arcs; coreference: a `Choice`, None without mentions.
        reach: the range of the offsets that were searched.
    """

    version = VERSION

    def __init__(
        self, collected: Collected, reach: int, syntax: Mapping[str, Choice], coreference: Choice | None
    ) -> None:
        self._collected, self.reach = collected, reach
        self.syntax, self.coreference = dict(syntax), coreference
        self.shape = (collected.rows.total.shape[0], collected.rows.total.shape[2])
        # Induction predicts the next token from the past: attention to both sides has none (Olsson et al. 2022).
        known = {*collected.roles, "offset"} - (set() if collected.causal else {"induction"})
        self._scores = {name: self._score(name) for name in DEFINITIONS if name in known}

    def __getitem__(self, name: str) -> RoleScore:
        return self._scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    # The views of `Mapping` would print the whole table.
    def keys(self) -> KeysView[str]:
        """Names of the roles."""
        return self._scores.keys()

    def values(self) -> ValuesView[RoleScore]:
        """Their scores."""
        return self._scores.values()

    def items(self) -> ItemsView[str, RoleScore]:
        """Names and scores."""
        return self._scores.items()

    @property
    def rows(self) -> int:
        """Queries with any key in sight, in the layer and head that has most of them."""
        return int(self._collected.rows.total.sum(1).max())

    @property
    def olsson(self) -> np.ndarray:
        """Prefix matching as the mean over all matching pairs (query, key), [layers, heads]: a perfect head has 1 only
        if every query has one match; 0.5 on a start token and 25 tokens repeated four times. NaN without tokens.
        Source: Olsson et al. 2022, 2209.11895."""
        return self._induction_over(self._collected.entries)

    @property
    def tl_mul(self) -> np.ndarray:
        """Weight on matching keys over all weight, [layers, heads], as computed by TransformerLens' head detector
        with "mul": a perfect head has the coverage. NaN without tokens."""
        return self._induction_over(self._collected.mass)

    def labels(self, layer: int, head: int, confidence: float = SURE) -> list[Label]:
        """The roles of a head with at least this confidence, the clearest first; [] if it plays none on this input, or
        if fewer queries than `Definition.rows` (10, for similar meaning 50) are eligible."""
        if not (0 <= layer < self.shape[0] and 0 <= head < self.shape[1]):
            raise ShapeError(f"labels(layer={layer}, head={head}): there are {self.shape[0]} × {self.shape[1]} heads")
        if not 0.0 <= confidence <= 1.0:
            raise ConfigError(f"confidence={confidence}: expected 0 to 1")
        at, found = (layer, head), {}
        for name, score in self._scores.items():
            if score.enough(confidence)[at]:
                found[name] = score.label(at)
        if "offset" in found:
            offset = self["offset"].offset
            assert offset is not None
            if BESIDE.get(int(offset[at])) in found:
                del found["offset"]
        for weaker, stronger in IMPLIED.items():
            if any(name in found for name in stronger):
                found.pop(weaker, None)
        return [*self._related(at, confidence), *sorted(found.values(), key=lambda x: -x.score / x.threshold)]

    def pattern(self, layer: int, head: int) -> list[Label]:
        """What reports and pictures name a head by: its labels; if it has none, the role of most of its weight, as a
        tendency (`sure` is False), if that is a fifth of it and twice that of a uniform head; else []."""
        if labels := self.labels(layer, head):
            return labels
        at = layer, head
        found = {name: score for name, score in self._scores.items() if score.tends[at]}
        if "local" in found:
            beside = max((found[name].mass[at] for name in BESIDE.values() if name in found), default=0.0)
            for name in BESIDE.values() if beside < MOSTLY * found["local"].mass[at] else ["local"]:
                found.pop(name, None)
        best = max(found.values(), key=lambda score: score.mass[at], default=None)
        return [best.label(at, sure=False)] if best else []

    def merge(self, other: "Roles") -> "Roles":
        """Both inputs as one, for a corpus: rows are pooled exactly; stretches of rows are joined if there are
        more than 256. Both must have the same heads and arguments."""
        mine, theirs = self._collected, other._collected
        same = self.shape == other.shape and self.reach == other.reach and list(self) == list(other)
        if not same:
            raise ConfigError(
                f"merge: {self.shape} heads with {', '.join(self)} within ±{self.reach}, and {other.shape} heads with "
                f"{', '.join(other)} within ±{other.reach}; give inputs of one model with the same arguments"
            )
        joined = {name: getattr(mine, name).merge(getattr(theirs, name)) for name in ("hits", "near", "rows", "mass")}
        for name in ("roles", "without_first"):
            joined[name] = {role: x.merge(getattr(theirs, name)[role]) for role, x in getattr(mine, name).items()}
        entries = mine.entries.merge(theirs.entries) if mine.entries and theirs.entries else None
        syntax = {**other.syntax, **self.syntax}
        syntax |= {name: self.syntax[name].merge(other.syntax[name]) for name in self.syntax if name in other.syntax}
        one, two = self.coreference, other.coreference
        coreference = one.merge(two) if one and two else one or two
        collected = Collected(**joined, entries=entries, causal=mine.causal and theirs.causal)
        return Roles(collected, self.reach, syntax, coreference)

    @property
    def table(self) -> HeadTable:
        """The scores of all roles with their intervals; offset_at is the best offset of the role "offset"."""
        columns: dict[str, Any] = {name: score.column for name, score in self._scores.items()}
        columns["offset_at"] = HeadColumn(self._scores["offset"].offset, unit="tokens")
        about = {"version": self.version, "scope": "on this input", "rows": self.rows}
        return HeadTable(columns, title="Roles of heads on this input", about=about)

    def text(self, confidence: float = SURE) -> str:
        """All heads as text: their labels with at least this confidence and their scores, above those of a uniform
        head."""
        (head, body, below), notes = self._shown(confidence)
        lines = as_text(head, [*body, *below], words=3, gap="  ").split("\n")
        lines.insert(len(lines) - len(below), "─" * max(map(len, lines)))
        return "\n".join([*lines, *notes])

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        (head, body, below), notes = self._shown(SURE)
        return as_html(head, [*body, *below], notes=notes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON; None for unknown ones."""
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
        write_text(path, json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False))

    def _shown(self, confidence: float) -> tuple[tuple[Row, list[Row], list[Row]], list[str]]:
        """The header, a row for each head and those below; and the notes."""
        best = self["offset"].offset
        assert best is not None
        at, body = list(self).index("offset"), []
        for layer, head in np.ndindex(*self.shape):
            words = ", ".join(label.text for label in self.labels(layer, head, confidence))
            numbers = [_number(float(score.mass[layer, head])) for score in self.values()]
            numbers[at] += f" at {best[layer, head]:+d}".replace("-", "−")
            body.append([str(layer), str(head), words or "·", *numbers])
        below = [
            ["", "", "a uniform head", *(_number(_middle(score.uniform)) for score in self.values())],
            ["", "", "eligible rows", *(_number(_middle(score.coverage)) for score in self.values())],
        ]
        notes = [
            *choices(self._choices),
            f"{self.shape[0]} × {self.shape[1]} heads on this input of {self.rows:,} rows; definitions {self.version}.",
            f"A label is a score over its threshold on {ROWS} eligible queries or more, in {confidence:.0%} or more of "
            f"{DRAWS} draws of a block bootstrap; · is none.",
            "Weights show where a head attends, not what it is for.",
        ]
        header = ["layer", "head", "on this input", *(SHORT.get(name, name) for name in self)]
        return (header, body, below), notes

    @property
    def _choices(self) -> dict[str, Choice]:
        """The choices of all relations, and of coreference if mentions were given."""
        return self.syntax if self.coreference is None else {**self.syntax, "coreference": self.coreference}

    def _score(self, name: str) -> RoleScore:
        c = self._collected
        definition = DEFINITIONS[name]
        if name == "offset":
            share, weight = np.nan_to_num(c.hits.mean()[0], nan=-1.0), np.nan_to_num(c.near.mean()[0], nan=-1.0)
            best = (share + 1e-6 * weight).argmax(-1)  # of equal shares, the offset with more weight
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

    def _related(self, at: tuple[int, int], confidence: float) -> list[Label]:
        """Labels from arcs and mentions."""
        found = []
        for name, choice in self._choices.items():
            if choice.better[at] and choice.confidence[at] >= confidence:
                found.append(
                    Label(
                        name, "coreference" if choice is self.coreference else "syntax", float(choice.accuracy[at]),
                        choice.baseline + MARGIN, float(choice.confidence[at]), MARGIN_SOURCE, choice.count,
                        choice.baseline,
                    )
                )  # fmt: skip
        return sorted(found, key=lambda label: label.threshold - label.score)


SHORT = {"separator": "sep.", "punctuation": "punct.", "duplicate": "same", "induction": "induct.", "local": "nearby"}
FEWEST = 10  # cases from which a best head is named
NAMED = 6  # relations with fewer cases that are named


def choices(found: Mapping[str, Choice]) -> list[str]:
    """One line for each relation and for coreference, with the best head or the number of tied ones; relations of fewer
    than FEWEST cases, in which a head can be right by chance, share one line."""
    lines, few = [], []
    for name, choice in sorted(found.items(), key=lambda item: -item[1].count):
        if choice.count >= FEWEST:
            lines.append(
                f"{name}: {_winner(choice)} of {choice.count} cases on this input; {choice.rule or 'no rule'} in "
                f"{choice.baseline:.0%}"
            )
        elif choice.count:
            few.append(f"{name} ({choice.count})")
    if few:
        shown = "; ".join(few[:NAMED]) + (f"; and {len(few) - NAMED} more" if len(few) > NAMED else "")
        lines.append(f"Fewer than {FEWEST} cases, too few to name a head: {shown}")
    return lines


def _winner(choice: Choice) -> str:
    accuracy = np.nan_to_num(choice.accuracy, nan=-1.0)
    best = [head_name(*at) for at in np.argwhere(accuracy == accuracy.max())]
    share = f"{accuracy.max():.0%}"
    if len(best) == 1:
        return f"{best[0]} is right in {share}"
    return f"{' and '.join(best) if len(best) == 2 else f'{len(best)} heads'} tie, right in {share}"


def _middle(x: np.ndarray) -> float:
    known = x[np.isfinite(x)]
    return float(known.mean()) if known.size else float("nan")


def _number(x: float) -> str:
    return f"{x:.2f}" if np.isfinite(x) else "—"
