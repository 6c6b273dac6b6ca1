"""The GPU kernel's output and log-sum-exp are those of the formula, whatever the mask, the score, the sizes."""

import pytest
import torch
from formula import error, output, rule, weights
from hypothesis import given, settings, strategies as st
from samples import MASKS, SCORES, qkv
from torch import Tensor
from triton_here import DEVICE, mostly_slow, slow

from headwise.kernels.call import Call
from headwise.kernels.triton_gpu import TritonGPU, plan
from headwise.masks import Causal, Dense, Everything, Lengths, Mask
from headwise.scores import Bias, Score, SoftCap

LIMITS = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def run(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, score: tuple[Score, ...] = (), **options: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, on the CPU."""
    call = Call(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), rule(q, k, mask, score), **options)
    kernel = TritonGPU()
    if reason := kernel.refuse(call):
        assert "would have shape" in reason  # two biases that are small apart and large as one
        pytest.skip(reason)
    result = kernel.run(call)
    return result.out.detach().cpu(), result.lse.cpu()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", [37, 3])
def test_outputs_and_lse_follow_the_formula(name: str, n: int) -> None:
    q, k, v = qkv(h=3, h_kv=1, n=n)
    mask = MASKS[name](2, n, 53)
    p, expected = weights(q, k, mask)
    out, lse = run(q, k, v, mask)
    assert error(out, output(p, v)) <= 2e-6
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", mostly_slow(["causal", "window and sinks", "dense"], "causal", "dense"))
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 2, 1, 131, 149, dtype=dtype)  # a block and a little more, of queries and of keys
    mask = MASKS[name](1, 131, 149)
    p, expected = weights(q, k, mask)
    out, lse = run(q, k, v, mask)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert error(out, output(p, v)) <= LIMITS[dtype]
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", mostly_slow(SCORES, "soft cap", "relative", "bias", "sinks", "all"))
@pytest.mark.parametrize("mask", mostly_slow(["everything", "nothing for some"], "nothing for some"))
@pytest.mark.parametrize("n", [37, 2])
def test_scores_follow_the_formula(name: str, mask: str, n: int) -> None:
    q, k, v = qkv(h=3, h_kv=1, n=n)
    score = SCORES[name](2, 3, n, 53)
    p, expected = weights(q, k, MASKS[mask](2, n, 53), score)
    out, lse = run(q, k, v, MASKS[mask](2, n, 53), score)
    assert error(out, output(p, v)) <= 2e-6
    torch.testing.assert_close(lse.double(), expected.detach(), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("factor", [1e-3, slow(0.1), slow(1.0), 10.0])
def test_a_soft_cap_is_exact_near_0_and_far_out(factor: float) -> None:
    """A score error of ε becomes a weight error of ε, so the cap's tanh must hold float32's precision."""
    q, k, v = qkv(1, 2, 1, 19, 41)
    score = (SoftCap(50.0),)
    q = q * factor * 30
    p, expected = weights(q, k, Everything(), score)
    out, lse = run(q, k, v, Everything(), score)
    torch.testing.assert_close(lse.double(), expected, rtol=3e-7, atol=3e-7)
    assert error(out, output(p, v)) <= 2e-6 + 50 * 2**-24 * min(1.0, factor)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=25)
@given(data=st.data())
def test_any_sizes(data: st.DataObject) -> None:
    group, h_kv = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    n, d, e = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    m = data.draw(st.integers(n, 90))
    q, k, v = qkv(data.draw(st.integers(1, 2)), group * h_kv, h_kv, n, m, d, e, seed=data.draw(st.integers(0, 99)))
    mask = data.draw(st.sampled_from([Everything(), Causal()]))
    p, _ = weights(q, k, mask)
    assert error(run(q, k, v, mask)[0], output(p, v)) <= 2e-6


@pytest.mark.parametrize(("n", "m"), [(1, 1), (17, 17), (64, 64), (65, 97)])
def test_sizes_at_the_edges_of_blocks(n: int, m: int) -> None:
    q, k, v = qkv(1, 2, 1, n, m, 1, 3)
    p, _ = weights(q, k, Causal())
    assert error(run(q, k, v, Causal())[0], output(p, v)) <= 2e-6


@pytest.mark.parametrize(("d", "e"), [(16, 256), slow(256, 16), (129, 65), slow(96, 96)])
def test_head_sizes(d: int, e: int) -> None:
    q, k, v = qkv(1, 2, 1, 33, 47, d, e)
    p, _ = weights(q, k, Causal())
    assert error(run(q, k, v, Causal())[0], output(p, v)) <= 2e-6


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", ["everything", "causal window", "nothing for some", "dense"])
@pytest.mark.parametrize(("split", "m"), [(64, 167), slow(512, 1337)])
def test_decoding_over_split_keys(n: int, name: str, split: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are cut into three ranges, with dark ranges under the window and dark rows under the lengths."""
    monkeypatch.setattr(plan, "SPLIT_KEYS", split)
    q, k, v = qkv(h=4, h_kv=2, n=n, m=m)
    assert plan.splits(m, 4) == 3
    mask = MASKS[name](2, n, m)
    p, expected = weights(q, k, mask)
    out, lse = run(q, k, v, mask)
    assert error(out, output(p, v)) <= 2e-6
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)


def test_decoding_equals_the_last_rows_of_a_full_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SPLIT_KEYS", 64)
    q, k, v = qkv(1, 4, 2, n=40, m=167, d=16)
    score = SCORES["sinks"](1, 4, 40, 167)
    whole, whole_lse = run(q, k, v, Causal(), score)
    for n in (1, 7, 16):
        out, lse = run(q[:, :, -n:], k, v, Causal(), score)
        torch.testing.assert_close(out, whole[:, :, -n:], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, whole_lse[:, :, -n:], rtol=1e-6, atol=1e-6)


def test_rows_that_see_nothing() -> None:
    q, k, v = qkv(h=3, h_kv=1)
    for score in ((), SCORES["sinks"](2, 3, 37, 53)):
        out, lse = run(q, k, v, Lengths([0, 53], [37, 11]), score)
        assert (out[0] == 0).all()
        assert (out[1, :, 11:] == 0).all()
        assert (lse[0] == -torch.inf).all()
        assert torch.isfinite(lse[1, :, :11]).all()
    hidden = torch.zeros(1, 1, 37, 53)
    hidden[:, :, 3] = -torch.inf  # a bias may hide a row too
    out, lse = run(q, k, v, Everything(), (Bias(hidden),))
    assert (out[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == -torch.inf).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("factor", [slow(30.0), 1e4, slow(-1e4)])
@pytest.mark.parametrize("n", [53, 2])
def test_big_logits_stay_exact_to_their_rounding(factor: float, n: int) -> None:
    q, k, v = qkv(h=3, h_kv=1, n=n)
    q = q * factor
    p, expected = weights(q, k, Causal())
    out, lse = run(q, k, v, Causal())
    assert torch.isfinite(out).all()
    # A logit of size s is known to s · 2⁻²⁴ · √d in float32, and its weight so much.
    doubt = float(expected.abs().max()) * 2**-24 * 4
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=doubt)
    limit = 2e-6 + doubt
    assert error(out, output(p, v)) <= limit


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("n", [41, 2])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, slow(torch.inf)])
def test_what_is_not_finite_stays_where_it_is_seen(n: int, where: str, bad: float) -> None:
    q, k, v = qkv(1, 4, 2, n, 41)
    seen = torch.arange(n) + 41 - n >= 40  # the last row alone sees the last key
    clean, _ = run(q, k, v, Causal())
    (k if where == "k" else v)[0, 1, 40, 3] = bad
    out, _ = run(q, k, v, Causal())
    torch.testing.assert_close(out[:, :2], clean[:, :2])
    torch.testing.assert_close(out[:, :, ~seen], clean[:, :, ~seen])
    reached = ~torch.isfinite(out[:, 2:, seen]).any(2)
    if where == "v":
        assert reached[..., 3].all()
        assert not reached[..., [0, 1, 2, 4]].any()
    else:
        assert reached.any()


@pytest.mark.parametrize("n", [53, 3])
def test_any_strides(n: int) -> None:
    q, k, v = qkv(h=3, h_kv=1, n=n)
    plain, _ = run(q, k, v, Causal())
    strange = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in (q, k, v)]
    assert not strange[0].is_contiguous()
    assert torch.equal(run(*strange, Causal())[0], plain)
    wide = torch.cat((k, v), -1)  # keys and values side by side in memory
    assert torch.equal(run(q, wide[..., :8], wide[..., 8:], Causal())[0], plain)
    one = [k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)]
    assert torch.equal(run(q, *one, Causal())[0], run(q, *(x.contiguous() for x in one), Causal())[0])


def test_the_same_call_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SPLIT_KEYS", 64)
    q, k, v = qkv(1, 4, 2, n=53, m=167)
    for n in (53, 2):
        first, second = (run(q[:, :, -n:], k, v, Causal()) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_dropout_repeats_with_its_seed_and_has_its_share() -> None:
    q, k = torch.zeros(1, 2, 64, 4), torch.zeros(1, 1, 128, 4)
    v = torch.eye(128)[None, None]
    for n in (64, 15):
        kept, lse = run(q[:, :, :n], k, v, Everything(), dropout_p=0.25, seed=5)
        assert float((kept > 0).float().mean()) == pytest.approx(0.75, abs=0.02)
        torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / 128 / 0.75))
        torch.testing.assert_close(lse, torch.full_like(lse, 128).log())  # weights before dropout
        assert torch.equal(kept, run(q[:, :, :n], k, v, Everything(), dropout_p=0.25, seed=5)[0])
        for seed in (6, 5 + (1 << 35)):
            assert not torch.equal(kept, run(q[:, :, :n], k, v, Everything(), dropout_p=0.25, seed=seed)[0])
        assert not torch.equal(kept[:, 0], kept[:, 1])  # heads are dropped apart, rows too
        assert not torch.equal(kept[:, :, 0], kept[:, :, 1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: Call(q.double(), k.double(), v.double(), rule(q, k, Causal())), "float64"),
        (lambda q, k, v: Call(q, k, v[:, :, :, :1].expand(-1, -1, -1, 300), rule(q, k, Causal())), "got 300"),
        (lambda q, k, v: Call(q[:, :, :0], k, v, rule(q[:, :, :0], k, Everything())), "no queries"),
        (lambda q, k, v: Call(q.to("meta"), k.to("meta"), v.to("meta"), rule(q, k, Causal())), "got meta"),
        (
            lambda q, k, v: Call(q, k, v, rule(q, k, Lengths([53, 40]) | Dense(torch.ones(37, 53).bool()))),
            None,
        ),
    ],
)
def test_refusals_say_why(call: object, words: str | None) -> None:
    reason = TritonGPU().refuse(call(*(x.to(DEVICE) for x in qkv())))  # type: ignore[operator]
    assert reason is None if words is None else words in str(reason)
