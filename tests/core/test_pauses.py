"""Calls in blocks of queries: the same numbers as in one piece, told of in between, and ended from there."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import headwise as hw
from headwise.kernels import torch_blocks
from headwise.kernels.events import within

MEASURES = ["entropy", "max_logit", "mean_distance", "local_mass", "sink_mass", "previous_mass", "self_mass"]
MASKS = {
    "all": None,
    "causal": hw.Causal(),
    "window": hw.Causal() & (hw.Window(70) | hw.Sinks(3)),
    "lengths": hw.Lengths([150, 201], [201, 90]) & hw.Causal(),
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Blocks of as few rows as there may be."""
    monkeypatch.setattr(torch_blocks, "PAIRS", 1)


def attended(n: int, m: int, mask, kernel: str, score=(), h_kv: int = 2):
    torch.manual_seed(n + m)
    q, k, v = torch.randn(2, 4, n, 8), torch.randn(2, h_kv, m, 8), torch.randn(2, h_kv, m, 6)
    with torch.no_grad():
        return hw.attend(q, k, v, mask=mask, score=score, return_map=True, measures=MEASURES, kernel=kernel)


@pytest.mark.parametrize("kernel", ["auto", "torch_blocks"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("score", [(), "many"], ids=["plain", "scores"])
def test_blocks_are_the_whole(mask, kernel, score):
    if score:
        score = (hw.SoftCap(5.0), hw.ALiBi.standard(4), hw.SinkLogits(torch.randn(4)))
    n = 201
    whole, one = attended(n, n, mask, kernel, score)
    told = []
    with within(progress=lambda _, *at: told.append(at)):
        parts, other = attended(n, n, mask, kernel, score)
    assert told == [(0, n), (64, n), (128, n), (192, n), (n, n)]
    torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6)
    torch.testing.assert_close(other.lse, one.lse, rtol=1e-6, atol=1e-6)
    assert other.kernel == one.kernel
    for name in MEASURES:
        torch.testing.assert_close(other.measured[name], one.measured[name], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(other[1, 3, 70:90], one[1, 3, 70:90], rtol=1e-6, atol=1e-7)


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 300), more=st.integers(0, 80))
def test_queries_at_the_end_of_longer_keys(n, more):
    whole, one = attended(n, n + more, hw.Causal(), "auto")
    with within(progress=lambda *_: None):
        parts, other = attended(n, n + more, hw.Causal(), "auto")
    torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6)
    torch.testing.assert_close(other.measured["entropy"], one.measured["entropy"], rtol=2e-6, atol=2e-6)


def test_statistics_of_keys_and_of_labels():
    n, ids = 200, torch.randint(0, 5, (200,))
    wanted = ["received_mass", hw.stats.DuplicateMass(ids), hw.stats.InductionMass(ids)]
    q, k = torch.randn(2, 2, 4, n, 8)
    with torch.no_grad():
        whole = hw.attend(q, k, k, mask=hw.Causal(), return_map=True, measures=wanted)[1].measured
        with within(progress=lambda *_: None):
            parts = hw.attend(q, k, k, mask=hw.Causal(), return_map=True, measures=wanted)[1].measured
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=2e-6, atol=2e-6)


def test_what_a_look_raises_ends_the_call():
    class Enough(Exception):
        pass

    seen = []

    def look(what: str, rows: int, of: int) -> None:
        seen.append(rows)
        if rows:
            raise Enough

    with pytest.raises(Enough), within(progress=look):
        attended(640, 640, hw.Causal(), "auto")
    assert seen == [0, 64]
    attended(640, 640, hw.Causal(), "auto")
    assert seen == [0, 64]  # nobody looks any more


def test_gradients_and_dropout_are_in_one_piece():
    seen = []
    q = torch.randn(1, 1, 300, 8, requires_grad=True)
    with within(progress=lambda _, *at: seen.append(at)):
        hw.attend(q, q, q).sum().backward()
        with torch.no_grad():
            hw.attend(q, q, q, dropout_p=0.5)
    assert seen == []
    assert torch.isfinite(q.grad).all()


def test_a_kernel_for_whole_matrices_is_left_whole():
    q = torch.randn(1, 2, 300, 8)
    seen = []
    with torch.no_grad(), within(progress=lambda _, *at: seen.append(at)):
        out, amap = hw.attend(q, q, q, mask=hw.Causal(), kernel="torch_fused", return_map=True)
    assert amap.kernel == "torch_fused"
    torch.testing.assert_close(out, hw.attend(q, q, q, mask=hw.Causal(), kernel="reference"), rtol=0, atol=2e-6)
