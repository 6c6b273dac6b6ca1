"""Statistics of many ranks against those of one process, and the maps that ranks hold."""

from dataclasses import dataclass

import torch
from compared import HOW, close, compare, raises
from samples import MASKS, SCORES, qkv

import headwise as hw
from headwise import parallel
from headwise.stats import MEASURES, OfWeights

N = 37


class Even(OfWeights):
    """A statistic that no kernel knows."""


EVEN = Even("even")


class EvenMass(hw.stats.RowMeasure):
    """Weight on every other key."""

    name, unit, range, source = "even_mass", "mass", "0 to 1", "this test"

    def partial(self, tile):
        return (tile.weights * (tile.keys % 2 == 0)).sum(-1)

    def needs(self, rule):
        return (EVEN,)

    def from_rows(self, found, lse, rule):
        return found[EVEN]


@dataclass
class Sums:
    mass: torch.Tensor  # [b, h, 2]: of even keys, and of odd ones
    most: torch.Tensor  # [b, h]


class Sides(hw.stats.Measure):
    """A measure that is none of rows, and says how blocks of queries join."""

    name, unit, range, source = "sides", "mass", "≥ 0", "this test"

    def start(self, grid, like):
        return Sums(like.new_zeros(grid.b, grid.h, 2, dtype=torch.float64), like.new_zeros(grid.b, grid.h).double())

    def update(self, state, tile):
        for side in (0, 1):
            state.mass[..., side] += tile.weights[..., tile.keys % 2 == side].sum((-1, -2))
        state.most = torch.maximum(state.most, tile.weights.amax((-1, -2)).double())

    def of_blocks(self):
        return {"mass": "sum", "most": "max"}

    def merge(self, one, other):
        return Sums(one.mass.sum(0, keepdim=True) + other.mass.sum(0, keepdim=True), one.most)

    def finish(self, state):
        return (state.mass[..., 0] - state.mass[..., 1] + 3.0 * state.most).float()


def all_measures() -> list:
    ids = torch.randint(0, 6, (N,), generator=torch.Generator().manual_seed(3))
    return [
        *MEASURES, EvenMass(), Sides(), hw.stats.DuplicateMass(ids), hw.stats.InductionMass(ids),
        hw.stats.InductionMass(ids, uniform=True),
        hw.stats.ClassMass(ids == 2, "twos"), hw.stats.ClassMass(torch.stack((ids == 1, ids == 4)), "two classes"),
        hw.stats.row_measure("far", lambda tile: (tile.weights * (tile.positions[:, None] - tile.keys > 9)).sum(-1)),
    ]  # fmt: skip


class Opaque(hw.stats.Measure):
    """A measure whose state nobody else can join."""

    name, unit, range, source = "opaque", "", "", ""

    def start(self, grid, like):
        return [torch.zeros(grid.b, grid.h)]

    def update(self, state, tile):
        state[0] += tile.weights.sum((-1, -2))

    def merge(self, one, other):
        return [torch.cat((one[0], other[0])).sum(0, keepdim=True)]

    def finish(self, state):
        return state[0]


def every_measure(rank: int, ranks: int) -> None:
    """The same numbers on every rank as in one process, by kernels that tell them and by kernels that do not."""
    q, k, v = qkv(2, 4, 2, N, N)
    for mask, scores in (("causal", "alibi"), ("window and sinks", "sinks"), ("documents", "soft cap"),
                         ("nothing for some", "all"), ("dense", "relative")):  # fmt: skip
        for how, layout in (("ring", "zigzag"), ("ring", "contiguous"), ("ulysses", "zigzag")):
            made = MASKS[mask](2, N, N)
            compare(how, q, k, v, mask=made, scores=SCORES[scores], layout=layout, measures=all_measures())
    for how in HOW:
        for kernel in ("torch_blocks", "reference"):
            compare(how, q, k, v, mask=hw.Causal(), scores=SCORES["sinks"], measures=all_measures(), kernel=kernel)


def few_tokens(rank: int, ranks: int) -> None:
    """Fewer tokens than ranks, and cross attention: ranks without a row have no say."""
    for n, m in ((1, 1), (3, 5), (2, 9)):
        q, k, v = qkv(1, 4, 1, n, m)
        for how in HOW:
            compare(how, q, k, v, mask=hw.Causal(), measures=[*MEASURES])


def long_rows(rank: int, ranks: int) -> None:
    """Several blocks of rows and tiles of keys a rank; distances of hundreds, whose variance cancels."""
    q, k, v = qkv(1, 2, 1, 1100, 1100, 4, 4)
    for layout in ("zigzag", "contiguous"):
        compare("ring", q, k, v, mask=hw.Causal(), layout=layout, measures=[*MEASURES])
    far = hw.Causal() & hw.Dense(torch.arange(1100)[:, None] - torch.arange(1100) > 700)
    compare("ring", q, k, v, mask=far, measures=["mean_distance", "distance_variance", "topk_mass"])


def maps_of_a_ring(rank: int, ranks: int) -> None:
    q, k, v = qkv(2, 4, 2, N, N)
    for layout in ("zigzag", "contiguous"):
        for scores in ("sinks", "all"):
            own, whole = compare("ring", q, k, v, mask=hw.Causal(), scores=SCORES[scores], layout=layout)
            assert own.shape == whole.shape
            assert own.measured is None
            held = parallel.Layout(layout, N, ranks).pieces(rank)
            assert own.rows == held
            for amap, rows in zip(own.maps(), held, strict=True):
                close("tile", amap[:], whole[:, :, rows.start : rows.stop], 1e-5)
                both = amap.measure("mean_distance", rows=True).rows["mean_distance"]
                alone = whole.measure("mean_distance", rows=True).rows["mean_distance"]
                close("distances", both, alone[:, :, rows.start : rows.stop], 1e-5)
            close("gathered", own.gather()[:], whole[:], 1e-5)
            later = own.measure("entropy", "received_mass", rows=True)
            close("entropy", later["entropy"], whole.measure("entropy")["entropy"], 1e-5)
            close("received", later["received_mass"], whole.measure("received_mass")["received_mass"], 1e-5)
            rows_alone = whole.measure("entropy", rows=True).rows["entropy"][..., None]
            close("rows", later.rows["entropy"], parallel.shard(rows_alone, layout)[..., 0], 1e-5)
            assert f"rank {rank} of {ranks}" in repr(own)
            assert "entropy" in repr(later)


def pictures_of_a_ring(rank: int, ranks: int) -> None:
    """Squares that begin and end within a rank's rows and pieces of keys; the same on every rank as in one process."""
    q, k, v = qkv(2, 4, 2, N, N)
    for mask, scores in (("causal", "sinks"), ("window and sinks", "alibi"), ("nothing for some", "all"),
                         ("dense", "relative")):  # fmt: skip
        for layout in ("zigzag", "contiguous"):
            own, whole = compare("ring", q, k, v, mask=MASKS[mask](2, N, N), scores=SCORES[scores], layout=layout)
            for size, reduce in ((1, "mean"), (5, "mean"), (6, "max"), (N, "max"), (100, "mean")):
                close(f"pool {size} {reduce}", own.pool(size, reduce), whole.pool(size, reduce), 1e-6)
            for rows, cols, cell in ((slice(None), slice(None), 4), (range(3, 30), range(11, 12), 7),
                                     (range(9, 10), slice(2, None), 1), (slice(5, 36), slice(1, 34), 50)):  # fmt: skip
                one, other = own.pooled(rows, cols, cell), whole.pooled(rows, cols, cell)
                assert torch.equal(one.allowed, other.allowed)
                close("mean", one.mean, other.mean, 1e-6)
                close("largest", one.largest, other.largest, 1e-6)
    q, k, v = qkv(1, 2, 1, 9, 40)  # other tokens than the queries'
    own, whole = compare("ring", q, k, v, mask=hw.Causal())
    close("cross", own.pool(7), whole.pool(7), 1e-6)
    q, k, v = qkv(1, 2, 1, N, N)
    q[0, 1, 20, 0] = torch.nan
    _, whole = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
    _, own = parallel.ring_attend(*(parallel.shard(x) for x in (q, k, v)), mask=hw.Causal(), return_map=True)
    for one, other in zip(*(amap.pooled(slice(None), slice(None), 8) for amap in (own, whole)), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
    own, _ = compare("ring", *qkv(1, 2, 1, 5, 5), mask=hw.Causal())
    raises(hw.ConfigError, "pool(size=0): expected a whole number, size >= 1", own.pool, 0)
    raises(hw.ConfigError, "expected a whole number, cell >= 1", own.pooled, slice(None), slice(None), 0)
    raises(hw.ShapeError, "within 0 to 5", own.pooled, range(2, 7), slice(None), 2)


def maps_of_ulysses(rank: int, ranks: int) -> None:
    q, k, v = qkv(2, 6, 3, N, N)
    own, whole = compare("ulysses", q, k, v, mask=hw.Causal(), scores=SCORES["all"])
    assert own.shape == whole.shape
    close("tile", own.own[:], whole[:, own.heads.start : own.heads.stop], 1e-5)
    close("entropy", own.measure("entropy")["entropy"], whole.measure("entropy")["entropy"], 1e-5)
    assert f"heads {own.heads.start} to" in repr(own)


def measures_that_cannot_be_joined(rank: int, ranks: int) -> None:
    q, k, v = (parallel.shard(x, "contiguous") for x in qkv(1, 4, 2, 11, 11))
    for attend in HOW.values():
        asked = {"return_map": True, "layout": "contiguous"}
        raises(hw.ConfigError, "'opaque' is not a RowMeasure", attend, q, k, v, measures=[Opaque()], **asked)
        raises(
            hw.ConfigError,
            "measure='entropie': did you mean",
            attend,
            q,
            k,
            v,
            measures=["entropie"],
            **asked,
        )
        raises(hw.ConfigError, "requires return_map=True", attend, q, k, v, measures=["entropy"])


CASES = {
    case.__name__: case
    for case in (
        every_measure, few_tokens, long_rows, maps_of_a_ring, pictures_of_a_ring, maps_of_ulysses,
        measures_that_cannot_be_joined,
    )
}  # fmt: skip
