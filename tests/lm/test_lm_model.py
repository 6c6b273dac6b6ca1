"""The decoder: causal, the same with a cache as without, the same for the same seed."""

from typing import Any

import pytest
import torch

from headwise.cache import KVCache
from headwise.errors import ConfigError, HeadwiseError, ShapeError
from headwise.kernels import use_kernel
from headwise.lm.model import Decoder, DecoderConfig
from headwise.masks import HeadWindows, Window

SIZES: dict[str, Any] = {
    "vocab_size": 61, "d_model": 42, "num_layers": 3, "num_heads": 7, "d_ff": 55, "context": 29,
}  # fmt: skip


def made(seed: int = 0, **changes: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(**(SIZES | changes))).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(61, (2, 23), generator=torch.Generator().manual_seed(5))


def test_later_tokens_change_nothing_before_them(ids: torch.Tensor) -> None:
    decoder = made()
    changed = ids.clone()
    changed[:, 13:] = (ids[:, 13:] + 1) % 61
    one, other = decoder(ids), decoder(changed)
    assert one.shape == (2, 23, 61)
    assert torch.allclose(one[:, :13], other[:, :13], atol=1e-6)
    assert not torch.allclose(one[:, 13:], other[:, 13:], atol=1e-2)


@pytest.mark.parametrize("num_kv_heads", [None, 1])
def test_steps_with_a_cache_equal_one_pass(ids: torch.Tensor, num_kv_heads: int | None) -> None:
    decoder = made(num_kv_heads=num_kv_heads)
    caches = [KVCache() for _ in range(3)]
    steps = [decoder(part, caches=caches) for part in ids.split([11, 1, 1, 10], 1)]
    assert torch.allclose(torch.cat(steps, 1), decoder(ids), atol=1e-5)


def test_a_call_that_raises_leaves_all_caches_as_they_were(ids: torch.Tensor) -> None:
    decoder, caches = made(), [KVCache(), KVCache(), KVCache()]
    decoder(ids[:, :4], caches=caches)
    with pytest.raises(ShapeError, match="2 windows for 7 query heads"):
        decoder(ids[:, 4:7], mask=[Window(5), Window(5), HeadWindows([1, 2])], caches=caches)
    assert [cache.seen for cache in caches] == [4, 4, 4]
    torch.testing.assert_close(decoder(ids[:, 4:7], caches=caches), decoder(ids[:, :7])[:, 4:])


def test_maps_come_one_a_layer_and_leave_the_logits_alone(ids: torch.Tensor) -> None:
    decoder = made()
    logits, maps = decoder(ids, return_maps=True, measures=("entropy",))
    with use_kernel(maps[0].kernel):  # "auto" may pick another one where nothing is measured
        assert torch.equal(logits, decoder(ids))
    assert [amap.shape for amap in maps] == [(2, 7, 23, 23)] * 3
    for amap in maps:
        weights = amap.to_dense()
        assert torch.allclose(weights.sum(-1), torch.ones(2, 7, 23), atol=1e-5)
        assert weights.triu(1).max() == 0
        assert amap.measured["entropy"].shape == (2, 7)


def test_the_seed_gives_the_weights() -> None:
    one, same, other = (made(seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_the_first_loss_is_that_of_a_guess(ids: torch.Tensor) -> None:
    logits = made()(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:]).item()
    assert loss == pytest.approx(torch.tensor(61.0).log().item(), abs=0.7)


def test_parameters_are_those_of_the_formula() -> None:
    decoder = made()
    d, ff, layers = 42, 55, 3
    assert decoder.num_parameters == 61 * d + layers * (4 * d * d + 2 * d * ff + 2 * d) + d


def test_every_parameter_gets_a_gradient(ids: torch.Tensor) -> None:
    decoder = made(dropout=0.1).train()
    decoder(ids).logsumexp(-1).sum().backward()
    assert not [name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 510, "num_heads": 8}, "d_model=510 is not divisible by num_heads=8"),
        ({"num_kv_heads": 3}, "num_heads=7 is not divisible by num_kv_heads=3"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"context": 2.5}, "context=2.5"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
    ],
)
def test_sizes_that_cannot_be_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        made(**changes)


LAYERS: list[dict[str, Any]] = [
    {"num_heads": 3, "head_dim": 6}, {}, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "value_dim": 5},
]  # fmt: skip


def test_layers_may_have_sizes_of_their_own(ids: torch.Tensor) -> None:
    decoder = made(layers=LAYERS)
    attentions = [block.attention for block in decoder.blocks]
    sizes = [(a.num_heads, a.num_kv_heads, a.head_dim, a.value_dim) for a in attentions]
    assert sizes == [(3, 3, 6, 6), (7, 7, 6, 6), (4, 2, 2, 5)]
    assert decoder.config.layers == tuple(LAYERS)
    assert all(attention.rotary is not None for attention in attentions)
    caches = [KVCache() for _ in range(3)]
    steps = [decoder(part, caches=caches) for part in ids.split([11, 1, 11], 1)]
    assert torch.allclose(torch.cat(steps, 1), decoder(ids), atol=1e-5)
    _, maps = decoder(ids, return_maps=True)
    assert [amap.shape[1] for amap in maps] == [3, 7, 4]
    again = Decoder(DecoderConfig.from_dict(decoder.config.to_dict()))
    again.load_state_dict(decoder.state_dict())
    assert again.config == decoder.config


def test_alike_layers_are_written_as_before() -> None:
    assert "layers" not in made().config.to_dict()
    assert DecoderConfig.from_dict(made().config.to_dict()) == made().config


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{}], "layers: 1 mappings for num_layers=3"),
        ({"num_heads": 3}, "layers=.*expected a list of mappings"),
        ("abc", "layers='abc'"),
        ([{}, 3, {}], r"layers\[1\]=3: expected a mapping"),
        ([{}, {}, {"wings": 2}], r"layers\[2\]: 'wings' is not an option of multi_head; expected one of num_heads"),
        ([{}, {"rotary": False}, {}], r"layers\[1\]: 'rotary' is not an option"),
        ([{"num_heads": 0}, {}, {}], r"layers\[0\]: num_heads=0"),
        ([{"num_heads": 2.0}, {}, {}], r"layers\[0\]: num_heads=2\.0"),
        ([{"num_kv_heads": True}, {}, {}], r"layers\[0\]: num_kv_heads=True"),
        ([{"head_dim": [3]}, {}, {}], r"layers\[0\]: head_dim=\[3\]"),
        ([{"num_heads": 5}, {}, {}], "d_model=42 is not divisible by num_heads=5"),
    ],
)
def test_layers_that_cannot_be_are_named(layers: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        made(layers=layers)


def test_each_layer_may_have_a_mask_of_its_own(ids: torch.Tensor) -> None:
    decoder = made()
    masks = [Window(3), Window(29), Window(1)]
    logits, maps = decoder(ids, mask=masks, return_maps=True)
    for amap, mask in zip(maps, masks, strict=True):
        weights = amap.to_dense()
        assert weights.tril(-mask.left).max() == 0
        assert weights.triu(1).max() == 0
    assert torch.equal(decoder(ids, mask=[Window(5)] * 3), decoder(ids, mask=Window(5)))
    assert not torch.allclose(logits, decoder(ids), atol=1e-3)
    with pytest.raises(ShapeError, match="mask: expected one for each of the 3 layers, or one for all, got 2"):
        decoder(ids, mask=masks[:2])


def test_calls_that_cannot_be_are_named(ids: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="ids"):
        made()(ids[0])
    with pytest.raises(ShapeError, match="caches: expected one for each of the 3"):
        made()(ids, caches=[KVCache()])
    caches = made().new_caches()
    caches[1].append(*torch.randn(2, 2, 7, 3, 6))
    with pytest.raises(ConfigError, match=r"caches: have seen \[0, 3\] tokens; expected as many in each layer"):
        made()(ids, caches=caches)
    caches = [KVCache()] * 3
    with pytest.raises(ConfigError, match="caches: layers 0 and 1 have the same cache; expected one for each layer"):
        made()(ids, caches=caches)
    assert caches[0].seen == 0
    with pytest.raises(ConfigError, match="return_map"):
        made()(ids, measures=("entropy",))
