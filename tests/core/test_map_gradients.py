"""All that is read from a differentiable map has the gradients of the stored matrix, in O(n) memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from samples import FORMULAS_OF_SCORES, MASKS, SCORES, qkv
from test_measures import FORMULAS, ready
from torch import Tensor

from headwise.errors import ConfigError, KernelError
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Mask, Window
from headwise.nn import DESIGNS
from headwise.scores import ALiBi, Bias, Score, SinkLogits
from headwise.stats import MaxLogit, Measure, RowMeasure, row_measure

B, H, N, M = 2, 6, 37, 53
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-6}  # of the norm


def stored(q: Tensor, k: Tensor, mask: Mask, scores: tuple[Score, ...] = ()) -> dict[str, Tensor]:
    """The stored matrix in float64, by plain autograd: p, its logarithm where allowed, scores, lse, allowed."""
    b, h, n, d = q.shape
    m = k.shape[2]
    s = torch.einsum("bhnd,bhmd->bhnm", q.double(), k.double().repeat_interleave(h // k.shape[1], 1)) * d**-0.5
    positions, keys = torch.arange(n)[:, None] + m - n, torch.arange(m)
    sinks = torch.zeros(h, 0, dtype=torch.float64)
    for one in sorted(scores, key=lambda score: type(score).__name__ != "SoftCap"):
        s = FORMULAS_OF_SCORES[type(one)](one, s, positions, keys)
        if isinstance(one, SinkLogits):
            s, sinks = s[0], s[1][:, None]
    allowed = mask.to_dense(n, m, batch=b, heads=h).expand(b, h, n, m)
    lit = allowed.any(-1)
    hidden = torch.where(allowed, s, -torch.inf)
    beside = torch.cat((hidden, sinks[:, None].expand(b, -1, n, -1)), -1)
    lse = torch.where(lit[..., None], beside, 0.0).logsumexp(-1)
    logs = s - lse[..., None]
    p = torch.where(allowed, logs, -torch.inf).exp()
    return {"p": p, "log": torch.where(allowed, logs, 0.0), "s": s, "lse": lse, "allowed": allowed, "lit": lit}


def gradients(loss: Tensor, of: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, of, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(of, found, strict=True)]


def assert_alike(got: list[Tensor], expected: list[Tensor], bound: float, of: str = "") -> None:
    size = max(float(x.norm()) for x in expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.isfinite(one).all()
        error = float((one.double() - other.double()).norm())
        assert error <= bound * max(float(other.norm()), 1e-3 * size, 1e-5), f"{of}: {error / float(other.norm()):.1e}"


def leaves(*given: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in given]


def weights_for(x: Tensor) -> Tensor:
    """Weights of a loss, exact in float32 and unlike for all numbers."""
    return (torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())) * 8).round().div(8).to(x.dtype)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", FORMULAS)
def test_measures(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    (q, k), (dq, dk) = leaves(q, k), leaves(q.double(), k.double())
    mask = MASKS["documents" if name == "sink_mass" else "causal window"](B, N, M)
    if name == "next_mass":
        mask = Window(7, 3)
    _, amap = attend(q, k, v, mask=mask, return_map=True, measures=[ready(name, M)], differentiable=True)
    assert amap.measured is not None
    got = amap.measured[name]
    dense = stored(dq, dk, mask)
    expected = FORMULAS[name]((dense["p"], dense["allowed"], dense["s"]))
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    w = weights_for(got)
    bound = 1e-7 if name == "normalized_entropy" else BOUNDS[dtype]  # whose formula has logarithms in float32
    found = gradients((got * w).sum(), [q, k])
    assert_alike(found, gradients((expected * w).sum(), [dq, dk]), max(bound, BOUNDS[dtype]), name)


READS: dict[str, tuple[Callable[[AttentionMap, Tensor], Tensor], Callable[[dict[str, Tensor], Tensor], Tensor]]] = {
    "lse": (lambda a, x: a.lse, lambda t, x: t["lse"]),
    "tile": (lambda a, x: a[:, [0, 3], 5:30:3, 2:41], lambda t, x: t["p"][:, [0, 3], 5:30:3, 2:41]),
    "one head": (lambda a, x: a[1, 4, 3:9, 40:], lambda t, x: t["p"][1, 4, 3:9, 40:]),
    "log": (
        lambda a, x: a.log(np.s_[1, :, 30:, 2:41]).clamp_min(-1e9) * (a[1, :, 30:, 2:41] > 0),
        lambda t, x: t["log"][1, :, 30:, 2:41],
    ),
    "row": (lambda a, x: a.row(-2), lambda t, x: t["p"][:, :, -2]),
    "topk": (lambda a, x: a.topk(4)[0], lambda t, x: t["p"].gather(-1, t["top"].clamp_min(0)) * (t["top"] >= 0)),
    "diagonals": (lambda a, x: a.diagonals()[1], lambda t, x: diagonals(t)),
    "pool": (lambda a, x: a.pool(9), lambda t, x: squares(t, 6)[0]),
    "pool max": (lambda a, x: a.pool(9, "max"), lambda t, x: squares(t, 6)[1]),
    "pooled": (
        lambda a, x: a.pooled(range(7, 36), range(3, 50), 5).mean,
        lambda t, x: squares({name: part[..., 7:36, 3:50] for name, part in t.items() if part.ndim == 4}, 5)[0],
    ),
    "head": (lambda a, x: a.head(1, 2).received(), lambda t, x: t["p"][1:, 2:3].sum(2)),
    "received": (lambda a, x: a.received(), lambda t, x: t["p"].sum(2)),
    "times": (lambda a, x: a @ x, lambda t, x: t["p"] @ x.repeat_interleave(2, 1)),
    "times matrix": (lambda a, x: a @ x[0, 0], lambda t, x: t["p"] @ x[0, 0]),
    "transposed": (
        lambda a, x: a.T @ x[:, :1, :N].repeat(1, H, 1, 1),
        lambda t, x: t["p"].mT @ x[:, :1, :N].repeat(1, H, 1, 1),
    ),
    "rows": (lambda a, x: a.measure("entropy", rows=True).rows["entropy"], lambda t, x: -(t["p"] * t["log"]).sum(-1)),
}  # fmt: skip


def squares(t: dict[str, Tensor], cell: int) -> tuple[Tensor, Tensor]:
    n, m = t["p"].shape[2:]
    pad = (0, -m % cell, 0, -n % cell)
    parts = [
        torch.nn.functional.pad(x, pad).unfold(2, cell, cell).unfold(3, cell, cell) for x in (t["p"], t["allowed"])
    ]
    return parts[0].sum((-1, -2)) / parts[1].sum((-1, -2)).clamp_min(1), parts[0].amax((-1, -2))


def diagonals(t: dict[str, Tensor]) -> Tensor:
    n, m = t["p"].shape[2:]
    found = [(t["p"].diagonal(at, 2, 3).sum(-1), t["allowed"].diagonal(at, 2, 3).sum(-1)) for at in range(1 - n, m)]
    return torch.stack([total / count.clamp_min(1) for total, count in found], -1)


def check_read(name: str, dtype: torch.dtype, mask: Mask, score: str = "", size: float = 1.0) -> None:
    q, k, v = qkv(dtype=dtype)
    x = torch.randn(B, 3, M, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
    one, other = leaves(q * size, k, x), leaves((q * size).double(), k.double(), x.double())
    scores, same = (SCORES[score](B, H, N, M) if score else () for _ in range(2))
    of_scores: list[list[Tensor]] = [[], []]
    for held, given in zip(of_scores, (scores, same), strict=True):
        for part in given:
            part.mapped(lambda t, held=held: held.append(t) or t)  # type: ignore[misc]
    _, amap = attend(one[0], one[1], v, mask=mask, score=scores, return_map=True, differentiable=True)
    read, formula = READS[name]
    matrix = stored(other[0], other[1], mask, same)
    matrix["top"] = amap.topk(4)[1]  # of equal weights, either key is right
    torch.testing.assert_close(matrix["p"].topk(4).values, amap.topk(4)[0].double(), rtol=1e-4, atol=1e-6)
    got, expected = read(amap, one[2]), formula(matrix, other[2])
    if name == "lse":
        got = got.clamp_min(-1e9) * (got > -torch.inf)
        expected = expected * mask.to_dense(N, M, batch=B, heads=H).any(-1)
    assert got.requires_grad
    w = weights_for(expected)
    mine = gradients((got.double() * w).sum(), [*one, *of_scores[0]])
    theirs = gradients((expected * w).sum(), [*other, *of_scores[1]])
    assert_alike(mine, theirs, BOUNDS[dtype], f"{name}, {score}")


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", READS)
def test_reads(name: str, dtype: torch.dtype) -> None:
    check_read(name, dtype, MASKS["nothing for some"](B, N, M))
    check_read(name, dtype, MASKS["causal"](B, N, M), "all")


@pytest.mark.thorough
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_reads_with_every_mask_and_score(mask: str, score: str) -> None:
    for name in READS:
        check_read(name, torch.float64, MASKS[mask](B, N, M), score)
        if name != "pool max":  # where weights of a cell are almost equal, rounding decides which has the gradient
            check_read(name, torch.float32, MASKS[mask](B, N, M), score, 3.0)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [30.0, 250.0])  # saturated rows, and logits of 1e3
def test_large_logits(size: float, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    (q, k), (dq, dk) = leaves(q * size, k), leaves((q * size).double(), k.double())
    _, amap = attend(
        q,
        k,
        v,
        mask=Causal(),
        return_map=True,
        measures=["entropy", "max_logit", "effective_keys"],
        differentiable=True,
    )
    assert amap.measured is not None
    t = stored(dq, dk, Causal())
    h = -(t["p"] * t["log"]).sum(-1)
    assert (h < 0.01).any()
    found = [amap.measured["entropy"], amap.lse, amap @ v]
    for got, expected in zip(found, (h.mean(-1), t["lse"], t["p"] @ v.double().repeat_interleave(2, 1)), strict=True):
        w = weights_for(got)
        assert_alike(gradients((got * w).sum(), [q, k]), gradients((expected * w).sum(), [dq, dk]), 3 * BOUNDS[dtype])


@pytest.mark.thorough
def test_large_maps_of_many_tiles() -> None:
    """Several row blocks and tiles: sums, joins and ties across them."""
    b, h, n, m = 1, 2, 1000, 1100
    q, k, v = qkv(b, h, 1, n, m, 4, 2, dtype=torch.float64)
    (q, k), (dq, dk) = leaves(q, k), leaves(q, k)
    names = [
        "entropy",
        "distance_variance",
        "effective_keys",
        "max_logit",
        "topk_mass",
        "received_mass",
        "mean_distance",
    ]
    _, amap = attend(q, k, v, mask=Causal(), return_map=True, differentiable=True)
    found, t = amap.measure(*names), stored(dq, dk, Causal())
    dense = t["p"], t["allowed"], t["s"]
    got = sum((found[name].double() * (i + 1)).sum() for i, name in enumerate(names)) + amap.pool(3, "max").sum()
    expected = sum((FORMULAS[name](dense) * (i + 1)).sum() for i, name in enumerate(names)) + squares(t, 367)[1].sum()
    assert_alike(gradients(got, [q, k]), gradients(expected, [dq, dk]), 1e-10)


def test_equal_weights_share_the_gradient_of_the_largest() -> None:
    q = torch.zeros(1, 1, 600, 2, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 600, 2, dtype=torch.float64)
    _, amap = attend(q, k, k, return_map=True, differentiable=True)
    weights = torch.full((600, 600), 1 / 600, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(weights.amax(), weights)  # 1 / 600² each
    amap.pool(1, "max").sum().backward()
    p = weights.detach()
    expected = (p * (g - (p * g).sum(-1, keepdim=True))) @ k[0, 0] * 2**-0.5
    assert q.grad is not None
    torch.testing.assert_close(q.grad[0, 0], expected)


@pytest.mark.thorough
def test_gradcheck() -> None:
    q, k, v = qkv(1, 2, 1, 4, 5, 3, 2, dtype=torch.float64)
    slopes, sinks = torch.tensor([0.1, 0.3]).double(), torch.tensor([0.5, -1.0]).double()

    def reads(q: Tensor, k: Tensor, slopes: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        score = ALiBi(slopes), SinkLogits(sinks)
        options: Any = {"mask": Causal(), "score": score, "return_map": True, "differentiable": True}
        _, amap = attend(q, k, v, measures=["entropy", "learned_sink_mass", "distance_variance"], **options)
        assert amap.measured is not None
        return *amap.measured.values(), amap.lse, amap @ v, amap.pool(2), amap[0, 1]

    assert torch.autograd.gradcheck(reads, leaves(q, k, slopes, sinks))


def test_one_operand_alone_and_two_losses_on_one_map() -> None:
    q, k, v = qkv()
    (q,) = leaves(q)
    _, amap = attend(q, k, v, mask=Causal(), return_map=True, measures=["entropy"], differentiable=True)
    assert amap.measured is not None
    amap.measured["entropy"].sum().backward()
    assert q.grad is not None
    first = q.grad.clone()
    (amap @ v).sum().backward()  # read after a backward pass
    torch.testing.assert_close(q.grad - first, gradients((amap @ v).sum(), [q])[0], rtol=1e-4, atol=1e-5)
    assert k.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    (q, k), (dq, dk) = leaves(q, k), leaves(q.double(), k.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, amap = attend(q, k, v, mask=Causal(), return_map=True, measures=["entropy"], differentiable=True)
        assert amap.measured is not None
        found = gradients(amap.measured["entropy"].sum(), [q, k])
    t = stored(dq, dk, Causal())
    expected = gradients(-(t["p"] * t["log"]).sum(-1).mean(-1).sum(), [dq, dk])
    assert found[0].dtype == dtype
    assert_alike(found, expected, torch.finfo(dtype).eps)


def test_measures_of_ones_own() -> None:
    q, k, v = qkv(dtype=torch.float64)
    (q, k), (dq, dk) = leaves(q, k), leaves(q, k)
    _, amap = attend(q, k, v, mask=Causal(), return_map=True, differentiable=True)
    cubes = row_measure("cubes", lambda tile: tile.weights.pow(3).sum(-1))
    p = stored(dq, dk, Causal())["p"]
    got, expected = amap.measure(cubes)["cubes"].sum(), p.pow(3).sum(-1).mean(-1).sum()
    assert_alike(gradients(got, [q, k]), gradients(expected, [dq, dk]), 1e-10)
    count = row_measure("many", lambda tile: (tile.weights > 0.1).sum(-1).to(tile.lse))
    with pytest.raises(KernelError, match="'many' has no gradient: it counts"):
        amap.measure(count)["many"].sum().backward()


def test_options_and_changes_are_checked() -> None:
    q, k, v = qkv()
    (q,) = leaves(q)
    with pytest.raises(ConfigError, match="differentiable=True requires return_map=True"):
        attend(q, k, v, differentiable=True)
    _, plain = attend(q, k, v, return_map=True, measures=["entropy"])
    assert plain.measured is not None
    assert [x.requires_grad for x in (plain.measured["entropy"], plain.row(0), plain.lse)] == [False] * 3
    x = q * 1.0
    _, amap = attend(x, k, v, return_map=True, differentiable=True)
    read = amap.received().sum()
    x.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        read.backward()
    with pytest.raises(ConfigError, match="q, or a tensor that shares its memory, was changed in place"):
        amap.received()
    _, amap = attend(q, k, v, return_map=True, differentiable=True)
    with pytest.raises(KernelError, match="no second derivative"):
        torch.autograd.grad(torch.autograd.grad(amap.row(0).sum(), q, create_graph=True)[0].sum(), q)
    with torch.no_grad():
        assert not amap.row(0).requires_grad


def test_fully_masked_rows_give_zero() -> None:
    q, k, v = qkv(dtype=torch.float64)
    (q, k) = leaves(q, k)
    mask = MASKS["nothing for some"](B, N, M)
    names: list[str | Measure] = [ready(name, M) for name in FORMULAS]
    _, amap = attend(q, k, v, mask=mask, return_map=True, measures=names, differentiable=True)
    assert amap.measured is not None
    sum(x.double().sum() for x in amap.measured.values()).backward()  # type: ignore[union-attr]
    blank = ~mask.to_dense(N, M, batch=B, heads=H).any(-1).expand(B, H, N)
    assert q.grad is not None
    assert k.grad is not None
    assert torch.isfinite(torch.cat((q.grad.flatten(), k.grad.flatten()))).all()
    assert (q.grad[blank] == 0).all()
    assert (q.grad[~blank] != 0).any()


@pytest.mark.thorough
def test_memory_is_linear() -> None:
    """No tensor that the graph saves, nor any that a backward pass keeps, is as large as the matrix of one head."""
    n = 1500
    q, k, v = qkv(1, 2, 1, n, n, 8, 4)
    (q, k) = leaves(q, k)
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, amap = attend(
            q, k, v, mask=Causal(), return_map=True, measures=["entropy", "received_mass"], differentiable=True
        )
        assert amap.measured is not None
        loss = amap.measured["entropy"].sum() + amap.measured["received_mass"].sum() + (amap @ v).sum()
        loss = loss + amap.pool(20, "max").sum() + amap.topk(3)[0].sum() + amap.diagonals()[1].sum()
    loss.backward()
    assert max(sizes) <= 2 * n * 10


class Late(RowMeasure):
    """Weights of the second half of the keys, joined in a way of its own."""

    name, unit, range, source = "late", "mass", "0 to 1", "a test"

    def partial(self, tile: Any) -> Tensor:
        return torch.stack((tile.weights.amax(-1), tile.weights.square().sum(-1)), -1)

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.stack((torch.maximum(one[..., 0], other[..., 0]), one[..., 1] + other[..., 1]), -1)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 0] * total[..., 1] + 0.1 * lse


def test_joins_of_ones_own_over_tiles() -> None:
    q, k, v = qkv(1, 2, 1, 300, 700, 4, 2, dtype=torch.float64)
    (q, k), (dq, dk) = leaves(q, k), leaves(q, k)
    _, amap = attend(q, k, v, return_map=True, differentiable=True)
    t = stored(dq, dk, MASKS["everything"](1, 300, 700))
    expected = (t["p"].amax(-1) * t["p"].square().sum(-1) + 0.1 * t["lse"]).mean(-1).sum()
    found = amap.measure(Late(), MaxLogit())
    assert_alike(gradients(found["late"].sum(), [q, k]), gradients(expected, [dq, dk]), 1e-10)


def test_learned_biases_by_finite_differences() -> None:
    q, k, v = qkv(1, 1, 1, 5, 6, 3, 2, dtype=torch.float64)
    bias = torch.randn(1, 1, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def loss(bias: Tensor) -> Tensor:
        _, amap = attend(q, k, v, score=Bias(bias), return_map=True, measures=["mean_distance"], differentiable=True)
        assert amap.measured is not None
        return amap.measured["mean_distance"].sum()

    assert torch.autograd.gradcheck(loss, bias)


@pytest.mark.parametrize("name", sorted(DESIGNS.keys() - {"convolution"}))  # whose weights are constants
def test_layers_train_or_refuse(name: str) -> None:
    torch.manual_seed(0)
    layer = DESIGNS[name](d_model=12, num_heads=1 if name == "single_head" else 3)
    x = torch.randn(2, 7, 12)
    if name in ("sparse_mixture", "mixture_of_heads", "talking_heads"):
        with pytest.raises(ConfigError, match="differentiable=True"):
            layer(x, return_map=True, differentiable=True)
        return
    y, amap = layer(x, return_map=True, differentiable=True)
    torch.testing.assert_close(y, layer(x))
    amap.measure("entropy")["entropy"].sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
