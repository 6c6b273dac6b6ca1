"""Mistakes that are easily made get one sentence that names the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.errors import ConfigError, HeadwiseError
from headwise.lm.model import Decoder, DecoderConfig
from headwise.nn.steps import Rotary

LAYER = hw.MultiHeadAttention(12, 4, num_kv_heads=2)
X = torch.randn(1, 5, 12)
Q = torch.randn(1, 2, 5, 3)
DECODER = Decoder(DecoderConfig(5, d_model=4, num_layers=1, num_heads=1, d_ff=4, context=4))


def amap() -> hw.AttentionMap:
    return LAYER(X, mask=hw.Causal(), return_map=True)[1]


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a cache that was not made": (lambda: LAYER(X, cache=hw.KVCache), r"cache: .*KVCache\(\), got the class KVCache"),
    "no scores": (lambda: LAYER(X, score=None), "score: expected headwise scores .*None"),
    "letters of biases": (lambda: hw.MultiHeadAttention(12, 4, bias="qkv"), "bias='qkv': expected True or False"),
    "letters, per head": (lambda: hw.nn.PerHeadAttention(12, 4, bias="qkv"), "bias='qkv': expected True or False"),
    "a norm of each": (lambda: hw.MultiHeadAttention(12, 4, qk_norm="each"), "qk_norm='each': expected True or False"),
    "a rotary base": (lambda: hw.MultiHeadAttention(12, 2, rotary=10_000.0), "rotary=10000.0: expected True or False"),
    "dropout None": (lambda: hw.MultiHeadAttention(12, 4, dropout=None), "dropout=None: expected 0 <= dropout < 1"),
    "a base below 0": (lambda: Rotary(4, base=-1.0), "base=-1.0"),
    "one window": (lambda: hw.cache.BudgetCache(4), "BudgetCache.windows=4.: expected one window per head"),
    "one length": (lambda: hw.cache.RaggedCache(4), "RaggedCache.lengths=4.: expected one length per sequence"),
    "another module": (lambda: hw.MultiHeadAttention.from_torch(nn.Linear(2, 2)), "from_torch.other.*got Linear"),
    "a class of layers": (lambda: hw.TransformerBlock(hw.MultiHeadAttention, d_ff=4), "attention: expected a layer"),
    "a model for its sites": (lambda: hw.models.record_heads(LAYER).__enter__(), "sites: expected .*find_heads"),
    "a model to scale": (lambda: hw.models.scale_heads(LAYER, []).__enter__(), "sites: expected .*find_heads"),
    "one gate for all": (lambda: hw.models.scale_heads([], torch.tensor(1.0)).__enter__(), "gates: .* got Tensor"),
    "one cache for all layers": (lambda: DECODER(torch.zeros(1, 2).long(), caches=hw.KVCache()), "caches: .* KVCache"),
    "groups of no site": (lambda: hw.edit.merge_kv(LAYER, 1, groups=[[0, 1]]), "groups: expected a mapping from sites"),
    "half a position": (lambda: hw.analysis.attention_flow([amap()], 1.5), "position=1.5: expected"),
    "a scale in letters": (lambda: hw.attend(Q, Q, Q, scale="1"), "scale='1': expected a number"),
    "a scale in bytes": (lambda: hw.attend(Q, Q, Q, scale=b"1"), "scale=b'1': expected a number"),
    "a scale of 400 digits": (lambda: hw.attend(Q, Q, Q, scale=10**400), "scale=10+: expected a number"),
    "a value of no size": (lambda: hw.edit.budget([amap()], 1, 1, value_dim=1.5), "value_dim=1.5"),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        call()


def test_a_position_of_a_rollout_is_whole() -> None:
    with pytest.raises(IndexError, match=r"position 1\.5 is out of range for 5"):
        hw.analysis.rollout([amap()]).row(1.5)  # type: ignore[arg-type]


def test_a_learned_scale_is_refused_with_a_way_out_that_learns():
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ConfigError, match="for a learned scale, multiply q by it, and give scale=1"):
        hw.attend(q, k, v, scale=scale)
    out = hw.attend(q * scale, k, v, scale=1)
    expected = (q * scale @ k.mT).softmax(-1) @ v
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(x.square().sum(), scale)[0] for x in (out, expected)]
    torch.testing.assert_close(*gradients)
