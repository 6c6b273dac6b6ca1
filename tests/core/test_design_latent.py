"""Latent attention: its two forms are one function, and its cache is as small as the paper says."""

from typing import Any

import pytest
import torch
from design_samples import design, given
from torch import Tensor

from headwise.cache import KVCache, SlidingCache
from headwise.errors import ConfigError
from headwise.masks import Causal, Lengths, Mask, Window
from headwise.nn.latent import LatentAttention

SIZES: list[dict[str, Any]] = [
    {},
    {"latent_dim": 7, "rope_dim": 4, "head_dim": 5, "value_dim": 3},
    {"latent_dim": 5, "rope_dim": 0, "query_latent_dim": 8, "latent_norm": True},
]


def formula(module: LatentAttention, x: Tensor, allowed: Tensor) -> Tensor:
    """A head at a time, from its own keys and values, with rotary positions as complex numbers."""
    d_h, d_r, d_c = module.head_dim, module.rope_dim, module.latent_dim
    n = x.shape[1]

    def turned(z: Tensor) -> Tensor:
        pairs = torch.complex(z[..., : d_r // 2], z[..., d_r // 2 :])
        angle = torch.arange(n)[:, None] * 10_000.0 ** (-torch.arange(0, d_r, 2) / d_r)
        pairs = pairs * torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
        return torch.cat((pairs.real, pairs.imag), -1)

    def rms(z: Tensor, norm: Any) -> Tensor:
        return z if norm is None else norm(z)

    queries = x if module.q_down is None else rms(module.q_down(x), module.q_norm)
    down = x @ module.kv_down.weight.T
    c, k_r = rms(down[..., :d_c], module.kv_norm), turned(down[..., d_c:])
    parts = []
    for i in range(module.num_heads):
        q = queries @ module.q_proj.weight[i * (d_h + d_r) : (i + 1) * (d_h + d_r)].T
        k, v = c @ module.k_up[i].T, c @ module.v_up[i].T
        logits = (q[..., :d_h] @ k.mT + turned(q[..., d_h:]) @ k_r.mT) / (d_h + d_r) ** 0.5
        parts.append(logits.masked_fill(~allowed, -torch.inf).softmax(-1) @ v)
    return torch.cat(parts, -1) @ module.o_proj.weight.T


@pytest.mark.parametrize("options", SIZES)
@pytest.mark.parametrize("form", ["plain", "absorbed", "auto"])
@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(4), Lengths([13, 9])], ids=repr)
def test_both_forms_are_the_formula(options: dict[str, Any], form: str, mask: Mask) -> None:
    module, x = design("latent", options | {"form": form}), given()
    expected = formula(module, x, mask.to_dense(13, 13, batch=2)[:, 0])
    torch.testing.assert_close(module(x, mask=mask), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", SIZES)
def test_forms_have_the_same_gradients_and_maps(options: dict[str, Any]) -> None:
    results = []
    for form in ("plain", "absorbed"):
        module, x = design("latent", options | {"form": form}), given().requires_grad_()
        y, amap = module(x, mask=Causal(), return_map=True)
        grads = torch.autograd.grad((y * torch.arange(12)).sum(), [x, *module.parameters()])
        results.append([y, amap.to_dense(), *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", SIZES)
@pytest.mark.parametrize("prefill", ["plain", "absorbed"])
def test_the_cache_holds_the_latent_and_one_rotary_key(options: dict[str, Any], prefill: str) -> None:
    module, x, cache = design("latent", options), given(), KVCache()
    module.form = prefill
    parts = [module(x[:, :6], mask=Causal(), cache=cache)]
    module.form = "absorbed" if prefill == "plain" else "plain"
    parts += [module(x[:, i : i + 1], mask=Causal(), cache=cache) for i in range(6, 13)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, mask=Causal()), rtol=1e-5, atol=1e-6)
    assert cache.nbytes == 2 * 13 * (module.latent_dim + module.rope_dim) * 8
    assert module.cached_elements == module.latent_dim + module.rope_dim


def test_a_sliding_cache_gives_what_a_window_gives() -> None:
    module, x, cache = design("latent", {}), given(), SlidingCache(4)
    mask = Causal() & Window(4)
    parts = [module(part, mask=mask, cache=cache) for part in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, mask=mask), rtol=1e-5, atol=1e-6)


def test_the_papers_cache_has_34560_elements_a_token() -> None:
    with torch.device("meta"):
        layer = LatentAttention(5120, 128, head_dim=128, latent_dim=512, rope_dim=64, query_latent_dim=1536)
    assert layer.cached_elements * 60 == 34_560
    queries = 5120 * 1536 + 1536 * 128 * (128 + 64)
    assert sum(p.numel() for p in layer.parameters()) == (
        queries + 5120 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 5120
    )


def test_decoding_is_absorbed_and_a_full_pass_is_plain() -> None:
    with torch.device("meta"):
        layer = LatentAttention(5120, 128, head_dim=128, latent_dim=512, rope_dim=64)
    assert layer.is_absorbed(1, 4096)
    assert not layer.is_absorbed(4096, 4096)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"form": "fast"}, "form='fast'"),
        ({"latent_dim": 0}, "latent_dim=0"),
        ({"rope_dim": -2}, "rope_dim=-2"),
        ({"query_latent_dim": 0}, "query_latent_dim=0"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"rotary": True}, "rotary"),
        ({"context_dim": 10}, "rope_dim=2: requires self attention"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LatentAttention(12, 6, **options)


def test_both_forms_are_merged_with_their_values_that_are_not_finite() -> None:
    layer, x = LatentAttention(24, 6, latent_dim=8), torch.randn(1, 7, 24)
    x[0, 2] = torch.nan
    _, plain = layer(x, mask=Causal(), return_map=True)
    cache = KVCache()
    layer(x, mask=Causal(), cache=cache)
    _, absorbed = layer(x[:, :1], mask=Causal(), cache=cache, return_map=True)
    assert plain.nonfinite_values is not None
    assert absorbed.nonfinite_values is not None
    assert (plain.nonfinite_values.shape, absorbed.nonfinite_values.shape) == ((1, 6), (1, 1))
    merged = plain.measure("entropy").merge(absorbed.measure("entropy"))
    assert torch.equal(merged.nonfinite_values, plain.nonfinite_values + absorbed.nonfinite_values)
