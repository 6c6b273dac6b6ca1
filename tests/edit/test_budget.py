"""Budgets follow what heads look at, hold as many bytes as they say, and cost what is measured."""

from typing import Any

import pytest
import torch
from hypothesis import given as drawn, settings, strategies as st
from torch import Tensor

import headwise as hw
from headwise.edit import budget, budget_effect
from headwise.errors import ConfigError, HeadwiseError, ShapeError
from headwise.lm.checkpoint import load_pretrained
from headwise.lm.model import Decoder, DecoderConfig
from headwise.masks import Mask

WORDS = 31


def made(**changes: Any) -> Decoder:
    torch.manual_seed(3)
    sizes = {"d_model": 24, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "d_ff": 22, "context": 64}
    decoder = Decoder(DecoderConfig(WORDS, **(sizes | changes))).eval()
    with torch.no_grad():  # sharper heads, so that they differ
        for block in decoder.blocks:
            block.attention.q_proj.weight.mul_(3.0)
    return decoder


def ids(n: int = 41, b: int = 2, seed: int = 5) -> Tensor:
    return torch.randint(WORDS, (b, n), generator=torch.Generator().manual_seed(seed))


def maps_of(decoder: Decoder, tokens: Tensor) -> list[hw.AttentionMap]:
    with torch.no_grad():
        return decoder(tokens, return_maps=True)[1]


def kept_by_hand(amap: hw.AttentionMap, window: int, sinks: int) -> Tensor:
    weights = amap.to_dense().double()
    n = weights.shape[-1]
    i, j = torch.arange(n)[:, None], torch.arange(n)
    near = (i - j < window) | (j < sinks)
    return (weights * near).sum(-1)[:, :, window + sinks :].mean((0, 2))


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@drawn(st.integers(1, 11), st.integers(0, 5), st.integers(18, 40))
def test_what_a_window_keeps_is_what_the_weights_say(window: int, sinks: int, n: int) -> None:
    maps = maps_of(made(), ids(n))
    found = budget(maps, window, sinks, 0.5)
    for amap, kept, windows in zip(maps, found.kept, found.windows, strict=True):
        expected = kept_by_hand(amap, window, sinks)
        torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-6)
        least = kept.view(2, 3).amin(1)
        assert windows == tuple(window if x >= 0.5 else None for x in least.tolist())


@pytest.mark.parametrize(
    "mask", [hw.Lengths([41, 12], side="right"), hw.Documents(torch.arange(41) // 15), hw.Lengths([3, 41])], ids=repr
)
def test_queries_that_lose_nothing_by_their_own_mask_do_not_count(mask: Mask) -> None:
    q, k = torch.randn(2, 2, 6, 41, 5, generator=torch.Generator().manual_seed(2))
    _, amap = hw.attend(q, k, k, mask=hw.Causal() & mask, return_map=True)
    i, j = torch.arange(41)[:, None], torch.arange(41)
    far = (i - j >= 7) & (j >= 2)
    counted = (far & amap.mask.to_dense(41, 41, batch=2)).any(-1).expand(2, 6, -1)
    lost = (amap.to_dense().double() * far).sum(-1)
    expected = 1 - (lost * counted).sum((0, 2)) / counted.sum((0, 2))
    torch.testing.assert_close(budget([amap], 7, 2).kept[0], expected, rtol=1e-5, atol=1e-6)


def test_a_bias_of_minus_infinity_is_a_mask() -> None:
    q, k = torch.randn(2, 1, 6, 41, 5, generator=torch.Generator().manual_seed(2))
    padding = hw.Lengths([30], side="right")
    bias = torch.zeros(1, 1, 41, 41).masked_fill(~padding.to_dense(41, 41), -torch.inf)
    found = []
    for mask, score in ((hw.Causal() & padding, ()), (hw.Causal(), hw.Bias(bias))):
        _, amap = hw.attend(q, k, k, mask=mask, score=score, return_map=True)
        found.append(budget([amap], 7, 2).kept[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_threshold_between_heads_parts_them() -> None:
    maps = maps_of(made(), ids())
    least = torch.cat([kept.view(2, 3).amin(1) for kept in budget(maps, 7, 2).kept]).sort().values
    for i in range(5):
        found = budget(maps, 7, 2, float(least[i : i + 2].mean()))
        assert sum(w is not None for layer in found.windows for w in layer) == 5 - i


def test_texts_are_pooled_by_their_queries() -> None:
    decoder = made()
    one, other = maps_of(decoder, ids(41)), maps_of(decoder, ids(23, b=1, seed=6))
    both = budget([one, other], 7, 2)
    counts = 2 * (41 - 9), 23 - 9
    for i in range(3):
        parts = kept_by_hand(one[i], 7, 2) * counts[0] + kept_by_hand(other[i], 7, 2) * counts[1]
        torch.testing.assert_close(both.kept[i], parts / sum(counts), rtol=1e-5, atol=1e-6)
    assert both.tokens == 41


@pytest.mark.thorough_except("None-1")
@pytest.mark.parametrize("n", [1, 5, 8, 9, 40])
@pytest.mark.parametrize("value_dim", [None, 5])
def test_bytes_are_those_that_the_caches_hold(n: int, value_dim: int | None) -> None:
    decoder = made(options={} if value_dim is None else {"value_dim": 5})
    maps = maps_of(decoder, ids())
    least = torch.cat([kept.view(2, 3).amin(1) for kept in budget(maps, 7, 2).kept])
    found = budget(maps, 7, 2, float(least.median()) - 1e-9, value_dim=value_dim)
    assert 0 < sum(w is not None for layer in found.windows for w in layer) < 6
    caches, full = found.caches(), [hw.KVCache() for _ in range(3)]
    with torch.no_grad():
        for part in ids(n).split(3, 1):
            decoder(part, mask=found.masks(), caches=caches)
            decoder(part, caches=full)
    assert found.cache_bytes(n, batch=2) == sum(cache.nbytes for cache in caches)
    assert found.full_cache_bytes(n, batch=2) == sum(cache.nbytes for cache in full)
    assert found.cache_bytes(n, dtype=torch.bfloat16) * 4 == found.cache_bytes(n, batch=2)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 6, 41])
def test_caches_and_masks_cost_the_same(step: int) -> None:
    decoder = made()
    maps = maps_of(decoder, ids())
    least = torch.cat([kept.view(2, 3).amin(1) for kept in budget(maps, 5, 1).kept])
    found = budget(maps, 5, 1, float(least.median()) - 1e-9)
    batches = [ids(seed=8), ids(23, b=1, seed=9)]
    by_mask, by_cache = budget_effect(decoder, batches, found), budget_effect(decoder, batches, found, step=step)
    assert by_cache.short == pytest.approx(by_mask.short, rel=1e-5)
    assert by_mask.tokens == 2 * 40 + 22
    losses = [
        torch.nn.functional.cross_entropy(decoder(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="sum").item()
        for x in batches
    ]
    assert by_mask.full == pytest.approx(sum(losses) / 102, rel=1e-5)
    assert by_mask.short != pytest.approx(by_mask.full, rel=1e-5)
    assert f"{by_mask.full:.4f} → {by_mask.short:.4f}" in str(by_mask)


def test_a_budget_that_holds_all_costs_nothing() -> None:
    decoder = made()
    found = budget(maps_of(decoder, ids()), 5, 1, 1.0)
    assert found.windows == ((None, None),) * 3
    effect = budget_effect(decoder, [ids()], found)
    assert effect.short == pytest.approx(effect.full, rel=1e-6)
    assert found.cache_bytes(41) == found.full_cache_bytes(41)


@pytest.mark.thorough
def test_the_embedded_model_has_heads_that_need_little() -> None:
    decoder, tokenizer, _ = load_pretrained()
    text = "话说武松自从打了大虫，阳谷县里人人都称赞他的英雄。这一日正在街上行走，只听得背后一个人叫道。" * 4
    tokens = torch.from_numpy(tokenizer.encode(text))[None, :180]
    found = budget(maps_of(decoder, tokens), 32, 4, 0.9)
    heads = [w for layer in found.windows for w in layer]
    assert 0 < sum(w is not None for w in heads) < len(heads)
    assert found.cache_bytes(180) < found.full_cache_bytes(180)
    careful, careless = (
        budget_effect(decoder, [tokens], budget(maps_of(decoder, tokens), 32, 4, t)) for t in (0.9, 1e-9)
    )
    assert careful.short - careful.full < 0.1
    assert careful.short < careless.short
    lines = str(found).splitlines()
    assert len(lines) == 2 + decoder.config.num_layers
    assert f"{found.full_cache_bytes(180):,} → {found.cache_bytes(180):,}" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 5.0}, r"window=5\.0"),
        ({"window": 5, "sinks": -1}, "sinks=-1"),
        ({"window": 5, "threshold": 0.0}, r"threshold=0\.0"),
        ({"window": 5, "threshold": 95}, "threshold=95"),
        ({"window": 40}, "they cover all keys .* of 41 tokens"),
        ({"window": 5, "maps": []}, "maps: empty"),
    ],
)
def test_budgets_that_cannot_be_are_named(arguments: dict[str, Any], message: str) -> None:
    maps = arguments.pop("maps", None)
    with pytest.raises(HeadwiseError, match=message):
        budget(maps_of(made(), ids()) if maps is None else maps, **arguments)


def test_texts_of_other_models_are_refused() -> None:
    one, other = maps_of(made(), ids()), maps_of(made(num_layers=2), ids())
    with pytest.raises(ShapeError, match="maps: text 1 has layers"):
        budget([one, other], 5)


def test_calls_that_cannot_be_are_named() -> None:
    decoder = made()
    found = budget(maps_of(decoder, ids()), 5)
    with pytest.raises(ConfigError, match="batches: empty"):
        budget_effect(decoder, [], found)
    with pytest.raises(ConfigError, match="step=0"):
        budget_effect(decoder, [ids()], found, step=0)
    with pytest.raises(ShapeError, match=r"batches: expected \[batch, seq of at least 2\]"):
        budget_effect(decoder, [ids(1)], found)
    with pytest.raises(ConfigError, match=r"decoder|model: is in training mode"):
        budget_effect(decoder.train(), [ids()], found)
    with pytest.raises(ConfigError, match="tokens=-1"):
        found.cache_bytes(-1)


@pytest.mark.parametrize("n", [41, 9])
def test_maps_that_look_ahead_are_refused(n: int) -> None:
    """Also where only one head does, in one layer; and where the text is shorter than the window."""
    q, k, v = torch.randn(3, 1, 3, n, 5, generator=torch.Generator().manual_seed(1))
    maps = [hw.attend(q, k, v, mask=mask, return_map=True)[1] for mask in (hw.Causal(), None)]
    with pytest.raises(ConfigError, match="queries attend to later keys; expected causal maps"):
        budget(maps[::-1], 7, 2)
    with pytest.raises(ConfigError, match="queries attend to later keys"):
        budget([maps[:1], maps[1:]], 7, 2)
    last = hw.attend(q[:, :, -3:], k, v, mask=hw.Causal(), return_map=True)[1]  # queries stand at the end
    if n == 41:
        assert budget([last], 7, 2).tokens == n
