"""Counting baselines are distributions, and are worked out by hand where hands suffice."""

import math

import numpy as np
import pytest
import torch
from baselines import Bigram, Unigram, baseline_losses
from hypothesis import given, strategies as st

from headwise.errors import ConfigError

V = 7
STREAMS = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=30).map(torch.tensor), min_size=1, max_size=3)


@pytest.mark.thorough
@given(STREAMS)
def test_probabilities_sum_to_one_whatever_stands_before(streams: list[torch.Tensor]) -> None:
    bigram = Bigram(streams, V)
    before, token = np.meshgrid(np.arange(V), np.arange(V), indexing="ij")
    p = bigram.probability(before, token)
    assert np.allclose(p.sum(1), 1)
    assert (p > 0).all()
    assert Unigram(streams, V).probabilities.sum() == pytest.approx(1)


def test_numbers_by_hand() -> None:
    # 0 1 0 1 2 | 2: N = 6, three kinds. After 0: 1 twice, one kind. After 1: 0 and 2, two kinds. After 2: nothing,
    # as the second 2 stands in a stream of its own.
    bigram = Bigram([torch.tensor([0, 1, 0, 1, 2]), torch.tensor([2])], V)
    p0 = p1 = p2 = (2 + 3 / 7) / 9
    p3 = (0 + 3 / 7) / 9
    assert bigram.unigram.probabilities[:4] == pytest.approx([p0, p1, p2, p3])

    def after(before: int, token: int) -> float:
        return float(bigram.probability(np.array(before), np.array(token)))

    assert after(0, 1) == pytest.approx((2 + 1 * p1) / 3)
    assert after(0, 3) == pytest.approx((0 + 1 * p3) / 3)
    assert after(1, 2) == pytest.approx((1 + 2 * p2) / 4)
    assert after(2, 2) == pytest.approx(p2)


def test_losses_are_means_over_all_but_the_first_token_of_each_window() -> None:
    train = [torch.tensor([0, 1, 0, 1, 2])]
    windows = torch.tensor([[0, 1, 2], [1, 1, 0]])
    losses = baseline_losses(train, [windows, windows[:1]], V)
    bigram = Bigram(train, V)
    pairs = [(0, 1), (1, 2), (1, 1), (1, 0)]
    each = [-math.log(bigram.probability(np.array(u), np.array(w))) for u, w in pairs]
    assert losses["bigram"] == pytest.approx([sum(each) / 4, sum(each[:2]) / 2])
    each = [-math.log(bigram.unigram.probabilities[w]) for _, w in pairs]
    assert losses["unigram"] == pytest.approx([sum(each) / 4, sum(each[:2]) / 2])


def test_a_chain_is_known_by_its_pairs() -> None:
    chain = torch.arange(5000) % V
    losses = baseline_losses([chain], [chain[:700].reshape(10, 70)], V)
    assert losses["unigram"][0] == pytest.approx(math.log(V), abs=1e-2)
    assert losses["bigram"][0] < 0.01


def test_nothing_to_count_and_foreign_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="no token"):
        Bigram([torch.tensor([], dtype=torch.int64)], V)
    with pytest.raises(ConfigError, match="vocab_size=7"):
        baseline_losses([torch.tensor([0, 7])], [], V)
