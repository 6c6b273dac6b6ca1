"""Losses on attention are their formulas on the stored matrix, with its gradients; two maps too."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from samples import MASKS, qkv
from test_map_gradients import assert_alike, gradients, leaves, stored, weights_for
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise import MultiHeadAttention, losses, watch
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.map import AttentionMap, gradients as of_tiles, pairs
from headwise.map.attention import attend
from headwise.masks import Causal, Lengths, Window
from headwise.scores import ALiBi, Bias, SinkLogits

GROUPS: list[int | list[int]] = [0, [0, 1], 2, 3, [1, 2, 3], 3]
N, M = 37, 53
SHARES = torch.zeros(6, 4, dtype=torch.float64)
for row, group in zip(SHARES, GROUPS, strict=True):
    for one in [group] if isinstance(group, int) else group:
        row[one] += 1 / (1 if isinstance(group, int) else len(group))


def mapped(q: Tensor, k: Tensor, *, mask: Any = None, **options: Any) -> AttentionMap:
    mask = Causal() if mask is None else mask
    amap: AttentionMap = attend(q, k, k, mask=mask, return_map=True, differentiable=True, **options)[1]
    return amap


def logs(p: Tensor) -> Tensor:
    return p.masked_fill(p == 0, 1.0).log()


def of_kind(kind: str, s: Tensor, t: Tensor) -> Tensor:
    if kind == "kl":
        return (t * (logs(t) - logs(s))).sum(-1)
    if kind == "cross_entropy":
        return -(t * logs(s)).sum(-1)
    mean = (s + t) / 2
    return ((t * (logs(t) - logs(mean))).sum(-1) + (s * (logs(s) - logs(mean))).sum(-1)) / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["kl", "js", "cross_entropy"])
def test_two_maps(kind: str, dtype: torch.dtype) -> None:
    """They differ in heads, head size and scores, and some queries of both are fully masked."""
    (q, k, _), (q2, k2, _) = qkv(dtype=dtype), qkv(h=4, h_kv=2, d=5, seed=3, dtype=dtype)
    mask = MASKS["nothing for some"](2, N, M)
    mine, theirs = leaves(q, k, q2, k2), leaves(*(x.double() for x in (q, k, q2, k2)))
    student = mapped(*mine[:2], mask=mask, score=SinkLogits(torch.ones(6)))  # the sink is divided out
    got = getattr(student, kind)(mapped(*mine[2:], mask=mask), heads=GROUPS)
    s, t = stored(*theirs[:2], mask)["p"], stored(*theirs[2:], mask)["p"]
    expected = of_kind(kind, s, torch.einsum("st,btnm->bsnm", SHARES, t))
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    w = torch.linspace(-1, 2, got.numel()).view(got.shape)
    bound = 1e-10 if dtype == torch.float64 else 5e-6
    assert_alike(gradients((got * w).sum(), mine), gradients((expected * w).sum(), theirs), bound)


@pytest.mark.parametrize("kind", ["kl", "js", "cross_entropy"])
def test_a_map_that_lost_gradients_is_refused(kind: str) -> None:
    q, k, v = qkv()
    teacher = attend(q, k, v, return_map=True)[1]
    student = attend(q.requires_grad_(), k, v, return_map=True)[1]
    for one in (student, student.head(0, 1), student.clone()):
        with pytest.raises(ConfigError, match="no gradients, and q or k has"):
            getattr(one, kind)(teacher if one.shape == teacher.shape else teacher.head(0, 1))
    expected = getattr(student.detach(), kind)(teacher)
    with torch.no_grad():
        torch.testing.assert_close(getattr(student, kind)(teacher), expected)
    assert getattr(teacher, kind)(student).shape == expected.shape  # a teacher that has no gradients is a constant


def test_a_watched_layer_keeps_the_gradients_of_its_measures() -> None:
    layer, x = MultiHeadAttention(16, 4), torch.randn(2, 9, 16)
    with watch(layer, measures=["max_logit"]):
        _, amap = layer(x, mask=Causal(), return_map=True, differentiable=True, measures=["entropy"])
    assert [*amap.measured] == ["entropy"]
    losses.entropy_floor(amap, 5.0).backward()
    alone = layer.q_proj.weight.grad.clone()
    layer.zero_grad()
    losses.entropy_floor(layer(x, mask=Causal(), return_map=True, differentiable=True)[1], 5.0).backward()
    torch.testing.assert_close(layer.q_proj.weight.grad, alone)


def test_copies_of_a_map() -> None:
    q, k, _ = qkv()
    amap = mapped(q.requires_grad_(), k, measures=["entropy"])
    for same in (amap.using("auto"), copy.copy(amap)):
        assert same.differentiable
        assert same.kl(mapped(k=k, q=q.detach())).requires_grad
    for same in (amap.detach(), copy.deepcopy(amap)):
        assert not same.differentiable
        torch.testing.assert_close(same.measured["entropy"], amap.measured["entropy"].detach())
        assert not same.measured["entropy"].requires_grad
    for measured in (copy.deepcopy(amap.measured), pickle.loads(pickle.dumps(amap.measured))):
        torch.testing.assert_close(measured["entropy"], amap.measured["entropy"].detach())
        assert not measured["entropy"].requires_grad


def test_gradients_reach_the_other_map_alone() -> None:
    q, k, _ = qkv()
    teacher = mapped(q.clone().requires_grad_(), k)
    student = attend(q, k.flip(2), k, return_map=True)[1]
    for kind in ("kl", "js", "cross_entropy"):
        assert getattr(student, kind)(teacher).requires_grad


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading two maps tile by tile is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("two maps are read tile by tile")

    monkeypatch.setattr(pairs, "row_values", refuse)
    monkeypatch.setattr(of_tiles.Shares, "pull_back", refuse)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("kernel", ["torch_blocks", "cpu"])
@pytest.mark.parametrize("mask", ["everything", "causal", "nothing for some", "dense"])
@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
def test_a_constant_teacher_takes_products_alone(kind: str, mask: str, kernel: str) -> None:
    """It differs in head size, scores and the number of KV heads."""
    (q, k, _), (q2, k2, _) = qkv(), qkv(h_kv=2, d=5, seed=3)
    rule, score = MASKS[mask](2, N, M), ALiBi.standard(6)
    mine, theirs = leaves(q, k), leaves(q.double(), k.double())
    _, teacher = attend(q2, k2, k2, mask=rule, score=score, return_map=True, kernel=kernel)
    got = getattr(mapped(*mine, mask=rule, kernel=kernel), kind)(teacher)
    p, t = stored(*theirs, rule)["p"], stored(q2, k2, rule, (score,))["p"]
    expected = of_kind(kind, p, t)
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-6)
    w = weights_for(got)
    found = gradients((got * w).sum(), mine)
    assert_alike(found, gradients((expected * w).sum(), theirs), 2e-6, mask)
    half = torch.autograd.grad(got, mine, torch.stack((w / 2, w)), retain_graph=True, is_grads_batched=True)
    assert all(torch.equal(x[1], one) for x, one in zip(half, found, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(getattr(mapped(q, k, mask=rule, kernel=kernel), kind)(teacher), got.detach())


def test_a_kernel_without_products_leaves_two_maps_to_tiles() -> None:
    q, k, _ = qkv()
    values = []
    for kernel in ("torch_fused", "torch_blocks"):
        mine = leaves(q, k)
        _, student = attend(*mine, mine[1], return_map=True, differentiable=True, kernel=kernel)
        _, teacher = attend(q.flip(2), k, k, return_map=True, kernel=kernel)
        loss = student.cross_entropy(teacher)
        values.append([loss, *gradients(loss.sum(), mine)])
    for one, other in zip(*values, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_what_is_fully_masked_does_not_count() -> None:
    q, k, _ = qkv()
    half = mapped(q, k, mask=Lengths(torch.tensor([M, 0])))
    alone = mapped(q[:1], k[:1], mask=Lengths(torch.tensor([M])))
    for loss in (partial(losses.entropy_floor, floor=9.0), losses.class_mass, losses.distance, losses.z_loss):
        torch.testing.assert_close(loss(half), loss(alone))


def test_vectors_of_zero_have_no_gradient() -> None:
    out = torch.cat((torch.zeros(1, 1, 9, 4), torch.randn(1, 2, 9, 4)), 1).requires_grad_()
    losses.output_similarity(out).backward()
    assert out.grad.abs().max() < 10
    assert (out.grad[:, 0] == 0).all()


def test_targets() -> None:
    q, k, _ = qkv(dtype=torch.float64)
    mine, theirs = leaves(q, k), leaves(q, k)
    student, p = mapped(*mine), stored(*theirs, Causal())["p"]
    keys = torch.randint(0, M - N + 1, (2, 1, N, 3), generator=torch.Generator().manual_seed(0))
    weights = torch.rand(N, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dense = torch.zeros(2, 1, N, M, dtype=torch.float64).scatter_add_(-1, keys, weights.expand(2, 1, N, 3))
    expected = of_kind("cross_entropy", p, (dense / dense.sum(-1, keepdim=True)).expand_as(p))
    for targets in (dense, (keys, weights)):
        got = student.cross_entropy(targets)
        torch.testing.assert_close(got, expected)
        assert_alike(gradients(got.mean(), mine), gradients(expected.mean(), theirs), 1e-10)


def test_targets_and_maps_that_do_not_fit_are_refused() -> None:
    q, k, _ = qkv()
    student = mapped(q, k)
    late = torch.zeros(N, M)
    late[:, 0] = 1.0
    late[4, M - 1] = 0.5
    with pytest.raises(ConfigError, match=r"target of query 4 \(batch entry 0, head 0\) has weight on"):
        student.cross_entropy(late)
    late[4] = 0.0
    with pytest.raises(ConfigError, match=r"target of query 4 \(batch entry 0, head 0\) sums to 0"):
        student.cross_entropy(late)
    assert (student.cross_entropy(late, empty=True)[:, :, 4] == 0).all()
    with pytest.raises(ConfigError, match=r"kl: the target of query 0 .* has weight on keys that are masked"):
        student.kl(mapped(q, k, mask=MASKS["everything"](2, N, M)))
    with pytest.raises(ConfigError, match="sums to 0"):
        student.kl(mapped(q, k, mask=MASKS["nothing for some"](2, N, M) & Causal()))
    blank = Bias(torch.where(torch.arange(N) == 4, -torch.inf, 0.0)[None, None, :, None])
    with pytest.raises(ConfigError, match=r"kl: the target of query 4 .* sums to 0"):
        student.kl(attend(q, k, k, mask=Causal(), score=blank, return_map=True)[1])
    few = mapped(q[:, :3], k)
    with pytest.raises(ConfigError, match="the maps have 6 and 3 heads; give heads="):
        student.kl(few)
    with pytest.raises(ConfigError, match=r"heads=\[0, 1\]: expected 6 heads"):
        student.kl(few, heads=[0, 1])
    with pytest.raises(ShapeError, match="the other map has shape"):
        student.js(mapped(q[:, :, 1:], k))
    for bad in ("x", torch.ones(3, 4), -torch.ones(N, M), (torch.full((N, 1), M), torch.ones(N, 1))):
        with pytest.raises((DTypeError, ShapeError)):
            student.cross_entropy(bad)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="expected another attention map"):
        student.kl(late)  # type: ignore[arg-type]


def dense_losses(t: dict[str, Tensor], teacher: Tensor, window: Tensor) -> dict[str, Tensor]:
    p, h = t["p"], -(t["p"] * logs(t["p"])).sum(-1)
    n, m = p.shape[2:]
    i, j = torch.arange(n)[:, None], torch.arange(m)
    away = 1 - (-(i.double() / n - j.double() / m).square() / 0.08).exp()
    both = torch.einsum("banm,bcnm->bnac", p, p)
    members = (j % 5 == 2).double()
    same = torch.einsum("st,btnm->bsnm", SHARES, teacher)
    chosen = teacher.sum(1, keepdim=True) * window
    chosen = chosen / chosen.sum(-1, keepdim=True)
    each = teacher * window / (teacher * window).sum(-1, keepdim=True)
    indexer = t["p"] * window
    indexer = indexer / indexer.sum(-1, keepdim=True)
    first, second = p[:, [1, 4], 5, 3], (p[:, [1, 4], 7, 7].log() + p[:, [1, 4], 7, 2].log()) / 2
    return {
        "entropy_floor": (2.5 - h.mean(-1)).clamp_min(0).mean(),
        "entropy_ceiling": (h.mean(-1) - 2.5).clamp_min(0).mean(),
        "guided_diagonal": (p * away).sum(-1).mean(),
        "pairs": -torch.stack((first.log(), second)).mean(),
        "class_mass": ((p * members).sum(-1).mean(-1) - 0.1).clamp_min(0).mean(),
        "sink": p[..., 0].mean(),
        "distance": (p * (i + m - n - j).abs()).sum(-1).mean(),
        "head_similarity": ((both.sum((-1, -2)) - both.diagonal(0, -1, -2).sum(-1)) / 30).mean(),
        "distillation": of_kind("kl", p, same).mean(),
        "indexer_kl": of_kind("kl", indexer, chosen.expand_as(p)).mean(),
        "indexer_kl per head": torch.stack([of_kind("kl", indexer, x[:, None]) for x in each.unbind(1)]).mean(),
        "z_loss": t["lse"].square().mean(),
        "max_logit": (t["s"].masked_fill(~t["allowed"], -9e9).amax((-1, -2)) - 1.0).clamp_min(0).mean(),
    }


def test_losses_are_their_formulas() -> None:
    (q, k, _), (q2, k2, _) = qkv(dtype=torch.float64), qkv(h=4, h_kv=2, d=5, seed=3, dtype=torch.float64)
    mine, theirs = leaves(q, k), leaves(q, k)
    amap, teacher = mapped(*mine), mapped(q2, k2)
    near = Causal() & Window(9)
    sparse = mapped(*mine, mask=near)
    pairs = torch.tensor([[5, 3], [7, 7], [7, 2]])
    got = {
        "entropy_floor": losses.entropy_floor(amap, 2.5),
        "entropy_ceiling": losses.entropy_ceiling(amap, 2.5),
        "guided_diagonal": losses.guided_diagonal(amap),
        "pairs": losses.pairs(amap, pairs, heads=[1, 4]),
        "class_mass": losses.class_mass(amap, torch.arange(M) % 5 == 2, most=0.1),
        "sink": losses.class_mass(amap),
        "distance": losses.distance(amap),
        "head_similarity": losses.head_similarity(amap),
        "distillation": losses.distillation(amap, teacher, heads=GROUPS),
        "indexer_kl": losses.indexer_kl(sparse, teacher),
        "indexer_kl per head": losses.indexer_kl(sparse, teacher, per_head=True),
        "z_loss": losses.z_loss(amap),
        "max_logit": losses.max_logit(amap, 1.0),
    }
    with torch.no_grad():
        other = stored(q2, k2, Causal())["p"]
    window = near.to_dense(N, M).double()
    for name, expected in dense_losses(stored(*theirs, Causal()), other, window).items():
        torch.testing.assert_close(got[name].double(), expected, rtol=1e-6, atol=1e-9, msg=name)
        assert_alike(gradients(got[name], mine), gradients(expected, theirs), 1e-10, name)


def test_outputs_of_heads() -> None:
    q, k, v = qkv(dtype=torch.float64)
    out = attend(q, k, v)
    (out, same) = leaves(out, out)
    units = torch.nn.functional.normalize(same, dim=-1)
    cosines = torch.einsum("band,bcnd->bnac", units, units)
    expected = ((cosines.sum((-1, -2)) - 6) / 30).mean()
    assert_alike(gradients(losses.output_similarity(out), [out]), gradients(expected, [same]), 1e-10)


def test_padding_and_several_maps() -> None:
    """Fully masked queries do not count; maps are averaged; lengths are those of each entry."""
    q, k, _ = qkv(n=M)
    mask = Lengths([30, M], [20, M])
    (q,) = leaves(q)
    amap = mapped(q, k, mask=mask)
    own = [
        mapped(q[b : b + 1, :, :n], k[b : b + 1, :, :m], mask=Lengths([m]))
        for b, (n, m) in enumerate([(20, 30), (M, M)])
    ]
    lengths = torch.tensor([20, M]), torch.tensor([30, M])
    got = losses.guided_diagonal(amap, queries=lengths[0], keys=lengths[1])
    parts = [losses.guided_diagonal(one) * one.shape[2] for one in own]
    torch.testing.assert_close(got, sum(parts) / (20 + M))
    torch.testing.assert_close(losses.z_loss(own), (losses.z_loss(own[0]) + losses.z_loss(own[1])) / 2)
    (grad,) = torch.autograd.grad(
        losses.z_loss(amap) + losses.head_similarity(amap) + losses.entropy_floor(amap, 9.0), q
    )
    assert torch.isfinite(grad).all()
    assert (grad[0, :, 20:] == 0).all()


def test_bad_input_is_refused() -> None:
    q, k, v = qkv()
    _, plain = attend(q.requires_grad_(), k, v, mask=Causal(), return_map=True)
    amap = mapped(q, k)
    with pytest.raises(ConfigError, match=r"losses\.z_loss: this map has no gradients, and the loss would"):
        losses.z_loss(plain)
    assert amap.differentiable
    assert not amap.detach().differentiable
    with pytest.raises(ConfigError, match="no gradients"):
        losses.entropy_floor([amap, plain], 1.0)
    with pytest.raises(DTypeError, match="expected attention maps, got Tensor"):
        losses.distance([q])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="at least one map"):
        losses.max_logit([])
    with pytest.raises(ConfigError, match=r"target of query 3 .* masked"):
        losses.pairs(amap, torch.tensor([[3, M - 1]]))
    for bad in (torch.ones(2, 2), [[1, 2]]):
        with pytest.raises(DTypeError, match="whole numbers"):
            losses.pairs(amap, bad)  # type: ignore[arg-type]
    for bad in (torch.ones(2, 4, dtype=torch.long), torch.tensor([[N, 0]])):
        with pytest.raises(ShapeError, match="pairs"):
            losses.pairs(amap, bad)
    with pytest.raises(ConfigError, match="g > 0"):
        losses.guided_diagonal(amap, 0.0)
    with pytest.raises(ShapeError, match="a length for each of 2"):
        losses.guided_diagonal(amap, queries=torch.tensor([3]))
    with pytest.raises(ConfigError, match="1 maps to train, and 2"):
        losses.distillation(amap, [plain, plain])
    with pytest.raises(ShapeError, match="output of attend"):
        losses.output_similarity(q[0])


def test_checkpointing_trains_alike() -> None:
    q, k, v = qkv()
    (q, k) = leaves(q, k)

    def loss(q: Tensor, k: Tensor) -> Tensor:
        out, amap = attend(q, k, v, mask=Causal(), return_map=True, measures=["entropy"], differentiable=True)
        assert amap.measured is not None
        return out.square().mean() + amap.measured["entropy"].sum() + losses.z_loss(amap)

    expected = gradients(loss(q, k), [q, k])
    again: Any = checkpoint(loss, q, k, use_reentrant=False)
    torch.testing.assert_close(list(torch.autograd.grad(again, [q, k])), expected)


@pytest.mark.parametrize("changed", ["student", "teacher"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_divergence_of_a_map_whose_inputs_were_changed_unseen_is_an_error(changed: str, differentiable: bool) -> None:
    q, k, v = qkv(1, 2, 2, 32, 32, 8, 8)
    other, *_ = qkv(1, 2, 2, 32, 32, 8, 8, seed=1)
    q.requires_grad_(differentiable)
    student = attend(q, k, v, mask=Causal(), return_map=True, differentiable=differentiable)[1]
    teacher = attend(other, k.clone(), v, mask=Causal(), return_map=True)[1]
    (q if changed == "student" else other).data.mul_(1.5)  # the version counter does not count it
    for compared in (student.kl, student.cross_entropy):
        with pytest.raises(ConfigError, match="cannot be read any more"):
            compared(teacher)
