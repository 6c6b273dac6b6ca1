"""The sums of a sweep: moments of every measure of every head, troubles, and how strongly a head attends.

How strongly a head attends in a window: its strongest query, and the keys that this query attends to most. The strength
of a query is the largest of its weights that says something about the text: weights on the first token of the window,
which many heads use as a sink, on the query itself and on special tokens are left out. Instead, it can be the value of
any measure of queries, such as `induction_mass`. Queries that may attend to fewer than `KEYS` keys have no strength:
with little choice, every weight is large.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.base.read import Entry, whole, word
from headwise.corpus.select import FIELDS, NOTHING, Head, OfRows, OfWindows, empty, merged
from headwise.errors import CheckpointError, unknown_name
from headwise.map import AttentionMap
from headwise.masks import Grid
from headwise.rule import Rule
from headwise.rule.tiles import Tile, rows_at
from headwise.stats import GIVEN, MEASURES, LargestOther, Measure, RowMeasure, Statistic, Tokens, of_tokens
from headwise.stats.base import RowState
from headwise.stats.statistic import SAME, RowValue, allowed_keys, ranges

MOST_TROUBLES = 8  # that are kept


@dataclass(frozen=True)
class Trouble:
    """A place of NaN or infinity: the first layer of a window with such numbers, in its "scores" or "values"."""

    path: str
    where: str
    layer: int
    heads: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        heads = ", ".join(map(str, self.heads))
        return (
            f"layer {self.layer}, head{'s' * (len(self.heads) > 1)} {heads}: {self.what} in {self.path}, {self.where}"
        )


@dataclass
class Tally:
    """The sums over some windows: moments [measures, 5, heads], as in `FIELDS`; what was lost [2, heads], queries with
    NaN or infinite scores and the windows left out for them; both float64. A token in several windows counts once."""

    numbers: Tensor
    lost: Tensor
    windows: int = 0
    tokens: int = 0
    troubles: list[Trouble] = field(default_factory=list)
    kernels: frozenset[str] = frozenset()

    @classmethod
    def of_nothing(cls, measures: int, heads: int) -> "Tally":
        """The sums over no windows."""
        return cls(empty(measures, heads), torch.zeros(2, heads, dtype=torch.float64))

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with all bits: the arrays are base64 of little-endian float64."""
        arrays = {name: getattr(self, name).numpy().astype("<f8") for name in ("numbers", "lost")}
        return {
            **{name: b64encode(x.tobytes()).decode() for name, x in arrays.items()}, "windows": self.windows,
            "tokens": self.tokens, "troubles": [asdict(trouble) for trouble in self.troubles],
            "kernels": sorted(self.kernels),
        }  # fmt: skip

    @classmethod
    def of(cls, found: Entry, measures: int, heads: int) -> "Tally":
        """Read a result of `to_dict` for this number of measures and heads. CheckpointError if it is not one."""

        def array(name: str, *shape: int) -> Tensor:
            try:
                values = np.frombuffer(b64decode(found.word(name), validate=True), "<f8").reshape(shape)
            except ValueError:
                raise CheckpointError(f"{name}: expected float64 numbers {shape} in base64") from None
            return torch.from_numpy(values.astype(np.float64))

        troubles = [
            Trouble(
                one.word("path"), one.word("where"), one.whole("layer", least=0), tuple(one.each("heads", whole)),
                one.word("what"),
            )
            for one in found.entries("troubles")
        ]  # fmt: skip
        return cls(
            array("numbers", measures, len(FIELDS), heads), array("lost", 2, heads), found.whole("windows", least=0),
            found.whole("tokens", least=0), troubles, frozenset(found.each("kernels", word)),
        )  # fmt: skip

    def add(self, other: "Tally") -> None:
        """Add another tally."""
        self.numbers = merged(self.numbers, other.numbers)
        self.lost = self.lost + other.lost
        self.windows += other.windows
        self.tokens += other.tokens
        self.troubles = [*self.troubles, *other.troubles][:MOST_TROUBLES]
        self.kernels |= other.kernels


@dataclass(frozen=True)
class Node:
    """The units `first` to `stop` - 1: the SHA-256 of their texts, and their sums."""

    first: int
    stop: int
    sha256: str
    sums: Tally

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"first": self.first, "stop": self.stop, "sha256": self.sha256, "sums": self.sums.to_dict()}

    @classmethod
    def of(cls, found: Entry, measures: int, heads: int) -> "Node":
        """Read a result of `to_dict`. CheckpointError if it is not one."""
        sums = Tally.of(found.entry("sums"), measures, heads)
        return cls(found.whole("first", least=0), found.whole("stop", least=1), found.word("sha256"), sums)

    def and_next(self, other: "Node") -> "Node":
        """Both together."""
        sums = replace(self.sums)
        sums.add(other.sums)
        digest = sha256((self.sha256 + other.sha256).encode()).hexdigest()
        return Node(self.first, other.stop, digest, sums)


def grown(nodes: Iterable[Node]) -> list[Node]:
    """Nodes in order, joined as long as two are the halves of 2ʲ units from a multiple of 2ʲ on. Sums are rounded in
    the same order then, whatever parts of the units were joined before; about 2·log₂ of them are left."""
    found: list[Node] = []
    for node in nodes:
        found.append(node)
        while len(found) > 1:
            one, other = found[-2:]
            size = one.stop - one.first
            if one.stop != other.first or size != other.stop - other.first or one.first % (2 * size):
                break
            found[-2:] = [one.and_next(other)]
    return found


def root(nodes: Sequence[Node]) -> Node:
    """All of these together: what `grown` has left of units from the first on, the last ones first."""
    return reduce(lambda later, one: one.and_next(later), reversed(nodes))


Bad = tuple[int, tuple[int, ...], str]  # the number of a layer, heads of it, and which numbers are not finite


@dataclass(frozen=True)
class WindowSums:
    """The numbers of one window: moments [measures, 5, heads] and queries with NaN or infinite scores [heads], float64,
    of the selected heads; the first layer of all with NaN or infinity."""

    numbers: Tensor
    rows: Tensor
    bad: Bad | None


class Batch:
    """The numbers of a batch, added layer by layer as the model computes them, and moved to the CPU at the end."""

    def __init__(self, layers: Sequence[str], heads: Sequence[Head], measures: Sequence[OfRows | OfWindows]) -> None:
        self._layers, self._heads, self._measures = layers, heads, measures
        self.kernels: set[str] = set()
        self._found: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, amap: AttentionMap) -> None:
        """Add the measures of a layer."""
        measured = amap.measured
        assert measured is not None  # they were requested
        numbers = torch.stack([measured.states[measure.name].numbers for measure in self._measures], 1)
        scores, values = measured.nonfinite, amap.nonfinite_values
        if values is None:
            values = torch.zeros_like(scores)
        else:
            values = values.repeat_interleave(amap.shape[1] // values.shape[1], dim=1)
        self.kernels.add(amap.kernel)
        self._found[name] = numbers, torch.stack((scores, values), 1)

    def windows(self) -> list[WindowSums]:
        """The numbers of each window. The only synchronisation with the device."""
        found = [self._found[name] for name in self._layers]
        every = torch.cat([torch.cat((numbers.flatten(1, 2), bad.double()), 1) for numbers, bad in found], -1).cpu()
        numbers, bad = every[:, :-2].unflatten(1, (len(self._measures), -1)), every[:, -2:]
        widths = [part.shape[-1] for _, part in found]
        kept = torch.tensor([sum(widths[: head.layer]) + head.head for head in self._heads])
        windows = []
        for i in range(len(every)):
            strange = (
                (layer, heads, what)
                for layer, counts in enumerate(bad[i].split(widths, -1))
                for what, count in zip(("scores", "values"), counts, strict=True)
                if (heads := tuple(count.nonzero().flatten().tolist()))
            )
            windows.append(WindowSums(numbers[i][..., kept], bad[i, 0, kept], next(strange, None)))
        return windows


def counted(numbers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The moments of a window [measures, 5, heads] without heads with non-finite scores, and what was lost [2, heads].
    rows: [heads], queries with non-finite scores."""
    bad = rows > 0
    if bool(bad.any()):
        numbers = torch.where(bad, empty(*numbers.shape[:1], numbers.shape[-1]), numbers)
    return numbers, torch.stack((rows, bad.double()))


KEYS = 8  # of a query that are kept
WEIGHT = "weight"


def strengths() -> tuple[str, ...]:
    """The names of all strengths."""
    return (WEIGHT, *(name for name in (*MEASURES, *GIVEN) if _of_rows(name, NOTHING) is not None))


def check_strength(name: str) -> None:
    """Raise ConfigError for an unknown name, and for a measure that has no value for each query."""
    if name != WEIGHT and (name not in (*MEASURES, *GIVEN) or _of_rows(name, NOTHING) is None):
        raise unknown_name("strongest_by", name, strengths())


def unit_of(name: str) -> str:
    """The unit of a strength."""
    found = None if name == WEIGHT else _of_rows(name, NOTHING)
    return "mass" if found is None else found.unit


def _of_rows(name: str, tokens: Tokens) -> RowMeasure | None:
    found = of_tokens(name, tokens)
    return found if isinstance(found, RowMeasure) and type(found).update is RowMeasure.update else None


class LargestWeight(RowMeasure):
    """The largest weight of a query on keys other than itself and the hidden ones, boolean [b, m]."""

    name, unit, range, source = WEIGHT, "mass", "0 to 1", "headwise"

    def __init__(self, hidden: Tensor) -> None:
        self._hidden, self._others = hidden, LargestOther(~hidden)

    def partial(self, tile: Tile) -> Tensor:
        hidden = self._hidden.to(tile.lse.device)[:, None, None, tile.cols.start : tile.cols.stop]
        return tile.weights.masked_fill(hidden | (tile.positions[:, None] == tile.keys), 0.0).amax(-1)

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(one, other)

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(SAME, self._others)


class Strength(Measure):
    """A measure of rows whose value of each query is kept, in the pass of the others."""

    name, unit, range, source = "strength_of_passages", "any", "any", "headwise"

    def __init__(self, measure: RowMeasure) -> None:
        self._measure = measure

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return self._measure.needs(rule)

    def start(self, grid: Grid, like: Tensor) -> RowState:
        return self._measure.start(grid, like, keep_rows=True)

    def update(self, state: RowState, tile: Tile) -> None:
        self._measure.update(state, tile)

    def take(self, state: RowState, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        self._measure.take(state, found, lse, rule)

    def merge(self, one: RowState, other: RowState) -> RowState:
        return self._measure.merge(one, other)

    def finish(self, state: RowState) -> Tensor:
        return self._measure.finish(state)


def strength_of(by: str, tokens: Tokens, mask: Tensor | None) -> Strength:
    """The measure of the strength of queries. by: as checked by `check_strength`; mask: [b, n], False for padding."""
    if by != WEIGHT:
        inner = _of_rows(by, tokens)
        assert inner is not None  # checked by `check_strength`
        return Strength(inner)
    hidden = _special(tokens, mask).clone()
    hidden[:, 0] = True
    return Strength(LargestWeight(hidden))


def _special(tokens: Tokens, mask: Tensor | None) -> Tensor:
    assert tokens.special is not None
    return tokens.special if mask is None else tokens.special | ~mask.to(tokens.special.device)


def strongest(amap: AttentionMap, tokens: Tokens, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The strongest query of each window and head by the map's `Strength`: its strength, −∞ if no query has one, and
    its position, both [b, h]. Of equally strong ones the first. mask: [b, n], False for padding."""
    assert amap.measured is not None  # it was requested
    strength = amap.measured.rows[Strength.name]
    device = strength.device
    blank = _special(tokens, mask)[:, None].to(device) | (_choice(amap.rule, amap.lse) < KEYS) | strength.isnan()
    strength = strength.masked_fill(blank, -torch.inf)
    most = strength.amax(-1)
    n = strength.shape[-1]
    return most, torch.where(strength == most[..., None], torch.arange(n, device=device), n).amin(-1)


def largest_keys(amap: AttentionMap, query: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The keys of the `KEYS` largest weights of one query of each head [b, h], and these weights, largest first, both
    [b, h, KEYS]; weights of 0 are those of fewer keys."""
    query = query.to(amap.lse.device)
    if type(amap) is AttentionMap:
        weights = rows_at(amap.q, amap.k, amap.rule, query)
    else:  # its weights are not those of its scores
        b, h, _, _ = amap.shape
        weights = torch.stack([torch.stack([amap[i, j, int(query[i, j])] for j in range(h)]) for i in range(b)])
    found, keys = weights.float().cpu().sort(descending=True, stable=True)
    return keys[..., :KEYS].numpy(), found[..., :KEYS].numpy()


def _choice(rule: Rule, like: Tensor) -> Tensor:
    """How many keys each query may attend to, [b or 1, h or 1, n]."""
    if ranges(rule) is not None:
        return allowed_keys(rule, like)
    count = like.new_zeros(rule.grid.b, rule.grid.h, rule.grid.n)
    for rows in rule.row_blocks():
        for cols, _ in rule.tiles(rows):
            count[:, :, rows.start : rows.stop] += rule.allowed(rows, cols, like.device).sum(-1)
    return count
