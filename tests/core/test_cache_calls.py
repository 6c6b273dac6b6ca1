"""What a call does to a cache: gradients flow through it, a call that fails leaves it, and its gaps are known."""

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.cache import BudgetCache, Cache, KVCache, RaggedCache, SlidingCache
from headwise.cache.base import Rows
from headwise.errors import HeadwiseError, ShapeError
from headwise.lm.model import Decoder, DecoderConfig
from headwise.masks import Forbidden, HeadWindows, Mask
from headwise.nn import SparseHeadMixture

KINDS: dict[str, Callable[[], Cache]] = {
    "full": KVCache,
    "capacity": lambda: KVCache(capacity=32),
    "int8": lambda: KVCache(stored="int8"),
    "rounded": lambda: KVCache(stored="float32"),
    "sliding": lambda: SlidingCache(4, sinks=1),
    "budget": lambda: BudgetCache([4, None], sinks=1),
    "ragged": lambda: RaggedCache([5, 3]),
}


def layer_and(n: int = 20) -> tuple[hw.MultiHeadAttention, torch.Tensor]:
    torch.manual_seed(0)
    return hw.MultiHeadAttention(16, 2), torch.randn(2, n, 16)


@pytest.mark.parametrize("kind", ["full", "capacity", "rounded", "wide window", "wide budgets"])
def test_gradients_flow_to_cached_keys_and_values(kind: str) -> None:
    wide: dict[str, Callable[[], Cache]] = {
        "wide window": lambda: SlidingCache(20), "wide budgets": lambda: BudgetCache([20, None]),
    }  # fmt: skip
    layer, x = layer_and()
    found, cache = [], {**KINDS, **wide}[kind]()
    for split in ([20], [12, 1, 1, 6]):
        one, held = deepcopy(layer), cache if len(split) > 1 else None
        y = torch.cat([one(part, mask=hw.Causal(), cache=held) for part in x.split(split, 1)], 1)
        y.square().sum().backward()
        found.append([p.grad for p in one.parameters()])
    for grad, expected in zip(*found, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_decoding_goes_on_without_gradients() -> None:
    layer, x = layer_and()
    cache = KVCache()
    y = layer(x[:, :12], mask=hw.Causal(), cache=cache)
    with torch.no_grad():
        rest = [layer(part, mask=hw.Causal(), cache=cache) for part in x[:, 12:].split(1, 1)]
    torch.testing.assert_close(torch.cat([y, *rest], 1), layer(x, mask=hw.Causal()))
    y.sum().backward()


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_leaves_the_cache(kind: str) -> None:
    layer, x = layer_and()
    with torch.no_grad():
        cache = KINDS[kind]()
        layer(x[:, :5], mask=hw.Causal(), cache=cache)
        other, seen, held = deepcopy(cache), cache.seen, cache.nbytes
        wrong = [
            {"score": hw.SinkLogits(torch.zeros(3))},
            {"mask": hw.Lengths([99, 1])},
            {"mask": torch.ones(2, 1, 1, 4, dtype=torch.bool)},
            {"return_map": True, "measures": ["entropyy"]},
            {"measures": ["entropy"]},
        ]
        for options in wrong:
            with pytest.raises(HeadwiseError):
                layer(x[:, 5:6], cache=cache, **options)
            assert (cache.seen, cache.nbytes) == (seen, held)
        for part in x[:, 5:].split(1, 1):
            assert torch.equal(layer(part, mask=hw.Causal(), cache=cache), layer(part, mask=hw.Causal(), cache=other))


@pytest.mark.parametrize("kind", ["full", "int8", "sliding", "budget", "ragged"])
def test_a_decoder_that_fails_after_its_caches_have_grown_leaves_them(kind: str) -> None:
    """Those that only append hold one memory at a time meanwhile: the earlier one is free when the next layer runs."""
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(vocab_size=9, d_model=16, num_heads=2, num_layers=2, d_ff=8, context=99)).eval()
    caches, ids = [KINDS[kind](), KINDS[kind]()], torch.randint(9, (2, 64))
    with torch.no_grad():
        decoder(ids, caches=caches)
        expected = decoder(ids[:, :5], caches=deepcopy(caches))
        rooms = [weakref.ref(x._room) for x in rows_of(caches[0])]
        held = []

        def fail(*_: object) -> None:
            held.extend(room() for room in rooms)
            raise KeyboardInterrupt

        handle = decoder.blocks[1].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            decoder(ids[:, :5], caches=caches)
        handle.remove()
        assert [cache.seen for cache in caches] == [64, 64]
        if kind in ("full", "int8"):
            assert held == [None, None]
        assert torch.equal(decoder(ids[:, :5], caches=caches), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_stay_without_gradients_if_a_call_with_gradients_fails(kind: str) -> None:
    layer, x = layer_and()
    cache = KINDS[kind]()
    with torch.no_grad():
        layer(x[:, :5], mask=hw.Causal(), cache=cache)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    rooms = [rows._room for rows in rows_of(cache)]
    list(layer.children())[-1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        layer(x[:, 5:6], mask=hw.Causal(), cache=cache)
    assert cache.seen == 5
    assert all(rows._room is room for rows, room in zip(rows_of(cache), rooms, strict=True))


def rows_of(cache: Any) -> list[Rows]:
    return [rows for each in getattr(cache, "_caches", [cache]) for rows in (each._k, each._v)]


def test_a_call_that_fails_leaves_the_cache_of_selected_heads() -> None:
    torch.manual_seed(0)
    layer = SparseHeadMixture(16, 4, top_k=2, keys="chosen").eval()
    x = torch.randn(1, 8, 16)
    with torch.no_grad():
        cache = layer.new_cache()
        layer(x[:, :5], mask=hw.Causal(), cache=cache)
        other = deepcopy(cache)
        with pytest.raises(HeadwiseError):
            layer(x[:, 5:6], mask=hw.Causal(), cache=cache, return_map=True, measures=["entropyy"])
        with pytest.raises(HeadwiseError):
            layer(x[:, 5:6], mask=hw.Causal() & hw.Lengths([3, 3]), cache=cache)
        for part in x[:, 5:].split(1, 1):
            assert torch.equal(layer(part, mask=hw.Causal(), cache=cache), layer(part, mask=hw.Causal(), cache=other))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sliding", "equal budgets"])
def test_a_tensor_may_have_the_dropped_keys_or_not(kind: str) -> None:
    layer, x = layer_and()
    make = KINDS["sliding"] if kind == "sliding" else lambda: BudgetCache([4, 4], sinks=1)
    real = torch.rand(2, 1, 1, 20) > 0.3
    real[..., 0] = True
    with torch.no_grad():
        expected = layer(x, mask=hw.Causal() & (hw.Window(4) | hw.Sinks(1)) & hw.Dense(real.expand(-1, -1, 20, -1)))
        whole, held = make(), make()
        for i, part in enumerate(x.split(1, 1)):
            mask = real[..., : i + 1]
            torch.testing.assert_close(layer(part, mask=mask, cache=whole), expected[:, i : i + 1])
            there = mask if i < 4 else torch.cat((mask[..., :1], mask[..., i - 3 :]), -1)
            torch.testing.assert_close(layer(part, mask=there, cache=held), expected[:, i : i + 1])
        with pytest.raises(ShapeError):
            layer(x[:, :1], mask=real[..., :9], cache=whole)


OWN_MASKS: dict[str, Mask] = {
    "a wider window": hw.Window(7),
    "a narrower window": hw.Window(2),
    "more sinks": hw.Window(2) | hw.Sinks(3),
    "documents": hw.Documents(torch.arange(20) // 7),
    "padding": hw.Lengths([18, 20], side="right"),
    "forbidden": Forbidden(torch.ones(20, dtype=torch.bool), torch.arange(20) % 4 == 3),
    "windows of heads": HeadWindows([9, 2], sinks=1),
}


@pytest.mark.thorough_except(
    "a wider window-<lambda>0", "a narrower window-<lambda>1", "padding-<lambda>0", "forbidden-<lambda>1"
)
@pytest.mark.parametrize("make", [
    lambda: SlidingCache(4), lambda: SlidingCache(4, sinks=2), lambda: BudgetCache([5, 3], sinks=1),
    lambda: BudgetCache([4, None], sinks=1),
])  # fmt: skip
@pytest.mark.parametrize("name", OWN_MASKS)
def test_a_mask_counts_the_tokens_that_a_cache_has_dropped(make: Callable[[], Cache], name: str) -> None:
    layer, x = layer_and()
    cache, whole = make(), hw.Causal() & OWN_MASKS[name]
    limits = cache.mask(2) if isinstance(cache, BudgetCache) else hw.Window(4) | hw.Sinks(cache.sinks)
    dense, seen = whole.to_dense(20, 20, batch=2, heads=2), 0
    with torch.no_grad():
        expected = layer(x, mask=whole & limits)
        for n in (5, 1, 1, 1, 3, 1, 1, 7):
            rows, seen = slice(seen, seen + n), seen + n
            for mask, held in ((_of(whole, rows, seen), deepcopy(cache)), (dense[..., rows, :seen], cache)):
                torch.testing.assert_close(layer(x[:, rows], mask=mask, cache=held), expected[:, rows])


def _of(whole: Mask, rows: slice, seen: int) -> Mask:
    """The mask of some queries over the tokens so far, of the same kind where it holds numbers of all tokens."""
    own = whole.right  # Causal() & own
    if isinstance(own, hw.Documents):
        own = hw.Documents(own.ids[:, :seen])
    elif isinstance(own, hw.Lengths):
        own = hw.Lengths(own.keys - (20 - seen), side="right")
    elif isinstance(own, Forbidden):
        own = Forbidden(own.queries[0, rows], own.keys[0, :seen])
    return hw.Causal() & own


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make", [lambda: SlidingCache(6, sinks=2), lambda: BudgetCache([6, 5], sinks=1)], ids=["sliding", "budgets"]
)
@pytest.mark.parametrize("mask", [hw.Causal(), hw.Causal() & hw.Window(8)], ids=["causal", "window"])
def test_one_graph_serves_every_step(make: Callable[[], Cache], mask: Mask) -> None:
    layer, x = layer_and()
    torch.compiler.reset()
    # Compiled too often, fullgraph raises. What AOTAutograd makes of such graphs is tested with scores.
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    cache, other = make(), make()
    start = 5 if mask == hw.Causal() else 0  # of a cache that soon drops the first token, or of an empty one
    with torch.no_grad():
        for one in (cache, other):
            layer(x[:, :start], mask=mask, cache=one)
        found, expected = (
            torch.cat([call(part, mask=mask, cache=one) for part in x[:, start:].split(1, 1)], 1)
            for call, one in ((compiled, cache), (layer, other))
        )
    # Parts of a BudgetCache lie elsewhere in a graph, and are then summed in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
