"""Ring attention, Ulysses and models under them, on two ranks and on four; and what needs no ranks at all."""

import random

import pytest
import torch

import cases
import headwise as hw
from headwise import parallel
from headwise.masks import Grid, Span
from headwise.parallel.layout import CHUNKS, Layout, Way
from headwise.parallel.travel import plan, wanted_of_kernels
from headwise.parallel.ulysses import shares
from headwise.rule import Rule
from headwise.stats import resolve


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", cases.CASES)
def test_ranks_together_are_one_process(passed, ranks, case):
    passed("cases", ranks, case)


@pytest.mark.parametrize("kind", CHUNKS)
def test_layouts_hold_each_token_once_and_about_as_many_on_each_rank(kind):
    for ranks in (1, 2, 3, 5, 8):
        for length in (0, 1, ranks, 4 * ranks + 3, 97):
            layout = Layout(kind, length, ranks)
            parts = [layout.pieces(rank) for rank in range(ranks)]
            assert sorted(place for pieces in parts for piece in pieces for place in piece) == list(range(length))
            held = [layout.held(rank) for rank in range(ranks)]
            assert max(held) - min(held) <= CHUNKS[kind]


@pytest.mark.thorough
def test_keys_travel_as_far_as_somebody_needs_them_and_no_farther():
    chance = random.Random(3)
    for _ in range(60):
        ranks, n = chance.randint(1, 6), chance.randint(1, 40)
        mask = chance.choice([hw.Causal(), hw.Window(chance.randint(1, 9)), hw.Causal() & hw.Sinks(3),
                              hw.Documents(torch.arange(n) // 7)])  # fmt: skip
        layout = Layout(chance.choice(list(CHUNKS)), n, ranks)
        made = plan(layout, layout, Way(Rule(mask, 1.0, Grid(1, 1, n, n))))
        dense = mask.to_dense(n, n)[0, 0]
        for source in range(ranks):
            for cols, hops in zip(made.cols(source), made.hops[source], strict=True):
                wants = [
                    hop for hop in range(1, ranks)
                    if any(bool(dense[r.start : r.stop, cols.start : cols.stop].any())
                           for r in made.rows((source + hop) % ranks))
                ]  # fmt: skip
                assert hops == max(wants, default=0)
                for hop in range(1, ranks):
                    assert (cols in made.arriving((source + hop) % ranks, hop)) == (hop <= hops)


@pytest.mark.thorough
def test_heads_are_shared_as_evenly_as_can_be():
    for h in range(1, 25):
        for h_kv in (x for x in range(1, h + 1) if h % x == 0):
            for ranks in range(1, h + 1):
                found = shares(h, h_kv, ranks)
                assert [head for one in found for head in one.queries] == list(range(h))
                counts = [len(one.queries) for one in found]
                assert max(counts) - min(counts) <= 1
                for one in found:
                    keys = [key for key, times in zip(one.keys, one.repeats, strict=True) for _ in range(times)]
                    each = len(one.queries) // len(keys)
                    assert [key for key in keys for _ in range(each)] == [head // (h // h_kv) for head in one.queries]
                    if h_kv % ranks == 0 or ranks % h_kv == 0 == h % ranks:
                        assert set(one.repeats) == {1}  # no key is twice in memory


def test_blocks_that_are_seen_wholly_let_go_of_their_place():
    rule = Rule(hw.Causal(), 1.0, Grid(1, 1, 12, 12))
    x = torch.randn(1, 1, 3, 4)
    assert Way(rule).call(x, x, x, Span(6, 9), Span(0, 3)).rule.is_full()
    assert Way(rule).call(x, x, x, Span(6, 9), Span(0, 3)).rule.grid.at_end
    biased = Rule(hw.Causal(), 1.0, Grid(1, 1, 12, 12), (hw.ALiBi([1.0]),))
    assert Way(biased).call(x, x, x, Span(6, 9), Span(0, 3)).rule.grid.shift == 6


def test_kernels_are_not_asked_what_keys_receive():
    rule = Rule(hw.Causal(), 1.0, Grid(1, 1, 12, 12))
    wanted = resolve(["entropy", "mean_distance", "local_mass", "received_mass"])
    assert [one.name for one in wanted_of_kernels(wanted, rule)] == ["entropy", "distance", "range_mass"]


def test_one_process_alone_is_told():
    q = torch.zeros(1, 2, 3, 4)
    for call in (parallel.ring_attend, parallel.ulysses_attend):
        with pytest.raises(hw.ConfigError, match=r"torch\.distributed is not initialised"):
            call(q, q, q)
    with pytest.raises(hw.ConfigError, match=r"torch\.distributed is not initialised"):
        parallel.sequence_parallel(hw.MultiHeadAttention(8, 2))
