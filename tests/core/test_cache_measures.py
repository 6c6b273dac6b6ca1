"""Measures of distance and of tokens with caches that drop tokens: those of a step are rows of a full pass.

SlidingCache(5, sinks=2), the 11th token:   0 1 . . . . 6 7 8 9 10      keys 0 and 1 are at the distances 10 and 9
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from design_samples import ONCE, design
from samples import kernels_here
from test_cache_scores import CACHES, HEADS, STEPS, TOKENS, layer_and, limits, random
from torch import Tensor

import headwise as hw
from headwise.base.read import read_tensors, write_tensors
from headwise.cache import SlidingCache
from headwise.edit.budgets import AheadMass, OutsideMass
from headwise.errors import CheckpointError, ConfigError, KernelError, ShapeError
from headwise.interventions import Edit, Forbid, Scale
from headwise.map import AttentionMap
from headwise.masks import Grid, Span
from headwise.rule.tiles import Tile
from headwise.stats import Measure
from headwise.stats.base import RowMeasure
from headwise.stats.keys import ClassMass, DuplicateMass, InductionMass
from headwise.stats.places import LocalMass, SinkMass
from headwise.stats.registry import MEASURES

IDS = torch.randint(5, (2, TOKENS), generator=torch.Generator().manual_seed(3))


class Far(RowMeasure):
    """Σ p over keys at least 7 tokens before the query that are even tokens."""

    name, unit, range, source = "far", "mass", "0 to 1", "none"

    def partial(self, tile: Tile) -> Tensor:
        far = (tile.positions[:, None] - tile.keys >= 7) & (tile.keys % 2 == 0)
        return (tile.weights * far).sum(-1)


class Local(LocalMass):
    def __init__(self, radius: int) -> None:
        super().__init__(radius)
        self.name = f"local_{radius}"


def all_measures(stop: int) -> list[Measure]:
    """Measures with a value of each row after `stop` tokens: all with a name, and more of positions and of tokens."""
    named, sinks, ids = [kind() for kind in MEASURES.values()], SinkMass(4), IDS[:, :stop]
    sinks.name = "sinks_4"
    return [
        *(measure for measure in named if isinstance(measure, RowMeasure)), *map(Local, (0, 1, 3, 11)), sinks, Far(),
        DuplicateMass(ids), InductionMass(ids), DuplicateMass(ids, uniform=True), InductionMass(ids, uniform=True),
        ClassMass(ids == 2), OutsideMass(6, 1), AheadMass(),
    ]  # fmt: skip


class Step(NamedTuple):
    """A step's queries, its map, and the map of the full pass up to it, in float64."""

    rows: slice
    map: AttentionMap
    full: AttentionMap


def steps_of(kind: str, steps: str, dtype: torch.dtype = torch.float64, *, measured: bool = False) -> Iterator[Step]:
    """Each step of a layer with the cache, by `all_measures` if measured."""
    layer, x = layer_and(dtype)
    cache, start = CACHES[kind](), 0
    with torch.no_grad():
        q, k, v = (part.double() for part in layer.project(x, x))
        for part in x.split(STEPS[steps], 1):
            stop = start + part.shape[1]
            measures = all_measures(stop) if measured else ()
            _, amap = layer(part, mask=hw.Causal(), cache=cache, return_map=True, measures=measures)
            here = (x[:, :, :stop] for x in (q, k, v))
            _, full = hw.attend(*here, mask=limits(cache), kernel="reference", return_map=True)
            yield Step(slice(start, stop), amap, full)
            start = stop


def last_step(kind: str = "sliding", steps: str = "chunks", dtype: torch.dtype = torch.float64) -> Step:
    *_, last = steps_of(kind, steps, dtype)
    return last


def close(found: Tensor, expected: Tensor, name: str, limit: float = 1e-10) -> None:
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=limit, atol=limit, msg=lambda text: f"{name}: {text}"
    )


def check(amap: AttentionMap, step: Step, limit: float) -> None:
    expected = step.full.measure(*all_measures(step.rows.stop), rows=True).rows
    found = amap.measure(*all_measures(step.rows.stop), rows=True).rows
    for name, row in expected.items():
        close(found[name], row[:, :, step.rows], name, limit)


LIMITS = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 3e-5}


@pytest.mark.thorough_except("bfloat16-cpu-chunks-budgets")
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kernel", ["auto", *kernels_here()])
@pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype)[6:])
def test_measures_of_steps_are_those_of_a_full_pass(dtype: torch.dtype, kernel: str, steps: str, kind: str) -> None:
    gaps = 0
    try:
        with hw.kernels.use_kernel(kernel):
            for step in steps_of(kind, steps, dtype, measured=True):
                check(step.map, step, LIMITS[dtype])
                later = step.map.measure(*all_measures(step.rows.stop))
                for name, value in later.items():
                    close(step.map.measured[name], value, name, 1e-6)
                gaps += step.map.rule.grid.gap.size > 0
    except KernelError:
        assert kernel not in ("auto", "torch_blocks", "reference")
        return
    assert gaps or kind == "a budget without limit"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sliding", "budgets"])
def test_of_each_head_of_files_and_of_each_kernel(kind: str, tmp_path: Path) -> None:
    step = last_step(kind)
    assert step.map.rule.grid.gap.size > 9
    for kernel in ("torch_blocks", "reference"):
        check(step.map.using(kernel), step, 1e-9)
    step.map.save(tmp_path / "map")
    loaded = AttentionMap.load(tmp_path / "map")
    assert loaded.rule.grid == step.map.rule.grid
    check(loaded, step, 1e-9)
    names = [measure.name for measure in all_measures(TOKENS)]
    for batch, head in ((0, 3), (1, 0)):
        one = loaded.head(batch, head)
        mine = [m for m in all_measures(TOKENS) if not (hasattr(m, "ids") or hasattr(m, "members"))]
        rows = step.full.measure(*mine, rows=True).rows
        for name, row in one.measure(*mine, rows=True).rows.items():
            close(row[0, 0], rows[name][batch, head, step.rows], name)
    assert len(set(names)) == len(names)


@pytest.mark.thorough_except("budgets-chunks-torch_fused")
@pytest.mark.parametrize("kernel", ["auto", *kernels_here()])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", CACHES)
def test_means_of_diagonals(kind: str, steps: str, kernel: str) -> None:
    for step in steps_of(kind, steps, torch.float32):
        try:
            offsets, means = step.map.using(kernel).diagonals()
        except KernelError:
            assert kernel == "torch_fused" or (kernel == "cpu" and "budget" in kind)
            continue
        weights = step.full.to_dense()[:, :, step.rows]
        allowed = step.full.mask.to_dense(step.rows.stop, step.rows.stop, heads=HEADS)[:, :, step.rows]
        every = torch.arange(-step.rows.stop, step.rows.stop - step.rows.start)
        total, cells = (
            torch.stack([x.diagonal(offset + step.rows.start, 2, 3).sum(-1) for offset in every.tolist()], -1)
            for x in (weights, allowed)
        )
        assert offsets.tolist() == sorted(set(offsets.tolist()))
        there = torch.isin(every, offsets)
        assert there.sum() == len(offsets)
        close(means, (total / cells.clamp_min(1))[..., there], f"offsets {offsets.tolist()}", 1e-6)
        assert not cells[..., ~there].any()


def test_received_weight_and_largest_weights() -> None:
    step = last_step()
    gap = step.map.rule.grid.gap
    weights = step.full.to_dense()[:, :, step.rows]
    held = torch.cat((weights[..., : gap.start], weights[..., gap.stop :]), -1)
    close(step.map.to_dense(), held, "weights")
    close(step.map.received(), held.sum(2), "received")
    seen = limits(SlidingCache(5, 2)).to_dense(TOKENS, TOKENS)[:, :, step.rows].sum(2)
    close(step.map.measure("received_mass")["received_mass"], (weights.sum(2) / seen.clamp_min(1)).amax(-1), "", 1e-6)
    found, keys = step.map.topk(3)
    close(held.gather(-1, keys), found, "columns of the map")


def test_a_gap_of_the_caller() -> None:
    q, k, v = random(2, HEADS, 3, 6), random(2, 2, 11, 6, seed=1), random(2, 2, 11, 5, seed=2)
    _, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True, gap=(4, 104))
    key = torch.tensor([0, 1, 2, 3, *range(104, 111)])
    distance = (torch.tensor([108, 109, 110])[:, None] - key).double()
    mean = (amap.to_dense() * distance).sum(-1)
    found = amap.measure("mean_distance", "distance_variance", rows=True).rows
    close(found["mean_distance"], mean, "mean")
    variance = (amap.to_dense() * (distance - mean[..., None]).square()).sum(-1)
    close(found["distance_variance"], variance, "variance")
    assert "without tokens 4:104" in repr(amap)
    out = hw.attend(q, k, v, mask=hw.Causal(), gap=(4, 104))
    assert torch.equal(out, hw.attend(q, k, v, mask=hw.Causal()))


@pytest.mark.parametrize("gap", [(5, 3), (-1, 2), (9, 12), 3, (1, 2, 3), ("a", "b")])
def test_no_gap(gap: object) -> None:
    q, k = random(1, 1, 3, 6), random(1, 1, 11, 6)
    with pytest.raises(ConfigError, match="gap="):
        hw.attend(q, k, k, gap=gap, return_map=True)


def test_rectangles_have_the_same_distances() -> None:
    q, k = random(1, 1, 3, 6), random(1, 1, 11, 6)
    _, amap = hw.attend(q, k, k, return_map=True, gap=(4, 9))
    grid = amap.rule.grid

    def distances(grid: Grid) -> Tensor:
        key = torch.tensor([grid.token(j) for j in range(grid.m)])
        return torch.arange(grid.first_token, grid.first_token + grid.n)[:, None] - key

    whole = distances(grid)
    for start in range(11):
        for stop in range(start + 1, 12):
            rows, cols = Span(1, 3), Span(start, stop)
            part = grid.part(rows, cols)
            assert torch.equal(distances(part), whole[1:3, start:stop]), cols
            again = part.part(Span(0, 1), Span(0, 1))
            assert distances(again).item() == whole[1, start]


def test_tokens_of_the_keys_alone() -> None:
    """They suffice unless a measure depends on the token before a key, which the cache has dropped."""
    step = last_step()
    grid = step.map.rule.grid
    held = grid.of_keys(IDS)
    assert held.shape == (2, grid.m)
    for few, every in ((DuplicateMass(held), DuplicateMass(IDS)), (ClassMass(held == 2), ClassMass(IDS == 2))):
        one, other = (step.map.measure(measure, rows=True).rows[measure.name] for measure in (few, every))
        close(one, other, few.name)
        by_tiles = step.map.using("reference").measure(few, rows=True).rows[few.name]
        close(by_tiles, other, few.name)
    with pytest.raises(ShapeError, match=f"all {TOKENS} tokens, as it depends on token 15"):
        step.map.measure(InductionMass(held))
    with pytest.raises(ShapeError, match="does not fit"):
        step.map.measure(DuplicateMass(IDS[:, 1:]))


@pytest.mark.thorough
def test_watched_while_decoding() -> None:
    layer, x = layer_and(torch.float32)
    cache = SlidingCache(5, sinks=2)
    names = ["mean_distance", "distance_variance", "sink_mass", "entropy"]
    seen, start = [], 0
    with torch.no_grad(), hw.models.observe(seen.append, model=layer, measures=names):
        for part in x.split(1, 1):
            layer(part, mask=hw.Causal(), cache=cache)
    with torch.no_grad():
        _, full = layer(x, mask=limits(cache), return_map=True)
    rows = full.measure(*names, rows=True).rows
    for start, call in enumerate(seen):
        for name in names:
            close(call.measured[name], rows[name][:, :, start], name, 3e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("measures", [(), ("mean_distance", "sink_mass")], ids=["later", "in the graph"])
def test_compiled_steps(measures: tuple[str, ...]) -> None:
    layer, x = layer_and(torch.float32)
    layer.eval()
    cache = SlidingCache(5, sinks=2)
    torch.compiler.reset()  # beside other tests' graphs of this code, it would run uncompiled
    step = torch.compile(layer, backend="eager")
    x = x[:, :14]
    with torch.no_grad():
        _, full = layer(x, mask=limits(cache), return_map=True)
        rows = full.measure("mean_distance", "sink_mass", rows=True).rows
        layer(x[:, :11], mask=hw.Causal(), cache=cache)  # more than the cache keeps
        for at in range(11, 14):
            _, amap = step(x[:, at : at + 1], mask=hw.Causal(), cache=cache, return_map=True, measures=measures)
            found = amap.measured if measures else amap.measure("mean_distance", "sink_mass")
            for name, value in found.items():
                close(value, rows[name][:, :, at], name, 3e-5)


PIECES = ["the", ",", "\n", "cat", "."]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("reach", [3, 9])
def test_roles_of_steps_are_those_of_rows_of_a_full_pass(steps: str, kind: str, reach: int) -> None:
    vectors = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    for step in steps_of(kind, steps):
        stop, grid = step.rows.stop, step.map.rule.grid
        if not grid.gap.size or (steps == "steps" and stop % 3):  # a third of the steps of one token
            continue
        ids = IDS[:, :stop]
        about: dict[str, Any] = {
            "tokens": ids, "pieces": [[PIECES[i] for i in row] for row in ids.tolist()], "reach": reach, "radius": 5,
            "frequencies": {i: (i + 3) % 5 for i in range(5)}, "embeddings": vectors,
        }  # fmt: skip
        full, rows = step.full, Span(*step.rows.indices(stop)[:2])
        part = AttentionMap(full.q[:, :, step.rows], full.k, full.lse[:, :, step.rows], full.rule.rows(rows))
        expected, found = hw.analysis.roles([part], **about), hw.analysis.roles([step.map], **about)
        assert {*found} >= {"previous", "offset", "induction", "duplicate", "semantic", "rare", "punctuation", "local"}
        for name in expected:
            for what in ("mass", "uniform", "coverage"):
                one, other = (np.asarray(getattr(roles[name], what)) for roles in (found, expected))
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=f"{name}: {what}")
        without = expected["local"].without_first, found["local"].without_first
        np.testing.assert_allclose(*(roles.mass for roles in without if roles is not None), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found["offset"].offset, expected["offset"].offset)
        np.testing.assert_allclose(found.olsson, expected.olsson, rtol=1e-5, equal_nan=True)


def test_what_roles_require_of_a_map_with_dropped_tokens() -> None:
    step = last_step()
    keys, tokens = step.map.shape[3], step.rows.stop
    with pytest.raises(ShapeError, match=rf"tokens: shape \(1, {keys}\) does not fit; expected \({tokens},\)"):
        hw.analysis.roles([step.map], tokens=torch.zeros(keys, dtype=torch.long))
    with pytest.raises(ConfigError, match="mentions: a cache has dropped tokens 2 to 15"):
        hw.analysis.roles([step.map], mentions=[hw.analysis.Mention(1, "a")])


@pytest.mark.parametrize("edit", [Forbid(None, [1, 17, -2]), Scale(0.25, keys=slice(0, 26), queries=[20, 21, 28])])
def test_edits_count_dropped_tokens(edit: Edit) -> None:
    layer, x = layer_and()
    cache, found = SlidingCache(5, sinks=2), []
    with torch.no_grad(), hw.intervene(layer, edit):  # negative positions count from the end of the call
        for part, inside in ((x[:, :13], x[:, :13]), (x[:, 13:], x)):
            expected, full = layer(inside, mask=limits(cache), return_map=True)
            y, amap = layer(part, mask=hw.Causal(), cache=cache, return_map=True)
            close(y, expected[:, -part.shape[1] :], "output")
            rows = full.measure("mean_distance", rows=True).rows["mean_distance"][:, :, -part.shape[1] :]
            close(amap.measure("mean_distance", rows=True).rows["mean_distance"], rows, "distance")
            found.append(amap.rule.grid.gap.size)
    assert found[1] > 0


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("code", ["[3]", "[9, 3]", "[1000, 2000]", "[-1, 3]", '"a"', "[0.5, 3]"])
def test_files_with_a_damaged_gap(code: str, tmp_path: Path) -> None:
    last_step().map.save(tmp_path / "map")
    tensors, header = read_tensors(tmp_path / "map", "headwise-map-5")
    header.pop("checksum", None)
    write_tensors(tmp_path / "map", tensors, {**header, "gap": code})
    with pytest.raises(CheckpointError, match="gap"):
        AttentionMap.load(tmp_path / "map")


@pytest.mark.thorough_except(
    "sparse_mixture-{'top_k': 2, 'shared_heads': 1, 'per': 'sequence', 'rotary': True, 'bias': True}",
    "convolution-{'bias': True, 'sharpness': 2.0}",
)
@pytest.mark.parametrize(("name", "options"), ONCE, ids=str)
def test_of_every_design(name: str, options: dict[str, Any]) -> None:
    layer = design(name, options).eval()
    if not layer.takes_cache or options.get("per") == "sequence":
        return
    measures = ("mean_distance", "distance_variance", "local_mass", "sink_mass", "entropy")
    x, start = random(2, TOKENS, 12), 0
    cache = SlidingCache(5, sinks=2)
    with torch.no_grad():
        _, full = layer(x, mask=limits(cache), return_map=True)
        rows = full.measure(*measures, rows=True).rows
        for part in x.split(STEPS["chunks"], 1):
            _, amap = layer(part, mask=hw.Causal(), cache=cache, return_map=True, measures=measures)
            for key, row in amap.measure(*measures, rows=True).rows.items():
                close(row, rows[key][:, :, start : start + part.shape[1]], key, 1e-9)
            close(amap.measured["mean_distance"], amap.measure("mean_distance")["mean_distance"], "in the pass", 1e-6)
            start += part.shape[1]
    assert amap.rule.grid.gap == Span(2, 16)
