"""Mistakes that parts of one's own have had: each is named by the check of its kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise import testing
from headwise.fields import Array, Whole
from headwise.kernels.call import Call, Result
from headwise.kernels.torch_blocks import TorchBlocks
from headwise.masks import Grid, Mask, Span, State, spans
from headwise.models import HeadSite, Kind
from headwise.nn.layout import Layout, Part, Resizing
from headwise.nn.registry import CONTRACT, DESIGNS
from headwise.reports.views import VIEWS, View
from headwise.rule import Rule
from headwise.rule.tiles import Tile
from headwise.scores import Relative, Score, Terms
from headwise.stats import MASS, Compiled, Join, OfWeights, RowMeasure, Statistic
from headwise.testing import CheckFailed


class FromTheStart(Mask):
    """The keys up to the query's row, which is its position only where there are as many queries as keys."""

    holds = None

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return (cols <= rows[:, None])[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.MIXED


class Right(FromTheStart):
    """The same at the right positions."""

    holds = None

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return super().allowed(rows + grid.shift, cols, grid)


class InTwoRanges(Right):
    """Ranges that touch."""

    holds = None

    def spans(self, grid: Grid) -> Tensor:
        stop = grid.positions() + 1
        middle = stop // 2
        return torch.stack((torch.stack((0 * middle, middle), -1), torch.stack((middle, stop), -1)), -2)[None].int()


class Full(Right):
    """A tile on the diagonal is said to be full."""

    holds = None

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.FULL if cols.start <= rows.start + grid.shift else State.MIXED


class TooFar(Right):
    """One key more is said in ranges than in cells."""

    holds = None

    def spans(self, grid: Grid) -> Tensor:
        return spans.one(0, grid.positions()[None] + 2, grid.m)


class Unregistered(Right):
    """It has fields, so that it could be saved."""

    holds = {"step": Whole()}
    step = 1


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (FromTheStart(), "not aligned to the end of the keys"),
        (InTwoRanges(), "spans are not canonical"),
        (TooFar(), "spans are not the cells"),
        (Full(), "is FULL; it is not"),
        (Unregistered(), "Unregistered is not registered"),
    ],
)
def test_mistakes_of_masks(mask: Mask, words: str) -> None:
    with pytest.raises(CheckFailed, match=words):
        testing.check_mask(mask)


def test_a_mask_without_mistakes_passes() -> None:
    testing.check_mask(Right())


class Falling(Relative):
    """−rate · distance, a rate for each head."""

    holds = {"rates": Array("h")}

    def __init__(self, rates: Tensor) -> None:
        self.rates = rates

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        return -self.rates.to(dtype)[:, None] * offset.abs().to(dtype)


class Shared(Falling):
    """Its rates are declared as shared by all heads."""

    holds = {"rates": Array("x")}


class Unplaced(Score):
    """Depends on the distance, and says that it does not."""

    holds = {}
    placed = False

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        return Falling(torch.ones(grid.h)).terms(grid, like)


@pytest.fixture
def _registered() -> Any:
    for kind in (Falling, Shared, Unplaced):
        hw.scores.register(kind)
    yield
    for kind in (Falling, Shared, Unplaced):
        del Score.known[kind.__name__]


RATES = torch.linspace(0.1, 0.6, 6).requires_grad_()


def falling(logits: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    return logits - RATES.double()[:, None, None] * (positions - keys).abs()


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("score", "formula", "words"),
    [
        (Falling(RATES), None, "no formula"),
        (Falling(RATES), lambda s, i, j: falling(s, i, j + 1), "output of kernel"),
        (Falling(RATES), lambda s, i, j: falling(s, i, j).detach() + 0 * s, "does not use all tensors"),
        (Shared(RATES), falling, "`holds` of Shared names the axis h"),
        (Unplaced(), falling, "placed is False"),
    ],
)
def test_mistakes_of_scores(score: Score, formula: Any, words: str) -> None:
    with pytest.raises(CheckFailed, match=words):
        testing.check_score(score, formula)


@pytest.mark.thorough
@pytest.mark.usefixtures("_registered")
def test_a_score_without_mistakes_passes() -> None:
    testing.check_score(Falling(RATES), falling)


class Spread(RowMeasure):
    """1 − max p, mean over queries."""

    name, unit, range, source = "spread", "mass", "0 to 1", "this file"

    def partial(self, tile: Tile) -> Tensor:
        return tile.weights.amax(-1)

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(one, other)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return 1 - total


class OfTile(Spread):
    """The largest weight of each tile, added up."""

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other


class WrongJoin(Join):
    """As if squares were masses."""

    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        return log_share.exp() * x


@dataclass(frozen=True)
class Squares(OfWeights):
    """Σ p², joined as Σ p is."""

    name: str = "squares"
    joins: Join | None = MASS
    compiled: Compiled | None = field(default=hw.stats.SQUARES.compiled, compare=False)


class Concentrated(RowMeasure):
    """Σ p², mean over queries."""

    name, unit, range, source = "concentrated", "1", "0 to 1", "this file"
    joins: Join = WrongJoin()

    def partial(self, tile: Tile) -> Tensor:
        return tile.weights.square().sum(-1)

    def needs(self, rule: Rule) -> tuple[Statistic, ...]:
        return (Squares(joins=self.joins),)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[Squares(joins=self.joins)]


class LastOfTwo(Spread):
    """Merging forgets the first."""

    def merge(self, one: Any, other: Any) -> Any:
        return super().merge(other, other)


def spread(weights: Tensor, allowed: Tensor, scores: Tensor) -> Tensor:
    return (1 - weights.amax(-1)).mean(-1)


def squares(weights: Tensor, allowed: Tensor, scores: Tensor) -> Tensor:
    return weights.square().sum(-1).mean(-1)


@pytest.mark.parametrize(
    ("measure", "formula", "words"),
    [
        (OfTile(), spread, "keys in tiles of"),
        (Concentrated(), squares, "joined over three sets of keys"),
        (LastOfTwo(), spread, "merge"),
        (Spread(), squares, "kernel 'auto'"),
    ],
)
def test_mistakes_of_measures(measure: RowMeasure, formula: Any, words: str) -> None:
    if isinstance(measure, Concentrated) and "cpu" not in hw.kernels.KERNELS:
        pytest.skip("no kernel computes the statistic")
    with pytest.raises(CheckFailed, match=words):
        testing.check_measure(measure, formula)


@pytest.mark.thorough
def test_a_measure_without_mistakes_passes() -> None:
    testing.check_measure(Spread(), spread)
    right = type("Joined", (Concentrated,), {"joins": hw.stats.SQUARES.joins, "__doc__": "Σ p²."})()
    testing.check_measure(right, squares)


def design_with(**changes: Any) -> type[hw.MultiHeadAttention]:
    """Multi-head attention with its own contract, and something changed."""
    own = {part: vars(hw.MultiHeadAttention)[part] for part in CONTRACT}
    return type("Changed", (hw.MultiHeadAttention,), own | changes)


def shifted(self: Any, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
    return self.rotary(q, start), k  # keys are not rotated, so that absolute positions enter


def swapped(self: Any) -> Layout:
    """The parts of W_Q begin one row late, in a circle that nobody closes."""
    layout = hw.MultiHeadAttention.layout(self)
    first, *rest = layout.parts
    return replace(layout, parts=(replace(first, start=1), *rest))


def other_heads(self: Any) -> Layout:
    """The parts of W_Q, the last head first."""
    layout = hw.MultiHeadAttention.layout(self)
    parts = [Turned(**vars(part)) if part.letter == "q" else part for part in layout.parts]
    return replace(layout, parts=tuple(parts))


class Turned(Part):
    """The last head first."""

    def entries(self, head: int) -> slice:
        last = self.tensor.shape[self.axis] // self.width - 1
        return super().entries(last - head)


def seven(d_model: int, num_heads: int, **options: Any) -> Any:
    """Costs with a wrong number."""
    return replace(hw.MultiHeadAttention.costs(d_model, num_heads, **options), parameters=7)


def twice(self: Any, x: Tensor, note: Any) -> None:
    hw.MultiHeadAttention.steps(self, x, note)
    note(note.steps[0].name, note.steps[-1].tensor, note.steps[-1].axes, "Y", "again")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"apply_rope": shifted}, {"rotary": True}, "shift all positions and change y"),
        ({"layout": swapped}, {}, "do not hold every entry"),
        ({"steps": twice}, {}, "two of the name"),
        ({"output": lambda self, concat: self.o_proj(concat) + 1}, {}, "the last step"),
        ({"layout": other_heads}, {}, "changes the heads"),
        ({"costs": staticmethod(seven)}, {}, "costs counts 7 parameters"),
    ],
)  # fmt: skip
def test_mistakes_of_designs(
    changes: dict[str, Any], options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DESIGNS, "changed", design_with(**changes))
    with pytest.raises(CheckFailed, match=words):
        testing.check_design("changed", **options)


class Fused(nn.Module):
    """Queries, keys and values side by side in one map: of all heads, or of each head."""

    def __init__(self, by_head: bool = False) -> None:
        super().__init__()
        self.heads, self.by_head, self.wqkv, self.wo = 4, by_head, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_head:
            parts = self.wqkv(x).unflatten(-1, (self.heads, 9)).split(3, -1)
        else:
            parts = [y.unflatten(-1, (self.heads, 3)) for y in self.wqkv(x).chunk(3, -1)]
        q, k, v = (y.transpose(1, 2) for y in parts)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.wo(heads.transpose(1, 2).flatten(2))
        return y


class FusedKind(Kind):
    """As if all heads' queries were first, whatever the module is."""

    name, about, by_class = "fused_here", "Fused (wqkv, wo, heads)", True

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        if type(module) is not Fused:
            return None
        return HeadSite(name, module, self.name, module.heads, module.heads, 3, 3, module.wo, self)

    def layout(self, site: HeadSite) -> Layout:
        owner, width = site.module.wqkv, 3 * site.num_heads
        parts = [
            Part(letter, owner, name, 0, "query", 3, "qkv".index(letter) * width)
            for letter in "qkv" for name in ("weight", "bias")
        ]  # fmt: skip
        return Layout(tuple(parts)).into(site.module.wo, 3)

    def resizing(self, site: HeadSite) -> Resizing:
        return Resizing()

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        site.module.heads = num_heads


class Narrow(FusedKind):
    """Its values are a channel narrower than they are."""

    def layout(self, site: HeadSite) -> Layout:
        layout = super().layout(site)
        parts = [replace(part, width=2) if part.letter == "v" else part for part in layout.parts]
        return replace(layout, parts=tuple(parts))


@pytest.mark.parametrize(
    ("kind", "by_head", "words"),
    [
        (Narrow(), False, "do not hold every entry"),
        (FusedKind(), True, "pruned against masked"),
        (FusedKind(), False, None),
    ],
)
def test_mistakes_of_kinds(kind: Kind, by_head: bool, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.models.find.KINDS", [kind])
    torch.manual_seed(3)
    model, x = (
        nn.Sequential(Fused(by_head), nn.LayerNorm(12)).double().eval(),
        torch.randn(2, 7, 12, dtype=torch.float64),
    )
    if words is None:
        testing.check_kind(model, x)
        return
    with pytest.raises(CheckFailed, match=words):
        testing.check_kind(model, x)


class Late(TorchBlocks):
    """Its outputs are a little too large."""

    name = "late"

    def run(self, call: Call) -> Result:
        result = super().run(call)
        return Result(result.out * 1.001, result.lse, result.statistics)


def test_a_kernel_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hw.kernels.KERNELS, "late", Late())
    with pytest.raises(CheckFailed, match="late: output, no mask, no score"):
        testing.check_kernel("late")


class Raw(View):
    """Writes text into a page as it is."""

    name, about = "raw", "the titles"

    def write(self, report: Any, path: Any, *, lang: str) -> None:
        path.write_text(f"<h1>{report.title}</h1>", encoding="utf-8")


class Partial(Raw):
    """Leaves a file beside its own."""

    def write(self, report: Any, path: Any, *, lang: str) -> None:
        path.with_suffix(".tmp").write_text("left")
        path.write_text("done")


@pytest.mark.parametrize(("view", "words"), [(Raw(), "escape it"), (Partial(), "leaves")])
def test_mistakes_of_views(view: View, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VIEWS, "raw", view)
    with pytest.raises(CheckFailed, match=words):
        testing.check_view("raw")
