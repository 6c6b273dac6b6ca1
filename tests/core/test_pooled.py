"""States of several measures in one tensor, against those merged and finished one by one."""

import torch

import headwise as hw
from headwise import stats
from headwise.masks import Grid
from headwise.stats.engine import Merging

MEASURES = [stats.MaxLogit(), stats.Entropy(), stats.NormalizedEntropy(), stats.SinkMass(), stats.Top1Mass()]
POOLING = Merging(MEASURES, strict=True)
H, N = 3, 7


def measured(seed, b, mask=None):
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, b, H, N, 5)
    _, amap = hw.attend(q, k, v, mask=mask, return_map=True)
    return amap.measure(*MEASURES)


def one_by_one(*batches):
    """The value of each measure over all entries of all batches, [measures, h]."""
    found = []
    for measure in MEASURES:
        state = measure.start(Grid(1, H, N, N), torch.empty(0))
        for batch in batches:
            state = measure.merge(state, batch.states[measure.name])
        found.append(measure.finish(state)[0])
    return torch.stack(found)


def test_states_are_merged_as_one_by_one():
    masked = hw.Lengths([4, 0], [4, 0])
    one, two, three = measured(0, 1), measured(1, 3), measured(2, 2, masked)
    of = [POOLING.pooled(batch) for batch in (one, two, three)]
    torch.testing.assert_close(of[1].finished(), one_by_one(two), rtol=1e-6, atol=0)
    merged = of[0].merged(of[1]).merged(of[2])
    torch.testing.assert_close(merged.finished(), one_by_one(one, two, three), rtol=1e-6, atol=0)
    assert torch.equal(of[2].numbers[1], torch.full((len(MEASURES), H), 4.0, dtype=torch.float64))


def test_no_rows_change_nothing_and_have_the_value_0():
    pooled = POOLING.pooled(measured(0, 2))
    empty = pooled.empty()
    assert torch.equal(empty.finished(), torch.zeros(len(MEASURES), H))
    merged = empty.merged(pooled)
    assert torch.equal(merged.numbers, pooled.numbers)
    assert torch.equal(POOLING.pooled(measured(0, 0)).numbers, empty.numbers)


def test_many_are_merged_with_the_bits_of_one_after_the_other():
    first, *others = (POOLING.pooled(measured(seed, 1 + seed % 3)) for seed in range(9))
    before, one_by_one = first.numbers.clone(), first
    for other in others:
        one_by_one = one_by_one.merged(other)
    assert torch.equal(first.merged(*others).numbers, one_by_one.numbers)
    assert torch.equal(first.numbers, before)


def test_heads_lie_beside_one_another():
    one, two = POOLING.pooled(measured(0, 2)), POOLING.pooled(measured(1, 1))
    assert torch.equal(one.beside(two).finished(), torch.cat([one.finished(), two.finished()], 1))


def test_measures_that_merge_in_their_own_way_are_not_pooled():
    class Latest(stats.Entropy):
        name = "latest"

        def merge(self, one, other):
            return other

    pooling = Merging([Latest(), stats.Entropy(), stats.ReceivedMass()], strict=True)
    assert pooling.names == ["entropy"]
    assert [measure.name for measure in pooling.others] == ["latest", "received_mass"]
    assert Merging([Latest()], strict=True).pooled(measured(0, 2)) is None


def test_states_that_a_kernel_returned_together_are_those_of_each_measure():
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 2, H, N, 5)
    names = ["sink_mass", "entropy", "max_logit"]
    _, amap = hw.attend(q, k, v, measures=names, return_map=True)
    for chosen in (names, names[:2], names[::-1]):
        totals, counts = amap.measured.stacked(chosen)
        for i, name in enumerate(chosen):
            state = amap.measured.states[name]
            assert torch.equal(totals[i], state.total)
            assert torch.equal(counts[i], state.count)
        assert len(totals) == len(counts) == len(chosen)
