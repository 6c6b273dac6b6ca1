"""Relevance: weights with a second factor, against the stored matrices and, in models, against autograd on these."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.analysis import RelevanceMap, attention_lrp, relevance
from headwise.interventions import Uniform
from headwise.rule import TILE_ELEMENTS

B, H, H_KV, N, M, D, E = 2, 6, 3, 37, 53, 8, 5
MASKS = {"none": None, "causal": hw.Causal(), "padded": hw.Lengths([53, 40], [37, 20])}
BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-6}


def inputs(dtype: torch.dtype = torch.float64, n: int = N, m: int = M) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (B, H, n, D), (B, H_KV, m, D), (B, H_KV, m, E), (B, H, n, E)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    bound = BOUNDS[found.dtype] * max(1e-3, float(expected.norm()))
    assert float((found.double() - expected.double()).norm()) <= bound


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("positive", [False, True])
def test_reads_are_those_of_the_stored_matrix(mask: str, dtype: torch.dtype, positive: bool) -> None:
    q, k, v, g = inputs(dtype)
    out, amap = hw.attend(q, k, v, mask=MASKS[mask], return_map=True)
    found = RelevanceMap(amap, g, v)
    factor = g.double() @ v.double().repeat_interleave(H // H_KV, 1).mT
    weights = hw.attend(q.double(), k.double(), v.double(), mask=MASKS[mask], return_map=True)[1].to_dense()
    if positive:
        found, factor = found.positive, factor.clamp_min(0.0)
    dense = weights * factor
    assert_close(found[:], dense)
    assert_close(found[1, [0, 4], 3:30:4, 50:2:-3], dense[1, [0, 4], 3:30:4].flip(-1)[..., 2:50:3])
    assert_close(found.row(-1), dense[:, :, -1])
    x, y = (torch.randn(B, H, size, 3, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (M, N))
    assert_close(found @ x, dense @ x.double())
    assert_close(found @ x[:, :H_KV], dense @ x[:, :H_KV].double().repeat_interleave(H // H_KV, 1))
    assert_close(found.T @ y, dense.mT @ y.double())
    for one, dim in zip(found.sums(), (-1, -2), strict=True):
        assert_close(one, dense.sum(dim))
    if not positive:
        assert_close(found.sums()[0], (g.double() * out.double()).sum(-1))
    allowed = (
        torch.ones(B, H, N, M) if mask == "none" else MASKS[mask].to_dense(N, M, batch=B, heads=H).expand(B, H, N, M)
    )
    sums, counts = (
        torch.nn.functional.avg_pool2d(torch.nn.functional.pad(part.double(), (0, -M % 11, 0, -N % 11)), 11) * 121
        for part in (dense, allowed)
    )
    assert_close(found.pool(5), sums / counts.clamp_min(1))


def test_values_that_are_nan_are_nan_where_they_are_seen() -> None:
    q, k, v, g = inputs()
    _, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
    v[0, 0, 30] = torch.nan
    found, weights = RelevanceMap(amap, g, v), amap[:]
    for dense in (found[:], torch.stack([found[:, :, i] for i in range(N)], 2)):
        assert torch.equal(dense.isnan()[0, :2, :, 30], weights[0, :2, :, 30] > 0)
        assert int(dense.isnan().sum()) == int((weights[0, :2, :, 30] > 0).sum())
    assert torch.equal(found.sums()[1].isnan()[0, :2], (torch.arange(M) == 30).expand(2, -1))


def test_the_contributions_of_keys_add_up_to_the_logit_of_one_layer() -> None:
    torch.manual_seed(1)
    model, x = hw.MultiHeadAttention(12, 3, num_kv_heads=1).double().eval(), torch.randn(1, 9, 12, dtype=torch.float64)
    direction = torch.randn(12, dtype=torch.float64)
    found = relevance(model, lambda: model(x, mask=hw.Causal())[0, -1] @ direction)
    bias = 0.0 if model.o_proj.bias is None else model.o_proj.bias @ direction
    assert_close(found[""].row(-1).sum() + bias, found.value)
    assert (found[""][:, :, :-1] == 0).all()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=23, hidden_size=24, intermediate_size=19, num_attention_heads=6,
                         num_key_value_heads=2, num_hidden_layers=3, attn_implementation="eager")  # fmt: skip
    return LlamaForCausalLM(config).double().eval().requires_grad_(False)


def test_of_a_model_of_transformers_and_its_rollout() -> None:
    model, ids = llama(), torch.arange(22).view(2, 11)
    embedded = model.model.embed_tokens(ids).requires_grad_()
    result = model(inputs_embeds=embedded, output_attentions=True, use_cache=False)
    of_weights = torch.autograd.grad(result.logits[:, -1, 7].sum(), result.attentions)
    found = relevance(model, lambda: model(ids, use_cache=False).logits[:, -1, 7].sum())
    assert list(found.maps) == [f"model.layers.{i}.self_attn" for i in range(3)]
    whole = torch.eye(11, dtype=torch.float64).expand(2, -1, -1)
    for one, weights, gradient in zip(found.maps.values(), result.attentions, of_weights, strict=True):
        dense = (weights * gradient).detach()
        assert float((one[:] - dense).norm()) <= 1e-5 * float(dense.norm())  # the model's own softmax is in float32
        whole = whole + dense.clamp_min(0.0).mean(1) @ whole
    for query in (-1, 4):
        torch.testing.assert_close(found.rollout(query), whole[:, query], rtol=1e-5, atol=1e-8)
    assert all(not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("mask", MASKS)
def test_the_rules_of_attnlrp_are_those_of_the_stored_matrices(mask: str) -> None:
    q, k, v, r = inputs()
    bias = torch.randn(1, H, N, M, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    out, amap = hw.attend(q, k, v, mask=MASKS[mask], score=hw.Bias(bias), return_map=True)
    found = attention_lrp(amap, v, r, eps=1e-3)
    keys, values = (x.repeat_interleave(H // H_KV, 1) for x in (k, v))
    weights, scores = amap.to_dense(), q @ keys.mT * D**-0.5 + bias
    given = r / (2 * out + 1e-3 * torch.where(out < 0, -1, 1))
    of_weights = torch.einsum("bhij,bhjc,bhic->bhij", weights, values, given)
    of_values = torch.einsum("bhij,bhjc,bhic->bhjc", weights, values, given)
    of_scores = scores * (of_weights - weights * of_weights.sum(-1, keepdim=True))
    of_pairs = torch.einsum("bhic,bhjc,bhij->bhijc", q, keys, of_scores / (2 * scores)) * D**-0.5
    for one, dense in (
        (found.q, of_pairs.sum(3)),
        (found.k, of_pairs.sum(2).unflatten(1, (H_KV, -1)).sum(2)),
        (found.v, of_values.unflatten(1, (H_KV, -1)).sum(2)),
        (found.weights[:], of_weights),
    ):
        torch.testing.assert_close(one, dense, rtol=1e-8, atol=1e-9)


@pytest.mark.thorough
def test_memory_is_linear() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            for x in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(x, Tensor) and not func.is_view:
                    self.numel = max(self.numel, x.numel())
            return found

    n = 2300
    q, k, v, g = (torch.randn(1, 2, n, 4) for _ in range(4))
    _, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
    with Largest() as largest:
        found = RelevanceMap(amap, g, v)
        _ = found @ v, found.T @ g, found.pool(20), found.sums(), found.row(-1), attention_lrp(amap, v, g)
    assert n * 4 < largest.numel <= TILE_ELEMENTS < 2 * n * n / 8


def test_bad_input() -> None:
    q, k, v, g = inputs()
    _, amap = hw.attend(q, k, v, return_map=True)
    with pytest.raises(hw.ShapeError, match=r"gradient: shape \(2, 6, 37\), expected \[2, 6, 37, d_v\]"):
        RelevanceMap(amap, g[..., 0], v)
    with pytest.raises(hw.ShapeError, match=r"values: shape \(2, 3, 53, 4\), expected \[2, 3, 53, 5\]"):
        RelevanceMap(amap, g, v[..., :4])
    with pytest.raises(hw.ConfigError, match="eps=0"):
        attention_lrp(amap, v, g, eps=0)
    _, capped = hw.attend(q, k, v, score=hw.SoftCap(3.0), return_map=True)
    with pytest.raises(hw.ConfigError, match="soft cap"):
        attention_lrp(capped, v, g)
    layer, x = hw.MultiHeadAttention(8, 2), torch.randn(1, 5, 8)
    with pytest.raises(hw.ConfigError, match="training mode"):
        relevance(layer, lambda: layer(x).sum())
    layer.eval()
    with pytest.raises(hw.ConfigError, match="run: called no attention"):
        relevance(layer, lambda: x.sum())
    for run in (lambda: layer(x), lambda: layer(x).sum().detach(), lambda: float(layer(x).sum().detach())):
        with pytest.raises(hw.ConfigError, match="run: expected a tensor of one number"):
            relevance(layer, run)  # type: ignore[arg-type]
    with hw.intervene(layer, Uniform(), unused="ignore"), pytest.raises(hw.ConfigError, match="call it outside"):
        relevance(layer, lambda: layer(x).sum())
    found = relevance(layer, lambda: layer(x).sum())
    with pytest.raises(IndexError, match="position 5"):
        found.rollout(5)
    cross = hw.MultiHeadAttention(8, 2).eval()
    with pytest.raises(hw.ConfigError, match="expected n × n"):
        relevance(cross, lambda: cross(x, torch.randn(1, 7, 8)).sum()).rollout()
