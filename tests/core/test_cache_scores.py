"""Scores of positions with caches that drop tokens: a step is the rows of a full pass, also across the gap.

SlidingCache(4, sinks=2), the 11th token:   0 1 . . . . . 7 8 9 10      keys 0 and 1 are at the distances 10 and 9
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.analysis.head_roles.tally import Sight, key_weights
from headwise.cache import BudgetCache, KVCache, SlidingCache
from headwise.errors import ConfigError, KernelError, ShapeError
from headwise.fields import Array, inside
from headwise.map import AttentionMap
from headwise.masks import Grid, Mask, Span
from headwise.scores import Score, Terms, WithGap, t5_bias

HEADS, TOKENS = 4, 29
CACHES: dict[str, Callable[[], SlidingCache | BudgetCache]] = {
    "sliding": lambda: SlidingCache(5, sinks=2),
    "without sinks": lambda: SlidingCache(5),
    "equal budgets": lambda: BudgetCache([5, 5], sinks=3),
    "budgets": lambda: BudgetCache([3, 7], sinks=2),
    "a budget without limit": lambda: BudgetCache([3, None], sinks=2),
}
STEPS = {"steps": [1] * TOKENS, "chunks": [2, 7, 1, 1, 5, 1, 3, 9]}


def random(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Float64 leaves: scores are made anew where gradients are compared.
SCORES: dict[str, Callable[[], tuple[Score, ...]]] = {
    "alibi": lambda: (hw.ALiBi(random(HEADS).abs().requires_grad_()),),
    "relative": lambda: (hw.RelativeBias(random(HEADS, 33).requires_grad_(), -28),),
    "a short table": lambda: (hw.RelativeBias(random(1, 6).requires_grad_(), -4),),
    "t5": lambda: (t5_bias(random(12, HEADS).requires_grad_(), bidirectional=False, max_distance=23),),
    "several": lambda: (
        hw.ALiBi(random(HEADS).abs().requires_grad_()), hw.RelativeBias(random(1, 3).requires_grad_(), -2),
        hw.RelativeBias(random(HEADS, 19, seed=3).requires_grad_(), -17), hw.SoftCap(2.0),
        hw.SinkLogits(random(HEADS, seed=5).requires_grad_()),
    ),
}  # fmt: skip


def layer_and(dtype: torch.dtype = torch.float64) -> tuple[hw.MultiHeadAttention, Tensor]:
    torch.manual_seed(0)
    return hw.MultiHeadAttention(24, HEADS, num_kv_heads=2).to(dtype), random(2, TOKENS, 24).to(dtype)


def limits(cache: SlidingCache | BudgetCache) -> Mask:
    """The mask with which a full pass is what the cache's steps are."""
    if isinstance(cache, BudgetCache):
        return hw.Causal() & cache.mask(HEADS)
    return hw.Causal() & (hw.Window(cache.window) | hw.Sinks(cache.sinks))


def leaves(scores: tuple[Score, ...]) -> list[Tensor]:
    tensors = [x for score in scores for one in inside(score) for x in vars(one).values() if isinstance(x, Tensor)]
    for x in tensors:
        x.retain_grad()
    return tensors


@pytest.mark.thorough_except("steps-alibi-sliding", "chunks-several-budgets", "chunks-relative-sliding")
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("steps", STEPS)
def test_steps_are_rows_of_a_full_pass(steps: str, name: str, kind: str) -> None:
    layer, x = layer_and()
    cache, score = CACHES[kind](), SCORES[name]()
    with torch.no_grad():
        expected = layer(x, mask=limits(cache), score=score)
        found = [layer(part, mask=hw.Causal(), cache=cache, score=score) for part in x.split(STEPS[steps], 1)]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("stored", [None, "int8"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_in_other_dtypes_and_with_quantized_keys(dtype: torch.dtype, limit: float, stored: str | None) -> None:
    layer, x = layer_and(dtype)
    score = SCORES["several"]()
    full, cache = KVCache(stored=stored), SlidingCache(5, 2, stored=stored)
    with torch.no_grad():
        expected = layer(x, mask=limits(cache), cache=full, score=score)
        found = [layer(part, mask=hw.Causal(), cache=cache, score=score) for part in x.split(STEPS["chunks"], 1)]
    assert float((torch.cat(found, 1) - expected).norm() / expected.norm()) < limit


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", SCORES)
def test_gradients_of_scores_across_a_gap(name: str) -> None:
    found = []
    for by_steps in (True, False):
        layer, x = layer_and()
        score, cache = SCORES[name](), SlidingCache(5, sinks=2)
        held = leaves(score)
        if by_steps:
            parts = x.split(STEPS["chunks"], 1)
            y = torch.cat([layer(part, mask=hw.Causal(), cache=cache, score=score) for part in parts], 1)
        else:
            y = layer(x, mask=limits(cache), score=score)
        y.square().sum().backward()
        found.append([x.grad for x in (*layer.parameters(), *held)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


GAP, KEYS = Span(3, 14), 37
KERNELS = [name for name in hw.kernels.KERNELS if name != "torch_fused"]  # it has no scores


def without_gap(x: Tensor, axis: int) -> Tensor:
    return torch.cat((x.narrow(axis, 0, GAP.start), x.narrow(axis, GAP.stop, KEYS - GAP.stop)), axis)


def exact(score: tuple[Score, ...], *qkv: Tensor, mask: Mask) -> tuple[Tensor, AttentionMap]:
    """In float64, with the keys of the gap, which are masked."""
    outside = torch.ones(qkv[0].shape[2], KEYS, dtype=torch.bool)
    outside[:, GAP.start : GAP.stop] = False
    q, k, v = (x.double() for x in qkv)
    mask = mask & hw.Dense(outside[None, None])
    return hw.attend(q, k, v, mask=mask, score=score, kernel="reference", return_map=True)


@pytest.mark.thorough_except("relative-1-cpu")
@pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("name", SCORES)
def test_every_kernel_and_map_has_distances_across_a_gap(name: str, n: int, kernel: str, tmp_path: Path) -> None:
    sizes = (2, HEADS, n, 6), (2, 2, KEYS, 6), (2, 2, KEYS, 5)
    q, k, v = (random(*size, seed=at).float() for at, size in enumerate(sizes))
    mask, score, other = hw.Causal() & (hw.Window(19) | hw.Sinks(3)), SCORES[name](), SCORES[name]()
    held, others = leaves(score), leaves(other)
    expected, full = exact(other, q, k, v, mask=mask)
    weights = without_gap(full.to_dense(), 3)

    m = KEYS - (GAP.stop - GAP.start)
    grid = Grid(2, HEADS, n, m)
    rest = tuple(one.with_gap(GAP, grid) for one in score)
    k, v = without_gap(k, 2), without_gap(v, 2)
    try:
        out, amap = hw.attend(q, k, v, mask=mask.with_gap(GAP, grid), score=rest, kernel=kernel, return_map=True)
    except KernelError as refusal:
        assert kernel not in ("auto", "torch_blocks", "reference")
        pytest.skip(str(refusal))

    def same(got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got.double(), wanted.double(), rtol=2e-5, atol=3e-6)

    same(out, expected)
    out.double().square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(held, others, strict=True):
        same(x.grad, y.grad)
    same(amap.to_dense(), weights)
    picked = torch.from_numpy(weights.numpy()[1, 3:0:-2, ::2, -1:5:-4].copy())
    same(amap[1, 3:0:-2, ::2, -1:5:-4], picked)
    same(amap.head(1, 2).to_dense()[0, 0], weights[1, 2])
    same(amap @ v, weights @ v.double().repeat_interleave(2, 1))
    same(amap.T @ torch.ones(n, 1), weights.sum(2)[..., None])
    same(amap.topk(3)[0], weights.topk(3).values)
    same(amap.pool(m, "max"), weights)
    for key in (1, m - 9):
        same(key_weights(amap, Sight(amap.rule), torch.tensor([key])), weights[..., key])
    for measure in ("entropy", "max_logit", "logsumexp", "effective_keys", "top1_mass", "learned_sink_mass"):
        same(amap.using("auto").measure(measure)[measure], full.measure(measure)[measure])
    amap.save(tmp_path / "map.safetensors")
    again = AttentionMap.load(tmp_path / "map.safetensors")
    same(again.to_dense(), weights)
    assert repr(again.rule.scores) == repr(amap.rule.scores)


@pytest.mark.parametrize("kernel", ["cpu", "torch_blocks"])
def test_a_bias_of_many_numbers_is_refused(kernel: str) -> None:
    """Memory beside inputs and output is that of one tile at most."""
    q, k = random(1, HEADS, 500, 4).float(), random(1, 2, 600, 4).float()
    score = hw.RelativeBias(random(HEADS, 700).float(), -699).with_gap(GAP, Grid(1, HEADS, 500, 600))
    if kernel == "torch_blocks":
        assert hw.attend(q, k, k, mask=hw.Causal(), score=score, return_map=True)[1].kernel == kernel
        return
    message = r"distances with a gap before key 3 would be a bias of shape \(1, 4, 500, 600\)"
    with pytest.raises(KernelError, match=message):
        hw.attend(q, k, k, mask=hw.Causal(), score=score, kernel=kernel)
    narrow = hw.ALiBi.standard(HEADS).with_gap(GAP, Grid(1, HEADS, 500, 600))
    assert hw.attend(q, k, k, mask=hw.Causal(), score=narrow, kernel=kernel).isfinite().all()


class ByPosition(Score):
    """A score of its own that depends on positions otherwise than by distance, with numbers of all keys."""

    placed = True
    holds = {"values": Array("m"), "wide": Array("hn")}

    def __init__(self, values: Tensor, wide: Tensor) -> None:
        self.values, self.wide = values, wide

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        of_pairs = self.values.to(like) * (grid.positions()[:, None] - torch.arange(grid.m)).to(like).square()
        return Terms(grid.n, biases=(of_pairs[None, None], self.wide.to(like)[None, ..., None]))


def _added(score: Score, grid: Grid) -> Tensor:
    terms = score.terms(grid, torch.empty(0, dtype=torch.float64))
    return sum(terms.added_at(torch.arange(grid.n), torch.arange(grid.m)), torch.zeros(*grid, dtype=torch.float64))


OWN: dict[str, Callable[[], tuple[Score, ...]]] = {
    "own": lambda: (ByPosition(random(KEYS), random(HEADS, 7)),), "soft cap": lambda: (hw.SoftCap(3.0),),
    "bias": lambda: (hw.Bias(random(1, HEADS, 7, KEYS)),), "bias of queries": lambda: (hw.Bias(random(1, 1, 7, 1)),),
}  # fmt: skip


@pytest.mark.parametrize("gap", [GAP, Span(1, 30), Span(5, 6), Span(0, 14)], ids=str)
@pytest.mark.parametrize("name", [*SCORES, *OWN])
def test_a_score_with_a_gap_is_the_score_without_those_keys(name: str, gap: Span) -> None:
    count, rest = gap.stop - gap.start, [j for j in range(KEYS) if j not in range(*gap)]
    grid = Grid(2, HEADS, 7, KEYS - count)
    for score in {**SCORES, **OWN}[name]():
        found = score.with_gap(gap, grid)
        found.check(grid, torch.device("cpu"))
        expected = _added(score, Grid(2, HEADS, 7, KEYS))[..., rest]
        torch.testing.assert_close(_added(found, grid), expected, rtol=1e-14, atol=1e-14)


def test_what_no_gap_changes_stays_the_same_object() -> None:
    grid = Grid(1, HEADS, 7, 26)  # the keys before the gap are at distances of 17 and more
    for score in (
        hw.RelativeBias(random(HEADS, 16), -17), hw.SoftCap(2.0), hw.SinkLogits(random(HEADS)),
        hw.Bias(random(1, 1, 7, 26)),
    ):  # fmt: skip
        assert score.with_gap(GAP, grid) is score
    assert isinstance(hw.RelativeBias(random(HEADS, 17), -18).with_gap(GAP, grid), WithGap)
    assert hw.ALiBi.standard(HEADS).with_gap(Span(0, 11), grid).__class__ is hw.ALiBi


def test_wrong_gaps_and_scores() -> None:
    q, grid = random(1, HEADS, 7, 4), Grid(1, HEADS, 7, 9)
    with pytest.raises(ConfigError, match="score: two of ALiBi; expected at most one"):
        hw.attend(q, q, q, score=(hw.ALiBi.standard(HEADS), WithGap(hw.ALiBi.standard(HEADS), 0, 3)))
    with pytest.raises(ShapeError, match=r"5 slopes for 4 heads"):
        hw.attend(q, q, q, score=WithGap(hw.ALiBi.standard(5), 0, 3))
    with pytest.raises(
        ShapeError, match=r"gap of 3 keys before key 3, and the first query is at key 0; expected a gap"
    ):
        hw.attend(q, q, q, score=WithGap(hw.ALiBi.standard(HEADS), 3, 3))
    tables = [WithGap(hw.RelativeBias(random(1, 30), -20), start, 3) for start in (1, 2)]
    with pytest.raises(ConfigError, match=r"distances with gaps before keys \[1, 2\]; expected at most one gap"):
        hw.attend(q, random(1, HEADS, grid.m, 4), random(1, HEADS, grid.m, 4), score=tables)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sliding", "budgets"])
@pytest.mark.parametrize("name", ["alibi", "relative", "several"])
@pytest.mark.parametrize("n", [1, 3])
def test_one_graph_serves_every_step_with_scores(n: int, name: str, kind: str) -> None:
    layer, x = layer_and()
    score = SCORES[name]()
    torch.compiler.reset()
    # Which graph serves is Dynamo's choice; what AOTAutograd makes of it is seen with one kind of cache.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if kind == "sliding" else "eager")
    found, expected = [], []
    with torch.no_grad():
        cache, other = CACHES[kind](), CACHES[kind]()
        start = 0 if name == "relative" else 6  # of an empty cache, or of one that soon drops the first token
        for one in (cache, other):
            layer(x[:, :start], mask=hw.Causal(), cache=one, score=score)
        for at in range(start, 21, n):
            part = x[:, at : at + n]
            with torch.compiler.set_stance("fail_on_recompile" if at >= 15 else "default"):
                found.append(compiled(part, mask=hw.Causal(), cache=cache, score=score))
            expected.append(layer(part, mask=hw.Causal(), cache=other, score=score))
    # Parts of a BudgetCache lie elsewhere in a graph, and are then summed in another order.
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), rtol=0, atol=1e-14)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["alibi", "several"])
def test_a_graph_has_gradients_across_a_gap(name: str) -> None:
    found = []
    for compiled in (False, True):
        layer, x = layer_and()
        score, cache = SCORES[name](), SlidingCache(5, sinks=2)
        held = leaves(score)
        with torch.no_grad():
            layer(x[:, :20], mask=hw.Causal(), cache=cache, score=score)
        torch.compiler.reset()
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        call(x[:, 20:], mask=hw.Causal(), cache=cache, score=score).square().sum().backward()
        found.append([x.grad for x in (*layer.parameters(), *held)])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.thorough
def test_a_bias_of_another_width_is_told_both_that_fit() -> None:
    layer, x = layer_and()
    cache = SlidingCache(5, sinks=2)
    with torch.no_grad():
        layer(x[:, :20], mask=hw.Causal(), cache=cache)
        with pytest.raises(
            ShapeError, match=r"score=Bias\(values\): 13 keys, expected 21, 7 without the 14 that the cache"
        ):
            layer(x[:, 20:21], mask=hw.Causal(), cache=cache, score=hw.Bias(torch.zeros(1, 1, 1, 13)))
