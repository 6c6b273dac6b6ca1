"""Small calls with a map that come again: one call of the library, and nothing else is different."""

from collections.abc import Sequence

import pytest
import torch
from samples import MASKS, qkv
from test_prepared_calls import SIZES, WAYS, _picked
from torch import Tensor

from headwise import stats
from headwise.base.run import seeded
from headwise.errors import ConfigError
from headwise.kernels import prepare, use_kernel
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Grid, Mask, Span, Window
from headwise.stats import Measure, SinkMass, resolve

pytestmark = pytest.mark.skipif(
    '_picked() != "cpu"', reason='only calls of the compiled kernel are kept, and "auto" picks another one here'
)
assert _picked
NAMES = (
    "max_logit", "logsumexp", "entropy", "effective_keys", "squared_weights", "top1_mass", "mean_distance",
    "distance_variance", "local_mass", "sink_mass", "previous_mass", "self_mass", "next_mass",
)  # fmt: skip
Given = Sequence[str | Measure]


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    prepare._prepared.clear()


def came_again(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, measures: Given = NAMES) -> bool:
    return prepare.again(q, k, v, mask, None, "auto", measures) is not None


def bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def same(one: tuple[Tensor, AttentionMap], other: tuple[Tensor, AttentionMap]) -> bool:
    """Whether outputs, maps and measures have the same bits."""
    (out, amap), (out_too, amap_too) = one, other
    assert bits(out, out_too)
    assert bits(amap.lse, amap_too.lse)
    assert (amap.kernel, amap.named, amap.refusals) == (amap_too.kernel, amap_too.named, amap_too.refusals)
    if amap.measured is None:
        return amap_too.measured is None
    assert amap_too.measured is not None
    assert list(amap.measured) == list(amap_too.measured)
    assert torch.equal(amap.measured.nonfinite, amap_too.measured.nonfinite)
    for name, state in amap.measured.states.items():
        other_state = amap_too.measured.states[name]
        assert bits(state.total, other_state.total)
        assert torch.equal(state.count, other_state.count)
    return all(bits(x, amap_too.measured[name]) for name, x in amap.measured.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_the_same_bits_as_the_first_time(dtype: torch.dtype, mask: Mask | None, size: tuple[int, ...]) -> None:
    first, second = (qkv(*size, dtype=dtype, seed=seed) for seed in (1, 2))
    whole_way = attend(*second, mask=mask, return_map=True, measures=NAMES)
    prepare._prepared.clear()
    attend(*first, mask=mask, return_map=True, measures=NAMES)
    assert came_again(*second, mask)
    assert same(attend(*second, mask=mask, return_map=True, measures=NAMES), whole_way)
    assert whole_way[1].measured is not None
    assert repr(attend(*second, mask=mask, return_map=True, measures=NAMES)[1].measured) == repr(whole_way[1].measured)


def test_a_map_without_measures_comes_again() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    first = attend(q, k, v, mask=Causal(), return_map=True)
    assert came_again(q, k, v, Causal(), ())
    again = attend(q, k, v, mask=Causal(), return_map=True)
    assert same(again, first)
    assert torch.equal(again[1].to_dense(), first[1].to_dense())


def test_measures_are_part_of_what_a_call_is() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    attend(q, k, v, return_map=True, measures=("entropy", SinkMass(3)))
    assert came_again(q, k, v, None, ["entropy", SinkMass(3)])
    for other in (("entropy",), ("entropy", SinkMass(2)), ("entropy", "sink_mass"), (SinkMass(3), "entropy"), ()):
        assert not came_again(q, k, v, None, other)
    found = attend(q, k, v, return_map=True, measures=["entropy", SinkMass(3)])[1]
    torch.testing.assert_close(found.measured["sink_mass"], found.measure(SinkMass(3))["sink_mass"])


def test_queries_that_are_not_finite_are_counted() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    attend(q, k, v, mask=Window(3), return_map=True, measures=NAMES)
    q[1, 4, 7, 0] = torch.inf
    assert came_again(q, k, v, Window(3))
    again = attend(q, k, v, mask=Window(3), return_map=True, measures=NAMES)
    prepare._prepared.clear()
    assert same(again, attend(q, k, v, mask=Window(3), return_map=True, measures=NAMES))
    assert again[1].measured.nonfinite.sum() == again[1].measured.nonfinite[1, 4] == 1
    assert again[1].measured["max_logit"][1, 4].isnan()


def test_values_that_are_not_finite_go_the_whole_way() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    attend(q, k, v, return_map=True, measures=NAMES)
    v[1, 2, 7, 0] = torch.nan
    assert not came_again(q, k, v)
    found = attend(q, k, v, return_map=True, measures=NAMES)[1]
    assert found.nonfinite_values is not None
    assert found.nonfinite_values[1, 2] == 1


def test_what_a_cache_could_get_wrong_goes_the_whole_way() -> None:
    class Twice(stats.Entropy):
        """Twice the entropy."""

        name, unit, range, source = "twice", "nats", "≥ 0", "here"

        def value(self, total: Tensor, lse: Tensor) -> Tensor:
            return 2 * total

    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    members = torch.arange(23)[None] % 2 == 0
    for measures in (
        ("received_mass",),
        ("topk_mass",),
        ("normalized_entropy",),
        (stats.ClassMass(members),),
        (Twice(),),
    ):
        for _ in range(2):
            found = attend(q, k, v, return_map=True, measures=measures)[1].measured
        assert not came_again(q, k, v, None, measures)
    entropy = attend(q, k, v, return_map=True, measures=("entropy",))[1].measured["entropy"]
    torch.testing.assert_close(found["twice"], 2 * entropy)
    mask = Dense(torch.ones(17, 23, dtype=torch.bool))
    attend(q, k, v, mask=mask, return_map=True)
    assert not came_again(q, k, v, mask, ())
    given = MASKS["documents"](2, 17, 23)
    attend(q, k, v, mask=given, return_map=True)
    assert not came_again(q, k, v, given, ())


def test_arguments_are_checked_as_ever() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    for _ in range(2):
        found = attend(q, k, v, return_map=True, measures=(name for name in ("entropy", "max_logit")))[1]
        assert list(found.measured) == ["entropy", "max_logit"]
        with pytest.raises(ConfigError, match="measure='entropi': did you mean 'entropy'"):
            attend(q, k, v, return_map=True, measures=("entropi",))
        with pytest.raises(ConfigError, match="return_map=True"):
            attend(q, k, v, measures=("entropy", "max_logit"))
    with use_kernel("reference"):
        assert attend(q, k, v, return_map=True, measures=NAMES)[1].kernel == "reference"


def test_gradients_and_dropout_go_the_whole_way() -> None:
    q, k, v = qkv(2, 6, 3, 17, 23, 8, 8)
    attend(q, k, v, return_map=True, measures=NAMES)
    q.requires_grad_()
    out, _ = attend(q, k, v, return_map=True, measures=NAMES)
    out.sum().backward()
    assert q.grad is not None
    with seeded(3), torch.no_grad():
        dropped, _ = attend(q, k, v, return_map=True, measures=NAMES, dropout_p=0.5)
    assert not torch.allclose(dropped, out)


def test_results_do_not_share_memory() -> None:
    first, second = (qkv(2, 6, 3, 17, 23, 8, 8, seed=seed) for seed in (1, 2))
    found = [attend(*given, return_map=True, measures=NAMES)[1] for given in (first, second, second)]
    assert not torch.equal(
        found[1].measured["entropy"], attend(*first, return_map=True, measures=NAMES)[1].measured["entropy"]
    )
    found[1].measured["entropy"].zero_()
    assert found[2].measured["entropy"].abs().sum() > 0
    assert list(found[2].measured) == [measure.name for measure in resolve(NAMES)]


# Those of which a kernel has all that they need across a gap; with another one, a call goes the whole way.
ALONG = tuple(name for name in NAMES if name not in ("distance_variance", "local_mass", "previous_mass", "self_mass"))


def kept() -> int:
    return len(prepare._prepared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 1, 4, 60])
@pytest.mark.parametrize("measures", [(), ("entropy", "max_logit"), ALONG, (SinkMass(3), "mean_distance")])
def test_steps_of_a_cache_that_drops_one_more_token_each_are_one_call(
    measures: Given, start: int, dtype: torch.dtype
) -> None:
    """The end of the gap is a value: results are those of a call that nothing is kept of."""
    for n in (1, 2):
        prepare._prepared.clear()
        for stop in range(start + 1, start + 5):
            q, k, v = qkv(1, 4, 2, n, 64, 16, 16, dtype=dtype, seed=stop)
            again = attend(q, k, v, mask=Causal(), return_map=True, measures=measures, gap=(start, stop))
            decided = dict(prepare._prepared)
            assert kept() == 1
            prepare._prepared.clear()
            whole_way = attend(q, k, v, mask=Causal(), return_map=True, measures=measures, gap=(start, stop))
            assert same(again, whole_way)
            assert again[1].rule.grid == whole_way[1].rule.grid
            assert again[1].rule.grid.gap == (start, stop)
            distances = [amap.measure("mean_distance")["mean_distance"] for _, amap in (again, whole_way)]
            assert bits(*distances)
            prepare._prepared.update(decided)
        assert prepare.again(q, k, v, Causal(), None, "auto", measures, (start, start + 90)) is not None
        assert prepare.again(q, k, v, Causal(), None, "auto", measures, (start + 1, start + 9)) is None
        assert prepare.again(q, k, v, Causal(), None, "auto", measures) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, Causal()], ids=repr)
@pytest.mark.parametrize("measures", [(), ("entropy", "max_logit"), NAMES, (SinkMass(3), "mean_distance")])
def test_decoding_steps_with_another_number_of_keys_are_one_call(
    measures: Given, mask: Mask | None, dtype: torch.dtype
) -> None:
    """But for measures that do not count each query: of the first key, there is no previous one."""
    q, keys, values = qkv(2, 6, 3, 1, 40, 20, 12, dtype=dtype)
    several = measures == NAMES
    for step, m in enumerate((9, 10, 40, 1, 11, 9)):
        for k, v in ((keys[:, :, :m], values[:, :, :m]), (keys[:, :, -m:].clone(), values[:, :, -m:].clone())):
            prepared = dict(prepare._prepared)
            prepare._prepared.clear()
            whole_way = attend(q + step, k, v, mask=mask, return_map=True, measures=measures)
            prepare._prepared.clear()
            prepare._prepared.update(prepared)
            assert came_again(q + step, k, v, mask, measures) or several or not step
            again = attend(q + step, k, v, mask=mask, return_map=True, measures=measures)
            assert same(again, whole_way)
            assert again[1].rule == whole_way[1].rule
            assert bits(again[1][:], whole_way[1][:])
            assert kept() == 1


def test_gaps_are_checked_as_ever() -> None:
    q, k, v = qkv(1, 4, 2, 1, 64, 16, 16)
    attend(q, k, v, return_map=True, gap=(4, 9))
    for gap in ((4, 3), (4, 5, 6), range(4, 9), "49", 4, (4,), [[4], [9]]):
        with pytest.raises(ConfigError, match="gap="):
            attend(q, k, v, return_map=True, gap=gap)  # type: ignore[call-overload]
    assert attend(q, k, v, return_map=True, gap=(4, 4))[1].rule.grid.gap.size == 0


def test_a_measure_whose_statistics_depend_on_the_end_of_the_gap_goes_the_whole_way() -> None:
    q, k, v = qkv(1, 4, 2, 1, 64, 16, 16)
    for stop in (5, 6, 7, 9):  # of the first eight tokens, some are keys after the gap
        _, amap = attend(q, k, v, return_map=True, measures=[SinkMass(8)], gap=(4, stop))
        assert amap.measured is not None
        torch.testing.assert_close(amap.measured["sink_mass"], amap[:, :, 0, : 4 + max(0, 8 - stop)].sum(-1))


def test_a_mask_that_holds_the_gap_is_not_kept() -> None:
    q, k, v = qkv(1, 4, 2, 8, 64, 16, 16)
    mask = Window(70).with_gap(Span(4, 40), Grid(1, 4, 8, 64))
    assert "with_gap" in repr(mask)
    attend(q, k, v, mask=mask, return_map=True, gap=(4, 40))
    assert kept() == 0
