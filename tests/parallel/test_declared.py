"""Statistics and scores of somebody's own in blocks of a ring: what they declare is done, and nothing is assumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from compared import close
from samples import qkv
from torch import Tensor

import headwise as hw
from headwise.errors import ConfigError, ShapeError
from headwise.fields import Array
from headwise.kernels import KERNELS
from headwise.kernels.call import Call, Result
from headwise.kernels.reference import weights_of
from headwise.kernels.torch_blocks import TorchBlocks
from headwise.masks import Everything, Grid, Span
from headwise.parallel.layout import Rows, Way
from headwise.parallel.travel import wanted_of_kernels
from headwise.rule import Rule
from headwise.rule.tiles import Tile
from headwise.scores import Bias, Relative, Score, SinkLogits
from headwise.stats import CONCENTRATION, ENTROPY, MASS, SQUARES, Join, OfWeights, RowMeasure, Statistic

B, H, H_KV, N, M, D, E = 2, 4, 2, 17, 29, 5, 3
ROWS = (Span(0, 7), Span(7, 17))
COLS = (Span(19, 29), Span(0, 3), Span(3, 19))


@dataclass(frozen=True)
class Own(OfWeights):
    """A number of a row that only `Tells` gives."""

    name: str = field(default="own", init=False)


class Tells(TorchBlocks):
    """A kernel that gives it."""

    name = "tells"

    def run(self, call: Call) -> Result:
        weights, _, _ = weights_of(call)
        found: dict[Statistic, Tensor] = {}
        for statistic in call.statistics:
            assert isinstance(statistic, Own)
            found[statistic] = FORMULAS[statistic.joins](weights)
        result = super().run(call)
        return Result(result.out, result.lse, found)


FORMULAS = {
    MASS: lambda p: p.sum(-1),
    ENTROPY.joins: lambda p: torch.special.entr(p).sum(-1),
    SQUARES.joins: lambda p: p.square().sum(-1),
    CONCENTRATION.joins: lambda p: p.square().sum(-1) / p.sum(-1).square().clamp_min(1e-300),
}


def met(q: Tensor, k: Tensor, v: Tensor, way: Way, rows: Span) -> Rows:
    found = Rows(q[:, :, rows.start : rows.stop], rows, way, E)
    for cols in COLS:
        found.meet(k[:, :, cols.start : cols.stop], v[:, :, cols.start : cols.stop], cols)
    found.finish(way.rule.terms(q).sinks)
    return found


@pytest.mark.parametrize("join", FORMULAS, ids=["mass", "entropy", "squares", "concentration"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_statistic_is_joined_as_it_declares(join: Join, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "tells", Tells())
    q, k, v = qkv(B, H, H_KV, N, M, D, E)
    score = (SinkLogits([0.3, 2.0, -1.0, 30.0]),) if sinks else ()
    rule = Rule(hw.Causal(), D**-0.5, Grid(B, H, N, M), score)
    wanted = Own(join)
    whole = FORMULAS[join](weights_of(Call(q.double(), k, v, rule))[0])
    for rows in ROWS:
        found = met(q, k, v, Way(rule, "tells", statistics=(wanted,)), rows)
        close("statistic", found.found[wanted], whole[:, :, rows.start : rows.stop], 1e-5)


class Needs(RowMeasure):
    name, unit, range, source = "needs", "", "", ""

    def __init__(self, statistic: Statistic) -> None:
        self.statistic = statistic

    def partial(self, tile: Tile) -> Tensor:
        return tile.mass

    def needs(self, rule: Rule) -> tuple[Statistic, ...]:
        return (self.statistic,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[self.statistic]


def test_what_cannot_be_joined_is_not_asked_of_blocks() -> None:
    rule = Rule(hw.Causal(), 1.0, Grid(B, H, N, M))
    assert wanted_of_kernels([Needs(Own(SQUARES.joins))], rule) == (Own(SQUARES.joins),)
    assert wanted_of_kernels([Needs(Own(None))], rule) == ()
    with pytest.raises(ConfigError, match="'own': the numbers of two sets of keys do not determine it"):
        Rows(qkv(B, H, H_KV, N, M, D, E)[0], Span(0, N), Way(rule, statistics=(Own(None),)), E)


def test_a_statistic_that_declares_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"class Silent\(Statistic\): declare per .*joins .*placed .*at .*only "):

        class Silent(Statistic):
            name = "silent"

    with pytest.raises(ConfigError, match=r"class Half\(Statistic\): declare per .*placed .*only "):

        class Half(Statistic):
            joins = MASS

            def at(self, cols: Span) -> Statistic:
                return self

            def rows(self, rows: Span) -> Statistic:
                return self


def test_a_measure_that_does_not_say_what_it_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"class Silent\(Measure\): declare name .*unit .*range .*source "):

        class Silent(RowMeasure):
            def partial(self, tile: Tile) -> Tensor:
                return tile.mass

    with pytest.raises(ConfigError, match=r"class Half\(Measure\): declare source"):

        class Half(RowMeasure):
            name, unit, range = "half", "mass", "0 to 1"

            def partial(self, tile: Tile) -> Tensor:
                return tile.mass


def test_a_mask_or_score_that_declares_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"class Silent\(Mask\): declare holds .*allowed .*state "):

        class Silent(hw.masks.Mask):
            pass

    with pytest.raises(ConfigError, match=r"class Silent\(Score\): declare holds .*placed .*terms "):

        class Silent(Score):  # type: ignore[no-redef]
            pass

    with pytest.raises(ConfigError, match=r"class Blind\(Score\): declare holds .*as fields\)$"):

        class Blind(Relative):
            def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
                return offset.to(dtype)[None]

    with pytest.raises(ConfigError, match=r"class Still\(Relative\): declare at "):

        class Still(Relative):
            holds = {}

    with pytest.raises(ConfigError, match=r"class Open\(Score\): holds=None"):

        class Open(hw.SoftCap):
            holds = None


def test_a_bias_of_other_heads_than_the_call_is_named() -> None:
    class Hidden(Relative):
        """Its heads differ, and it does not say so."""

        holds = {}

        def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.arange(H, dtype=dtype)[:, None] * offset

    q, k, v = qkv(B, H, H_KV, N, M, D, E)
    _, amap = hw.attend(q, k, v, score=Hidden(), return_map=True)
    with pytest.raises(ShapeError, match=r"biases of 4 heads, expected 1 or 1; `holds` of Hidden"):
        amap.head(1, 2)[:]


def test_two_soft_caps_of_different_classes_are_refused() -> None:
    class Cap(hw.SoftCap):
        pass

    q, k, v = qkv(B, H, H_KV, N, M, D, E)
    with pytest.raises(ConfigError, match=r"soft caps of 3\.0 and 5\.0"):
        hw.attend(q, k, v, score=(hw.SoftCap(3.0), Cap(5.0)))


class Far(Relative):
    """A bias of one's own, another one for each head."""

    holds = {"weight": Array("h")}

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)[:, None] * (offset.abs() + 1).to(dtype).log()


@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_of_ones_own_is_that_of_each_block_and_each_head(learned: bool) -> None:
    q, k, v = qkv(B, H, H_KV, N, M, D, E)
    weight = torch.linspace(-1.0, 1.0, H).requires_grad_(learned)
    out, amap = hw.attend(q, k, v, score=Far(weight), return_map=True)
    way = Way(Rule(Everything(), D**-0.5, Grid(B, H, N, M), (Far(weight),)))
    for rows in ROWS:
        found = met(q, k, v, way, rows)
        close("out", found.out, out[:, :, rows.start : rows.stop], 1e-5)
        close("lse", found.lse, amap.lse[:, :, rows.start : rows.stop], 1e-5)
    dense = amap[:]
    for head in range(H):
        close("head", amap.head(1, head)[0, 0], dense[1, head], 1e-6)
        found = amap.head(1, head).measure("entropy")["entropy"]
        close("entropy", found[0, 0], amap.measure("entropy")["entropy"][1, head], 1e-5)
    with torch.no_grad():
        weight.mul_(9.0)  # a step of training
    assert not learned or torch.equal(amap[:], dense)


def test_a_block_keeps_its_place_for_what_is_placed() -> None:
    q, k, v = qkv(B, H, H_KV, N, M, D, E)
    rule = Rule(Everything(), 1.0, Grid(B, H, N, M))
    rows, cols = ROWS[1], COLS[2]
    part = q[:, :, rows.start : rows.stop], k[:, :, cols.start : cols.stop], v[:, :, cols.start : cols.stop]
    values = torch.randn(1, 1, N, M)

    def first(*scores: Score) -> int | None:
        return Way(replace(rule, scores=scores)).call(*part, rows, cols).rule.grid.first

    assert first() is first(Bias(values)) is None
    assert first(Far(torch.ones(H))) == rows.start + M - N - cols.start
