"""Weight on chosen keys: the first ones, a neighbour, a class of tokens, the key that gets most."""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError
from headwise.masks import Grid
from headwise.masks.given import as_given
from headwise.rule import Rule
from headwise.stats.base import Measure, RowMeasure
from headwise.stats.rows import queries_of_keys, ranges, sees_offset
from headwise.stats.statistics import COLUMN_MASS, KeyWeights, RangeMass, Statistic
from headwise.tiles import Tile


class SinkMass(RowMeasure):
    """Σ p_ij over the first `count` keys (1 unless given), mean over queries: the attention sink.

    A query that stands on a sink key is counted too. Source: Xiao et al. 2023 (StreamingLLM, 2309.17453).
    """

    name, unit, range = "sink_mass", "mass", "0 to 1"
    source = "Xiao et al. 2023, 2309.17453"

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise ConfigError(f"SinkMass(count={count}): count must be >= 1")
        self.count = count
        self._range = RangeMass(0, count, relative=False)

    def partial(self, tile: Tile) -> Tensor:
        inside = self.count - tile.cols.start
        if inside <= 0:
            return torch.zeros_like(tile.lse)
        return tile.weights[..., :inside].sum(-1)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (self._range,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[self._range]


class _Diagonal(RowMeasure):
    """Weight on the key at a fixed offset, per eligible query (one that may see such a key)."""

    offset: int
    blank = True  # a key that a query may not see has no weight
    unit, range = "mass", "0 to 1"
    source = "Voita et al. 2019, 1905.09418 (positional heads)"

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (self._range(),) if ranges(rule) is not None else None

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        weight, eligible = self.told(found, lse, rule)
        return torch.stack((weight, eligible.to(weight.dtype).expand(weight.shape)), -1)

    def told(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        return found[self._range()], sees_offset(rule, self.offset, lse)

    def _range(self) -> RangeMass:
        return RangeMass(self.offset, self.offset + 1, relative=True)

    def partial(self, tile: Tile) -> Tensor:
        weight, eligible = tile.diagonal(self.offset)
        return torch.stack((weight, eligible.to(weight.dtype)), -1)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 0]

    def counted(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 1] > 0


class PreviousMass(_Diagonal):
    """p_{i,i−1}, mean over the queries that may see their previous key."""

    name, offset = "previous_mass", -1


class SelfMass(_Diagonal):
    """p_{i,i}, mean over the queries that may see their own key."""

    name, offset = "self_mass", 0


class NextMass(_Diagonal):
    """p_{i,i+1}, mean over the queries that may see their next key (none under a causal mask: 0)."""

    name, offset = "next_mass", 1


class ClassMass(RowMeasure):
    """Σ p_ij over the keys of a class of tokens, mean over queries.

    Args:
        members: boolean [m] or [b, m], True for keys of the class.
        name: what to call it in the result, such as "punctuation_mass".
    """

    name, unit, range = "class_mass", "mass", "0 to 1"
    source = "Clark et al. 2019, 1906.04341 §3.2 (separators and punctuation)"

    def __init__(self, members: Tensor, name: str = "class_mass") -> None:
        self.members = torch.atleast_2d(as_given(members).bool())
        self.name = name
        self._weights = KeyWeights(self.members)

    @classmethod
    def of_tokens(cls, tokens: list[str], kind: str = "punctuation") -> "ClassMass":
        """The class from the tokens' text: "punctuation" or "separator" (white space), by Unicode category.

        A blank beside a sign, as in " ,", is no matter: what is all signs but for white space is punctuation.
        """
        letters = {"punctuation": "P", "separator": "Z"}
        if kind not in letters:
            raise ConfigError(f"ClassMass.of_tokens(kind={kind!r}): expected 'punctuation' or 'separator'")

        def belongs(token: str) -> bool:
            said = token if kind == "separator" else token.strip()
            marks = [unicodedata.category(c)[0] == letters[kind] or (kind == "separator" and c.isspace()) for c in said]
            return bool(marks) and all(marks)

        return cls(torch.tensor([belongs(token) for token in tokens], device="cpu"), name=f"{kind}_mass")

    def start(self, grid: Grid, like: Tensor, keep_rows: bool = False):  # type: ignore[no-untyped-def]
        self._check(grid)
        return super().start(grid, like, keep_rows)

    def _check(self, grid: Grid) -> None:
        b, m = self.members.shape
        if m != grid.m or b not in (1, grid.b):
            raise ShapeError(
                f"ClassMass(members): shape {(b, m)} does not fit {grid.m} keys; expected ({grid.m},) or "
                f"({grid.b}, {grid.m})"
            )

    def partial(self, tile: Tile) -> Tensor:
        members = self.members[:, tile.cols.start : tile.cols.stop].to(tile.weights)
        if len(members) == 1:
            return tile.weights @ members[0]
        return (tile.weights @ members[:, None, :, None]).squeeze(-1)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        self._check(rule.grid)
        return (self._weights,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[self._weights]


@dataclass
class ColumnState:
    """Per key: the mass received and the queries that may see it, [b, h, m] in float64; pooled after a merge."""

    mass: Tensor
    eligible: Tensor
    largest: Tensor | None = None  # [1, h], after a merge


class ReceivedMass(Measure):
    """max_j (Σ_i p_ij / queries that may see j): the mean weight of the key that gets most.

    Above 0.3 the key is commonly called a sink. Merging keeps the largest over the inputs. `amap.received()`
    gives Σ_i p_ij of every key.
    """

    name, unit, range = "received_mass", "mass", "0 to 1"
    source = "Gu et al. 2024, 2410.10781 (sink metric)"

    def start(self, grid: Grid, like: Tensor) -> ColumnState:
        zero = torch.zeros(grid.b, grid.h, grid.m, dtype=torch.float64, device=like.device)
        return ColumnState(zero, torch.zeros_like(zero))

    def update(self, state: ColumnState, tile: Tile) -> None:
        cols = slice(tile.cols.start, tile.cols.stop)
        state.mass[..., cols] += tile.weights.sum(-2)
        rows = tile.shape[2]
        state.eligible[..., cols] += rows if tile.allowed is None else tile.allowed.sum(-2)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (COLUMN_MASS,) if ranges(rule) is not None else None

    def take(self, state: ColumnState, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        state.mass += found[COLUMN_MASS]
        state.eligible += queries_of_keys(rule, lse)

    def merge(self, one: ColumnState, other: ColumnState) -> ColumnState:
        largest = torch.cat((self._largest(one), self._largest(other))).amax(0, keepdim=True)
        return ColumnState(one.mass[:0], one.eligible[:0], largest)

    def finish(self, state: ColumnState) -> Tensor:
        return self._largest(state).float()

    def _largest(self, state: ColumnState) -> Tensor:
        if state.largest is not None:
            return state.largest
        received = state.mass / state.eligible.clamp_min(1)
        return received.amax(-1) if received.shape[-1] else received.sum(-1)  # no keys receive 0
