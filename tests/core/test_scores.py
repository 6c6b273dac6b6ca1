"""Scores are what their formulas say, in every kernel, in the map, and in their gradients."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from samples import FORMULAS_OF_SCORES, MASKS, SCORES, kernels_here, qkv
from torch import Tensor

from headwise.cache import KVCache
from headwise.errors import CheckpointError, ConfigError, DeviceError, DTypeError, KernelError, ShapeError
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Lengths, Mask
from headwise.nn.multi_head import MultiHeadAttention
from headwise.rule.tiles import stream
from headwise.scores import ALiBi, Bias, Relative, RelativeBias, Score, SinkLogits, SoftCap, t5_bias
from headwise.stats import MEASURES

ABLE = [name for name in kernels_here() if name != "torch_fused"]  # it refuses every score
FEW = ("everything", "causal", "window and sinks", "nothing for some", "dense")


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, Frobenius."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


def run(kernel: str, *args: Tensor, **options: object) -> Any:
    """`attend` by that kernel, or skip if it refuses the call."""
    try:
        return attend(*args, kernel=kernel, **options)  # type: ignore[call-overload]
    except KernelError as refusal:
        pytest.skip(str(refusal))


def formulas(score: tuple[Score, ...], scores: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The scores [b, h, n, m] after all of them, the cap first, and the logits of their sinks."""
    n, m = scores.shape[2:]
    positions, sinks = torch.arange(n)[:, None] + m - n, []
    for one in sorted(score, key=lambda one: not isinstance(one, SoftCap)):
        found = FORMULAS_OF_SCORES[type(one)](one, scores, positions, torch.arange(m))
        scores, logits = found if isinstance(found, tuple) else (found, None)
        sinks += [] if logits is None else [logits]
    return scores, sinks


def truth(q: Tensor, k: Tensor, mask: Mask, score: tuple[Score, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [b, h, n, m], log-sum-exp and scores in float64, differentiable, written apart from the library."""
    b, h, n, d = q.shape
    m = k.shape[2]
    scores = torch.einsum("bhnd,bhmd->bhnm", q.double(), k.double().repeat_interleave(h // k.shape[1], 1)) / d**0.5
    scores, sinks = formulas(score, scores)
    allowed = mask.to_dense(n, m, batch=b, heads=h).expand(b, h, n, m)
    parts = torch.where(allowed, scores.exp(), 0.0)
    total = parts.sum(-1)
    for logits in sinks:
        total = total + logits.exp()[:, None] * (total > 0)
    lit = total > 0
    weights = torch.where(lit[..., None], parts / total.where(lit, torch.ones_like(total))[..., None], 0.0)
    return weights, total.log(), scores.masked_fill(~allowed, -torch.inf)


def leaves(score: tuple[Score, ...]) -> list[Tensor]:
    """The parameters that the scores hang on."""
    found = []
    for one in score:
        for x in vars(one).values():
            if isinstance(x, Tensor):
                x.retain_grad()
                found.append(x)
    return found


@pytest.mark.parametrize("kernel", ABLE)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", FEW)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float64, 1e-14)])
def test_outputs_follow_the_formula(kernel: str, name: str, mask: str, dtype: torch.dtype, limit: float) -> None:
    q, k, v = qkv(dtype=dtype)
    which, score = MASKS[mask](2, 37, 53), SCORES[name](2, 6, 37, 53)
    weights, lse, _ = truth(q, k, which, score)
    out, amap = run(kernel, q, k, v, mask=which, score=score, return_map=True)
    assert out.dtype == dtype
    assert error(out, weights @ v.double().repeat_interleave(2, 1)) <= limit
    assert torch.equal(amap.lse == -torch.inf, lse == -torch.inf)
    torch.testing.assert_close(amap.lse.double(), lse, rtol=1e-6, atol=1e-5)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", FEW)
def test_gradients_by_finite_differences(name: str, mask: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2, 4, 2, 6, 7, 3, 2, dtype=torch.float64))
    which, score = MASKS[mask](2, 6, 7), SCORES[name](2, 4, 6, 7)
    given = [x.detach().clone().requires_grad_() for x in leaves(score)]

    def call(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        fresh, made = iter(tensors), []
        for one in score:
            match one:
                case ALiBi():
                    made.append(ALiBi(next(fresh)))
                case RelativeBias():
                    made.append(RelativeBias(next(fresh), one.first))
                case Bias():
                    made.append(Bias(next(fresh)))
                case SinkLogits():
                    made.append(SinkLogits(next(fresh)))
                case _:
                    made.append(one)
        torch.manual_seed(7)
        return attend(q, k, v, mask=which, score=made, kernel="torch_blocks", dropout_p=0.3 if name == "all" else 0.0)

    assert torch.autograd.gradcheck(call, (q, k, v, *given), fast_mode=True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("kernel", ABLE)
def test_gradients_equal_those_of_the_formula(name: str, kernel: str) -> None:
    """In float32, and over several blocks of rows and keys."""
    found = []
    for ours in (True, False):
        q, k, v = (x.requires_grad_() for x in qkv(2, 6, 3, 301, 601, 8, 5))
        mask, score = MASKS["window"](2, 301, 601), SCORES[name](2, 6, 301, 601)
        held = leaves(score)
        if ours:
            out = run(kernel, q, k, v, mask=mask, score=score)
        else:
            out = truth(q, k, mask, score)[0] @ v.double().repeat_interleave(2, 1)
        (out * torch.linspace(-1, 1, 5)).sum().backward()
        found.append([x.grad for x in (q, k, v, *held)])
    for got, expected in zip(*found, strict=True):
        assert got is not None
        # A bias that all keys of a row share has none: the sum of its terms is rounding.
        assert (got.double() - expected).norm() <= 5e-6 * expected.norm() + 1e-6 * got.numel() ** 0.5


def test_only_wanted_gradients_are_made() -> None:
    q, k, v = qkv()
    slopes, logits = torch.rand(6, requires_grad=True), torch.zeros(6)
    attend(q, k, v, score=(ALiBi(slopes), SinkLogits(logits))).sum().backward()
    assert slopes.grad is not None
    assert logits.grad is None
    assert q.grad is None


@pytest.mark.thorough_except(
    "sizes0-cpu", "sizes1-torch_blocks", "sizes2-reference", "sizes4-cpu", "sizes5-torch_blocks"
)
@pytest.mark.parametrize("kernel", [*ABLE, "compiled"])
@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 1), (3, 0), (0, 3), (3, 5)])
def test_gradients_where_no_key_is_seen_are_zero(sizes: tuple[int, int], kernel: str) -> None:
    n, m = sizes
    learned = [torch.ones(2, requires_grad=True), torch.ones(2, 5, requires_grad=True), torch.ones(2)]
    score = ALiBi(learned[0]), RelativeBias(learned[1], -2), SinkLogits(learned[2].requires_grad_())
    q, k, v = torch.randn(1, 2, n, 4), torch.randn(1, 2, m, 4), torch.randn(1, 2, m, 4, requires_grad=True)
    mask = Dense(torch.zeros(n, m, dtype=torch.bool))
    call = torch.compile(run, backend="aot_eager") if kernel == "compiled" else run
    call("auto" if kernel == "compiled" else kernel, q, k, v, mask=mask, score=score).sum().backward()
    for x in (*learned, v):
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert not x.grad.any()


@pytest.mark.thorough
@settings(deadline=None, derandomize=True, max_examples=60)
@given(data=st.data())
def test_random_shapes_equal_pytorch(data: st.DataObject) -> None:
    group, h_kv = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    b, h, n, m = (
        data.draw(st.integers(1, 3)),
        group * h_kv,
        data.draw(st.integers(1, 33)),
        data.draw(st.integers(1, 40)),
    )
    q, k, v = qkv(b, h, h_kv, n, m, 7, 3, seed=data.draw(st.integers(0, 99)))
    score: list[Score] = []
    if data.draw(st.booleans()):
        score.append(ALiBi.standard(h))
    for seed in range(data.draw(st.integers(0, 2))):
        length, first = data.draw(st.integers(1, 9)), data.draw(st.integers(-40, 20))
        rows = data.draw(st.sampled_from([1, h]))
        score.append(RelativeBias(torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)), first))
    for seed in range(data.draw(st.integers(0, 2))):
        shape = [size if data.draw(st.booleans()) else 1 for size in (b, h, n, m)]
        score.append(Bias(torch.randn(shape, generator=torch.Generator().manual_seed(seed))))
    added, _ = formulas(tuple(score), torch.zeros(b, h, n, m, dtype=torch.float64))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=added, enable_gqa=True)
    assert error(attend(q, k, v, score=score), expected) <= 2e-6


# Others' formulas


def test_sinks_as_gpt_oss_computes_them() -> None:
    q, k, v = qkv(h_kv=6)
    sinks = torch.linspace(-2, 3, 6)
    logits = (q @ k.mT / math.sqrt(8)).masked_fill(~Causal().to_dense(37, 53), -torch.inf)
    joined = torch.cat((logits, sinks.view(1, 6, 1, 1).expand(2, 6, 37, 1)), -1)
    joined = joined - joined.max(-1, keepdim=True).values
    weights = joined.softmax(-1)[..., :-1]
    torch.testing.assert_close(attend(q, k, v, mask=Causal(), score=SinkLogits(sinks)), weights @ v)


def test_soft_cap_as_gemma_computes_it() -> None:
    q, k, v = qkv(h_kv=6)
    q = q * 30
    logits = q @ k.mT * 0.3
    logits = torch.tanh(logits / 50.0) * 50.0
    logits = logits + torch.where(Causal().to_dense(37, 53), 0.0, torch.finfo(torch.float32).min)
    out = attend(q, k, v, mask=Causal(), scale=0.3, score=SoftCap(50.0))
    torch.testing.assert_close(out, logits.softmax(-1) @ v, rtol=1e-4, atol=1e-5)


def t5_bucket(relative: Tensor, bidirectional: bool, buckets: int, longest: int) -> Tensor:
    """The bucket of key − query, step by step as the T5 code has it."""
    result = torch.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        result += (relative > 0).long() * buckets
        relative = relative.abs()
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    exact = buckets // 2
    large = exact + (
        torch.log(relative.float() / exact) / math.log(longest / exact) * (buckets - exact)
    ).clamp(-1e9, 1e9).long()  # fmt: skip
    large = torch.min(large, torch.full_like(large, buckets - 1))
    return result + torch.where(relative < exact, relative, large)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (10, 11), (64, 700), (6, 1000)])
def test_bias_is_that_of_t5(bidirectional: bool, buckets: int, longest: int) -> None:
    weight = torch.randn(buckets, 4, requires_grad=True)
    n, m = 900, 1100
    offset = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    expected = weight[t5_bucket(offset, bidirectional, buckets, longest)].permute(2, 0, 1)
    bias = t5_bias(weight, bidirectional=bidirectional, max_distance=longest)
    got = bias.values[:, (offset - bias.first).clamp(0, bias.values.shape[1] - 1)]
    assert torch.equal(got, expected)
    got.sum().backward()
    assert weight.grad is not None
    assert int(weight.grad.sum()) == 4 * n * m


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_narrow_embedding_of_t5_are_summed_before_they_are_rounded(dtype: torch.dtype) -> None:
    q, k, v = qkv()
    weight = torch.randn(10, 6, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = []
    for one in (weight.requires_grad_(), weight.detach().float().requires_grad_()):
        attend(q, k, v, score=t5_bias(one, bidirectional=True, max_distance=41)).square().sum().backward()
        found.append(one.grad)
    assert torch.equal(found[0], found[1].to(dtype))


def test_slopes_of_alibi_are_the_papers() -> None:
    assert ALiBi.standard(8).slopes.tolist() == [2.0**-i for i in range(1, 9)]
    assert ALiBi.standard(1).slopes.tolist() == [2.0**-8]
    twelve = ALiBi.standard(12).slopes
    assert torch.equal(twelve[:8], ALiBi.standard(8).slopes)
    torch.testing.assert_close(twelve[8:], torch.tensor([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]))
    for heads in range(1, 70):
        slopes = ALiBi.standard(heads).slopes
        assert slopes.shape == (heads,)
        assert len(set(slopes.tolist())) == heads


def test_alibi_under_a_causal_mask_is_a_bias_by_key_alone() -> None:
    """As BLOOM adds it: the softmax does not see what all keys of a row share."""
    q, k, v = qkv()
    alibi = ALiBi.standard(6)
    by_key = Bias((alibi.slopes[:, None] * torch.arange(53))[None, :, None])
    torch.testing.assert_close(
        attend(q, k, v, mask=Causal(), score=alibi), attend(q, k, v, mask=Causal(), score=by_key)
    )


# Rows that see nothing, infinities, large numbers


@pytest.mark.parametrize("kernel", ABLE)
@pytest.mark.parametrize("sink", [0.0, -torch.inf])
def test_rows_that_see_nothing_are_zero_with_sinks_too(kernel: str, sink: float) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    logits = torch.full((6,), sink, requires_grad=True)
    mask = Lengths([0, 53], [37, 11])
    out, amap = run(kernel, q, k, v, mask=mask, score=SinkLogits(logits), return_map=True)
    assert (out[0] == 0).all()
    assert (out[1, :, 11:] == 0).all()
    assert (amap.lse[0] == -torch.inf).all()
    assert torch.isfinite(amap.lse[1, :, :11]).all()
    out.square().sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad != 0).all() == (sink == 0.0)
    assert all((x.grad[0] == 0).all() for x in (q, k, v))  # type: ignore[index]


@pytest.mark.parametrize("kernel", ABLE)
def test_a_sink_may_take_all_or_nothing(kernel: str) -> None:
    q, k, v = qkv()
    assert (run(kernel, q, k, v, score=SinkLogits(torch.full((6,), 1e4))) == 0).all()
    for none in (-1e4, -torch.inf):
        torch.testing.assert_close(run(kernel, q, k, v, score=SinkLogits(torch.full((6,), none))), run(kernel, q, k, v))


@pytest.mark.parametrize("kernel", ABLE)
def test_minus_infinity_in_a_bias_hides_a_key_as_a_mask_does(kernel: str) -> None:
    q, k, v = qkv()
    boolean = torch.rand(37, 53, generator=torch.Generator().manual_seed(1)) > 0.6
    boolean[5] = False
    bias = Bias(torch.where(boolean, 0.0, -torch.inf)[None, None].requires_grad_())
    out, amap = run(kernel, q, k, v, score=bias, return_map=True)
    expected, other = run(kernel, q, k, v, mask=Dense(boolean), return_map=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(amap.to_dense(), other.to_dense())
    for name in ("entropy", "max_logit", "mean_distance", "top1_mass"):
        torch.testing.assert_close(amap.measure(name)[name], other.measure(name)[name], msg=name)


@pytest.mark.parametrize("kernel", ABLE)
def test_a_cap_holds_logits_of_any_size(kernel: str) -> None:
    q, k, v = qkv()
    out, amap = run(kernel, q * 1e8, k, v, score=SoftCap(5.0), return_map=True)
    assert torch.isfinite(out).all()
    assert float(amap.measure("max_logit")["max_logit"].max()) == pytest.approx(5.0)


# The map


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", FEW)
def test_the_map_holds_the_weights_of_the_formula(name: str, mask: str, tmp_path: Path) -> None:
    q, k, v = qkv()
    which, score = MASKS[mask](2, 37, 53), SCORES[name](2, 6, 37, 53)
    _, amap = attend(q, k, v, mask=which, score=score, return_map=True)
    weights = truth(q, k, which, score)[0].detach()

    def same(got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=1e-6)

    same(amap.to_dense(), weights)
    same(amap[1, 4:1:-2, 3::7, -1:5:-4], torch.from_numpy(weights.numpy()[1, 4:1:-2, 3::7, -1:5:-4].copy()))
    same(amap.head(1, 4).to_dense()[0, 0], weights[1, 4])
    same(amap @ v, weights @ v.double().repeat_interleave(2, 1))
    same(amap.T @ torch.ones(37, 1), weights.sum(2)[..., None])
    same(amap.topk(5)[0], weights.topk(5).values)
    same(amap.pool(53, "max"), weights)
    amap.save(tmp_path / "map.safetensors")
    again = AttentionMap.load(tmp_path / "map.safetensors")
    assert torch.equal(again.to_dense(), amap.to_dense())
    assert repr(again.rule.scores) == repr(amap.rule.scores)
    assert type(score[0]).__name__ in repr(amap)


@pytest.mark.thorough
def test_the_map_over_many_tiles() -> None:
    q, k, v = qkv(1, 4, 2, 700, 900, 8, 4)
    mask, score = MASKS["window and sinks"](1, 700, 900), SCORES["all"](1, 4, 700, 900)
    _, amap = attend(q, k, v, mask=mask, score=score, return_map=True)
    weights, _, scores = truth(q, k, mask, score)
    torch.testing.assert_close((amap @ v).double(), weights @ v.double().repeat_interleave(2, 1), rtol=1e-5, atol=1e-6)
    for tile in stream(amap.q, amap.k, amap.lse, amap.rule):
        here = (..., slice(*tile.rows), slice(*tile.cols))
        torch.testing.assert_close(tile.logits.double(), scores[here], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tile.weights.double(), weights[here], rtol=2e-5, atol=1e-7)


def test_the_map_keeps_its_numbers_when_training_goes_on() -> None:
    q, k, v = qkv()
    params = [torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(1, 6, 37, 53))]
    _, amap = attend(q, k, v, score=(SinkLogits(params[0]), Bias(params[1][:, :, :, :])), return_map=True)
    before = amap.to_dense()
    with torch.no_grad():
        for p in params:
            p.add_(torch.arange(p.numel()).view_as(p))
    assert torch.equal(amap.to_dense(), before)
    assert not any(x.requires_grad for score in amap.rule.scores for x in vars(score).values())


@pytest.mark.parametrize("name", ["soft cap", "t5", "sinks", "all"])
@pytest.mark.parametrize("mask", ["everything", "causal", "nothing for some"])
def test_measures_with_scores(name: str, mask: str) -> None:
    q, k, v = qkv()
    which, score = MASKS[mask](2, 37, 53), SCORES[name](2, 6, 37, 53)
    _, amap = attend(q, k, v, mask=which, score=score, return_map=True)
    weights, lse, scores = truth(q, k, which, score)
    lit = lse > -torch.inf
    distance = (torch.arange(37)[:, None] + 16 - torch.arange(53)).abs().double()

    def mean(rows: Tensor) -> Tensor:
        return torch.where(lit, rows, 0.0).sum(-1) / lit.sum(-1).clamp_min(1)

    formulas = {
        "entropy": mean(torch.special.entr(weights).sum(-1)),
        "max_logit": scores.flatten(2).amax(-1).nan_to_num(neginf=0.0),
        "logsumexp": mean(lse),
        "top1_mass": mean(weights.amax(-1)),
        "effective_keys": mean(weights.sum(-1).square() / weights.square().sum(-1).clamp_min(1e-300)),
        "learned_sink_mass": mean(1 - weights.sum(-1)),
        "mean_distance": mean((weights * distance).sum(-1)),
        "sink_mass": mean(weights[..., 0]),
    }
    got = amap.measure(*formulas)
    for which_one, expected in formulas.items():
        torch.testing.assert_close(got[which_one].double(), expected.detach(), rtol=1e-5, atol=1e-6, msg=which_one)
    assert set(formulas) <= set(MEASURES)


def test_a_sink_that_takes_all_leaves_the_keys_as_many() -> None:
    q, k, v = qkv()
    _, amap = attend(q, k, v, score=SinkLogits([1e4] * 6), return_map=True)
    _, without = attend(q, k, v, return_map=True)
    got = amap.measure("effective_keys", "learned_sink_mass", "entropy")
    assert (got["learned_sink_mass"] == 1).all()
    torch.testing.assert_close(got["effective_keys"], without.measure("effective_keys")["effective_keys"])
    assert (got["entropy"] == 0).all()


# In a layer


def test_a_layer_hands_its_scores_on() -> None:
    layer = MultiHeadAttention(24, 6, num_kv_heads=3)
    x = torch.randn(2, 19, 24)
    sinks = torch.zeros(6, requires_grad=True)
    score = (ALiBi.standard(6), SinkLogits(sinks))
    y, amap, concat = layer(x, mask=Causal(), score=score, return_map=True, return_concat=True)
    assert [type(one) for one in amap.rule.scores] == [ALiBi, SinkLogits]
    q, k, v = layer.project(x, x)
    expected = attend(q, k, v, mask=Causal(), score=score)
    torch.testing.assert_close(concat, expected.transpose(1, 2).flatten(2))
    y.sum().backward()
    assert sinks.grad is not None
    assert (sinks.grad != 0).all()


def test_biases_by_distance_follow_the_positions_of_a_cache() -> None:
    layer, x = MultiHeadAttention(24, 6), torch.randn(2, 9, 24)
    score = (ALiBi.standard(6), RelativeBias(torch.randn(6, 5), -4))
    whole = layer(x, mask=Causal(), score=score)
    cache = KVCache()
    parts = [layer(part, mask=Causal(), score=score, cache=cache) for part in x.split((4, 1, 3, 1), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-6)


# At the door


def test_the_order_in_the_tuple_does_not_matter() -> None:
    q, k, v = qkv(dtype=torch.float64)
    score = (SinkLogits(torch.randn(6)), ALiBi.standard(6), SoftCap(2.0))
    expected = attend(q, k, v, score=score)
    for order in itertools.permutations(score):
        torch.testing.assert_close(attend(q, k, v, score=order), expected)


def test_one_score_needs_no_tuple_and_none_changes_no_bit() -> None:
    q, k, v = qkv()
    assert torch.equal(attend(q, k, v, score=SoftCap(2.0)), attend(q, k, v, score=[SoftCap(2.0)]))
    assert torch.equal(attend(q, k, v, score=()), attend(q, k, v))


def test_a_kernel_that_knows_no_scores_says_so() -> None:
    q, k, v = qkv(e=8)
    with pytest.raises(KernelError, match=r"not support the scores.*SoftCap\(cap=9.0\)"):
        attend(q, k, v, score=SoftCap(9.0), kernel="torch_fused")


def test_training_with_scores_takes_no_square_of_memory() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 1500, 1500, 8, 8))
    weight = torch.randn(32, 2, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):  # type: ignore[func-returns-value]
        score = (ALiBi.standard(2), t5_bias(weight, bidirectional=True), SinkLogits(torch.zeros(2)), SoftCap(9.0))
        attend(q, k, v, mask=Causal(), score=score)
    assert 0 < sum(saved) <= 10 * q.numel()


def test_a_bias_by_distance_of_ones_own() -> None:
    class Decay(Relative):
        holds = {}

        def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
            return (offset.abs() + 1).to(dtype).log().neg()[None]

    q, k, v = qkv()
    distance = (torch.arange(37)[:, None] + 16 - torch.arange(53)).abs()
    expected = attend(q, k, v, score=Bias(-(distance + 1.0).log()[None, None]))
    out, amap = attend(q, k, v, score=Decay(), return_map=True)
    torch.testing.assert_close(out, expected)
    with pytest.raises(CheckpointError, match="Decay"):
        amap.save("/nowhere/map.safetensors")


Q, K, V = qkv()


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: SoftCap(0.0), ConfigError, ["SoftCap(0.0)", "> 0"]),
        (lambda: SoftCap(math.nan), ConfigError, ["SoftCap(nan)"]),
        (lambda: SoftCap(30.0) and 30.0, DTypeError, ["score:", "30.0", "SoftCap"]),
        (lambda: [SoftCap(30.0), None], DTypeError, ["score:", "None"]),
        (lambda: (SoftCap(3.0), SoftCap(4.0)), ConfigError, ["two of SoftCap"]),
        (lambda: (SinkLogits([0.0] * 6),) * 2, ConfigError, ["two of SinkLogits"]),
        (lambda: (ALiBi.standard(6), SoftCap(1.0), ALiBi.standard(6)), ConfigError, ["two of ALiBi"]),
        (lambda: ALiBi.standard(0), ConfigError, ["standard(0)"]),
        (lambda: ALiBi.standard(3), ShapeError, ["3 slopes", "6 heads"]),
        (lambda: ALiBi(torch.ones(6).int()), DTypeError, ["slopes", "torch.int32"]),
        (lambda: ALiBi(torch.ones(1, 6)), ShapeError, ["slopes", "(1, 6)"]),
        (lambda: SinkLogits(torch.ones(7)), ShapeError, ["7 logits", "6 heads"]),
        (lambda: SinkLogits(torch.ones(6, device="meta")), DeviceError, ["SinkLogits", "meta", "cpu"]),
        (lambda: RelativeBias(torch.ones(2, 5), 0), ShapeError, ["(2, 5)", "(6 or 1, L)"]),
        (lambda: RelativeBias(torch.ones(1, 0), 0), ShapeError, ["(1, 0)"]),
        (lambda: RelativeBias(torch.ones(5), 0), ShapeError, ["(5,)", "2 dimensions"]),
        (lambda: Bias(torch.ones(2, 6, 37, 52)), ShapeError, ["(2, 6, 37, 52)", "53 or 1"]),
        (lambda: Bias(torch.ones(37, 53)), ShapeError, ["(37, 53)", "4 dimensions"]),
        (lambda: Bias(torch.ones(2, 6, 37, 53).bool()), DTypeError, ["Bias", "torch.bool"]),
        (lambda: Bias(torch.ones(1, 1, 1, 53, device="meta")), DeviceError, ["Bias", "meta"]),
        (lambda: t5_bias(torch.ones(7, 6), bidirectional=True), ConfigError, ["t5_bias", "(7, 6)", "divisible by 2"]),
        (lambda: t5_bias(torch.ones(32, 6), bidirectional=True, max_distance=8), ConfigError, ["max_distance > 8"]),
    ],
)
def test_bad_scores_are_named(make: object, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        attend(Q, K, V, score=make())  # type: ignore[operator]
    assert all(word in str(caught.value) for word in words), str(caught.value)


class OtherSinks(SinkLogits):
    """A score of somebody's own with sinks too."""


def test_two_scores_with_sinks_add_their_weights() -> None:
    q, k, v = qkv()
    one, other = torch.randn(2, 6, generator=torch.Generator().manual_seed(2))
    both = attend(q, k, v, score=(SinkLogits(one), OtherSinks(other)))
    torch.testing.assert_close(both, attend(q, k, v, score=SinkLogits(torch.logaddexp(one, other))))
    assert not torch.allclose(both, attend(q, k, v, score=SinkLogits(torch.maximum(one, other))))
