"""Caches change nothing but the time: prefill and decoding give what one pass over all tokens gives."""

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
import torch
from design_samples import CASES, design, given, once
from hypothesis import given as for_all, settings, strategies as st

import headwise as hw
from headwise.cache import BudgetCache, Cache, ChosenCache, KVCache, RaggedCache, SlidingCache
from headwise.costs import cache_bytes
from headwise.errors import ConfigError, DTypeError, HeadwiseError, ShapeError
from headwise.lm.model import Decoder, DecoderConfig
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Grid, HeadWindows, Mask, Sinks, Span, State, Window
from headwise.nn import SparseHeadMixture
from headwise.nn.base import AttentionLayer
from headwise.nn.registry import DESIGNS, counts_of
from parameters import each_value

CACHED = [(n, o) for n, o in CASES if DESIGNS[n].takes_cache and o.get("per") != "sequence"]
every = pytest.mark.parametrize(("name", "options"), once(CACHED), ids=lambda value: str(value))
CHUNKS = ([13], [1] * 13, [5, 1, 1, 6])
STORED = (None, "float32", "bfloat16", "float16", "int8")


def kv_heads(layer: AttentionLayer) -> int:
    """Heads of what the layer gives to a cache."""
    return 1 if hasattr(layer, "latent_dim") else layer.num_kv_heads


def windows(heads: int) -> list[int | None]:
    return [(3, None, 1, 20, 6)[i % 5] for i in range(heads)]


# Each kind of cache for a layer, and the mask that goes with it.
KINDS: dict[str, Callable[[AttentionLayer, str | None], tuple[Cache, Mask]]] = {
    "full": lambda layer, stored: (KVCache(stored=stored), Causal()),
    "capacity": lambda layer, stored: (KVCache(stored=stored, capacity=13), Causal()),
    "sliding": lambda layer, stored: (SlidingCache(4, stored=stored), Causal() & Window(4)),
    "sinks": lambda layer, stored: (SlidingCache(3, 2, stored=stored), Causal() & (Window(3) | Sinks(2))),
    "budgets": lambda layer, stored: _budgets(layer, 0, stored),
    "budgets, sinks": lambda layer, stored: _budgets(layer, 2, stored),
}


def _budgets(layer: AttentionLayer, sinks: int, stored: str | None) -> tuple[Cache, Mask]:
    cache = BudgetCache(windows(kv_heads(layer)), sinks, stored=stored)
    return cache, Causal() & cache.mask(layer.num_heads)


def stepped(layer: Any, x: torch.Tensor, cache: Cache, mask: Mask, chunks: list[int]) -> torch.Tensor:
    return torch.cat([layer(part, mask=mask, cache=cache) for part in x.split(chunks, 1)], 1)


# Each pair of the three; all three together where vectors are stored, below.
@pytest.mark.thorough_beyond(4)
@every
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", CHUNKS, ids=["at once", "one by one", "in parts"])
def test_every_cut_of_the_tokens_gives_one_full_pass(
    name: str, options: dict[str, Any], kind: str, chunks: list[int]
) -> None:
    layer, x = design(name, options, dtype=torch.float32), given(dtype=torch.float32)
    cache, mask = KINDS[kind](layer, None)
    if name == "talking_heads" and kind.startswith("budgets"):
        with pytest.raises(ConfigError, match=r"cache: .*mixes the scores of all heads.*equal windows"):
            stepped(layer, x, cache, mask, chunks)
        return
    torch.testing.assert_close(stepped(layer, x, cache, mask, chunks), layer(x, mask=mask))
    assert cache.seen == 13


# Every pair of a design, a kind and a dtype; all three together where vectors are stored as they are and in parts.
PLAIN = [name for name, options in CACHED if not options]
TOGETHER = [
    (name, kind, stored)
    for i, name in enumerate(PLAIN)
    for j, kind in enumerate(KINDS)
    for at, stored in enumerate(STORED)
    if name in ("multi_head", "latent") or (i + j + at) % len(STORED) == 0
]


@pytest.mark.thorough_except(
    "multi_head-full-None", "per_head-capacity-float16", "contraction-sliding-float32", "single_head-sinks-int8",
    "sparse_mixture-budgets, sinks-None",
)  # fmt: skip
@pytest.mark.parametrize(("name", "kind", "stored"), each_value(TOGETHER))
def test_what_is_stored_does_not_depend_on_the_cut(name: str, kind: str, stored: str | None) -> None:
    if name == "talking_heads" and kind.startswith("budgets"):
        return  # refused, see above
    # In float64, so that a projection's own rounding, which depends on the cut, moves no number to the next level.
    layer, x = design(name, {}), given()
    cache, mask = KINDS[kind](layer, stored)
    whole = layer(x, mask=mask, cache=cache)
    for chunks in CHUNKS[1:]:
        other, _ = KINDS[kind](layer, stored)
        torch.testing.assert_close(stepped(layer, x, other, mask, chunks), whole)
        assert other.nbytes == cache.nbytes
    exact = layer(x, mask=mask)
    error = ((whole - exact).norm() / exact.norm()).item()
    assert error < {None: 1e-14, "float32": 1e-6, "bfloat16": 0.01, "float16": 2e-3, "int8": 0.02}[stored]
    assert (error == 0) == (stored is None)


SIZES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in DESIGNS] + [
    ("multi_head", {"num_kv_heads": 2, "value_dim": 5}), ("multi_head", {"num_kv_heads": 1, "head_dim": 3}),
    ("latent", {"latent_dim": 7, "rope_dim": 4}), ("latent", {"rope_dim": 0}), ("per_head", {"num_kv_heads": 3}),
]  # fmt: skip


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize(("name", "options"), SIZES, ids=lambda value: str(value))
def test_bytes_are_those_of_the_plan(name: str, options: dict[str, Any], stored: str) -> None:
    heads = {} if name == "single_head" else {"num_heads": 6}
    counts = counts_of(name, {"d_model": 12, **heads, **options})
    if not counts.cached:
        assert not DESIGNS[name].takes_cache
        return
    layer, x = DESIGNS[name].build(12, 6, **options), given(b=3, dtype=torch.float32)
    parts = (layer.latent_dim, layer.rope_dim) if name == "latent" and stored == "int8" else None
    more: dict[str, Any] = {"stored": stored, "key_parts": parts}

    def planned(tokens: int, window: int | None = None, sinks: int = 0, batch: int = 3) -> int:
        return cache_bytes(counts, tokens, batch=batch, dtype=stored, window=window, sinks=sinks)

    full, sliding = KVCache(**more), SlidingCache(4, 2, **more)
    heads_of_cache = kv_heads(layer)
    # Talking heads need the same tokens of all heads.
    own = [4] * heads_of_cache if name == "talking_heads" else windows(heads_of_cache)
    budgets, ragged = BudgetCache(own, 1, **more), RaggedCache([5, 2, 1], **more)
    assert full.nbytes == sliding.nbytes == budgets.nbytes == ragged.nbytes == 0
    tokens = 0
    for part in x.split([5, 1, 7], 1):
        tokens += part.shape[1]
        for cache in (full, sliding, budgets):
            layer(part, mask=Causal(), cache=cache)
        layer(part, mask=Causal() & ragged.mask(part.shape[1]), cache=ragged)
        assert full.nbytes == planned(tokens)
        assert sliding.nbytes == planned(tokens, 4, 2)
        each = [planned(tokens, window, 1 if window else 0) for window in budgets.windows]
        assert budgets.nbytes == sum(each) // heads_of_cache
        assert ragged.nbytes == planned(tokens)  # as many as the longest sequence has


def test_equal_budgets_are_a_sliding_cache() -> None:
    layer, x = design("talking_heads", {"num_kv_heads": 2}), given()
    cache = BudgetCache([4, 4], 1)
    mask = Causal() & (Window(4) | Sinks(1))
    torch.testing.assert_close(stepped(layer, x, cache, mask, [5, 1, 7]), layer(x, mask=mask))
    torch.testing.assert_close(layer(x, mask=Causal() & cache.mask(6)), layer(x, mask=mask))


def test_without_a_dtype_bytes_are_those_of_what_came() -> None:
    for dtype, size in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)):
        cache = KVCache()
        k, v = cache.append(torch.ones(2, 3, 5, 7, dtype=dtype), torch.ones(2, 3, 5, 11, dtype=dtype))
        assert cache.nbytes == 2 * 3 * 5 * (7 + 11) * size
        assert k.dtype == v.dtype == dtype


def test_a_full_cache_is_read_without_a_copy() -> None:
    cache = KVCache()
    cache.append(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))
    k, v = cache.append(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
    again, _ = cache.append(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
    assert k.data_ptr() == again.data_ptr() != v.data_ptr()
    assert torch.equal(again[:, :, :6], k)


def test_what_a_sliding_cache_gave_stays_as_it_is() -> None:
    cache, x = SlidingCache(3, 1), torch.randn(1, 2, 9, 4)
    given_out = [cache.append(part, part)[0] for part in x.split(1, 2)]
    copies = [part.clone() for part in given_out]
    cache.append(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    assert all(torch.equal(one, other) for one, other in zip(given_out, copies, strict=True))
    assert torch.equal(given_out[-1], x[:, :, [0, 6, 7, 8]])


@pytest.mark.thorough_beyond(4)
@every
def test_sequences_of_different_length_are_as_if_alone(name: str, options: dict[str, Any]) -> None:
    layer, lengths = design(name, options, dtype=torch.float32), [7, 1, 4]
    x = given(11, b=3, dtype=torch.float32)
    for i, length in enumerate(lengths):
        x[i, : 7 - length] = 1e3  # padding, which must not be heard
    cache = RaggedCache(lengths)
    parts = x.split([7, 1, 1, 2], 1)
    together = torch.cat([layer(p, mask=Causal() & cache.mask(p.shape[1]), cache=cache) for p in parts], 1)
    assert cache.lengths == [11, 5, 8]
    for i, length in enumerate(lengths):
        alone = layer(x[i : i + 1, 7 - length :], mask=Causal())
        torch.testing.assert_close(together[i : i + 1, 7 - length :], alone, rtol=2e-5, atol=2e-5)


def test_a_prompt_may_be_padded_more_than_needed() -> None:
    layer, x = design("multi_head", {"rotary": True}), given(9)
    cache = RaggedCache([3, 2])
    first = layer(x[:, :8], mask=Causal() & cache.mask(8), cache=cache)
    last = layer(x[:, 8:], mask=Causal() & cache.mask(1), cache=cache)
    alone = layer(x[:1, 5:], mask=Causal())
    torch.testing.assert_close(torch.cat((first, last), 1)[:1, 5:], alone, rtol=1e-5, atol=1e-5)


def test_a_decoder_reads_prompts_of_different_length() -> None:
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(31, d_model=24, num_layers=3, num_heads=6, num_kv_heads=2, d_ff=20)).eval()
    ids, lengths = torch.randint(31, (3, 12)), [8, 3, 5]
    caches = [RaggedCache(lengths) for _ in decoder.blocks]
    parts = ids.split([8, 1, 1, 2], 1)
    logits = torch.cat([decoder(p, mask=caches[0].mask(p.shape[1]), caches=caches) for p in parts], 1)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(logits[i : i + 1, 8 - length :], decoder(ids[i : i + 1, 8 - length :]))


@for_all(
    st.lists(st.one_of(st.none(), st.integers(1, 12)), min_size=1, max_size=4), st.integers(0, 5), st.integers(1, 11),
    st.integers(0, 9), st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_head_windows_are_their_formula(
    sizes: list[int | None], sinks: int, n: int, before: int, data: st.DataObject
) -> None:
    mask, h, m = HeadWindows(sizes, sinks), len(sizes), n + before
    dense = mask.to_dense(n, m, heads=h)
    for head, size in enumerate(sizes):
        for i in range(n):
            for j in range(m):
                near = size is None or (i + before) - j < size
                assert dense[0, head, i, j] == (near or j < sinks)
        assert torch.equal(mask.only(0, head, Grid(1, h, n, m)).to_dense(n, m)[0, 0], dense[0, head])
    row, column = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, m - 1))
    rows, cols = (
        Span(row, data.draw(st.integers(row + 1, n))),
        Span(column, data.draw(st.integers(column + 1, m))),
    )  # fmt: skip
    tile = dense[:, :, rows.start : rows.stop, cols.start : cols.stop]
    state = mask.state(rows, cols, Grid(1, h, n, m))
    assert state is not State.FULL or tile.all()
    assert state is not State.EMPTY or not tile.any()


def test_head_windows_are_attended_to_as_their_matrix() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 9, 8), torch.randn(2, 3, 17, 8), torch.randn(2, 3, 17, 5)
    mask = Causal() & HeadWindows([3, 3, None, None, 1, 1], 2)
    dense = Dense(mask.to_dense(9, 17, heads=6))
    torch.testing.assert_close(attend(q, k, v, mask=mask), attend(q, k, v, mask=dense, kernel="reference"))


def kv(b: int = 2, h: int = 3, n: int = 4, d: int = 8, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(b, h, n, d, **options), torch.ones(b, h, n, d, **options)


MAKE: dict[str, Callable[[], Cache]] = {
    "full": KVCache,
    "int8": lambda: KVCache(stored="int8"),
    "sliding": lambda: SlidingCache(3, 1),
    "budgets": lambda: BudgetCache([3, None, 1]),
    "ragged": lambda: RaggedCache([4, 2]),
}


@pytest.mark.parametrize("kind", MAKE)
def test_keys_of_another_layer_or_dtype_are_refused_and_change_nothing(kind: str) -> None:
    cache = MAKE[kind]()
    cache.append(*kv())
    before = cache.nbytes
    for sizes in ({"b": 1}, {"h": 1}, {"d": 6}):
        with pytest.raises(ShapeError, match="do not match the cached ones"):
            cache.append(*kv(**sizes))
    with pytest.raises(
        ShapeError, match="do not match the cached ones"
    ):  # values of another width, as of another design
        cache.append(torch.ones(2, 3, 1, 8), torch.ones(2, 3, 1, 0))
    with pytest.raises(DTypeError, match=r"torch\.bfloat16.*torch\.float32; use a new cache"):
        cache.append(*kv(dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="differ in batch, heads or tokens"):
        cache.append(torch.ones(2, 3, 1, 8), torch.ones(2, 3, 2, 8))
    assert (cache.seen, cache.nbytes) == (4, before)
    k, _ = cache.append(*kv(n=1))
    assert cache.seen == 5
    assert k.isfinite().all()


def test_a_layer_of_another_design_is_told() -> None:
    cache, x = KVCache(), given(dtype=torch.float32)
    design("multi_head", {}, dtype=torch.float32)(x, mask=Causal(), cache=cache)
    with pytest.raises(ShapeError, match=r"do not match the cached ones.*each layer, each design"):
        design("latent", {}, dtype=torch.float32)(x, mask=Causal(), cache=cache)
    with pytest.raises(DTypeError, match="float64"):
        design("multi_head", {})(x.double(), mask=Causal(), cache=cache)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SlidingCache(0), "window=0"),
        (lambda: SlidingCache(-3), "window=-3"),
        (lambda: SlidingCache(2.5), "window=2.5"),  # type: ignore[arg-type]
        (lambda: SlidingCache(3, -1), "sinks=-1"),
        (lambda: BudgetCache([3, 0]), "window=0"),
        (lambda: BudgetCache([]), "windows="),
        (lambda: BudgetCache([3], -1), "sinks=-1"),
        (lambda: HeadWindows([-1]), "window=-1"),
        (lambda: HeadWindows([2], -2), "sinks=-2"),
        (lambda: RaggedCache([]), "lengths="),
        (lambda: RaggedCache([3, 0]), "length=0"),
        (lambda: RaggedCache([3]).mask(-1), "n=-1"),
        (lambda: BudgetCache(torch.tensor(3)), r"BudgetCache\(windows=tensor\(3\)\): expected one window per head"),
        (lambda: RaggedCache(torch.tensor(3)), r"RaggedCache\(lengths=tensor\(3\)\): expected one length per"),
        (lambda: RaggedCache({5, 2}), r"lengths=\{2, 5\}"),  # type: ignore[arg-type]
        (lambda: KVCache(stored="int8", key_parts=3), "key_parts=3"),  # type: ignore[arg-type]
        (lambda: KVCache(stored=["int8"]), r"stored=\['int8'\]: expected None"),  # type: ignore[arg-type]
        (lambda: KVCache(capacity=0), "capacity=0"),
        (lambda: KVCache(stored="int4"), "stored='int4'.*int8"),
        (lambda: KVCache(key_parts=(3, 4)), "key_parts=.*stored='int8'"),
        (lambda: KVCache(stored="int8", key_parts=(3, -4)), "key_parts=-4"),
    ],
)
def test_options_that_cannot_be_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: BudgetCache([3, 4]).append(*kv()), r"2 windows, but keys \(2, 3, 4, 8\) of 3"),
        (lambda: BudgetCache([3, 4]).mask(3), "num_heads=3 is not a multiple of the 2 windows"),
        (lambda: RaggedCache([1, 2, 3]).append(*kv()), r"3 lengths, but keys \(2, 3, 4, 8\) of 2"),
        (lambda: RaggedCache([5, 2]).append(*kv()), "a prompt of 5 tokens, but the first call has 4"),
        (lambda: KVCache(capacity=3).append(*kv()), r"capacity=3\): holds 0 tokens, and 4 more do not fit"),
        (lambda: KVCache(stored="int8", key_parts=(3, 4)).append(*kv()), r"key_parts=\(3, 4\) add up to 7, .*width 8"),
        (
            lambda: attend(*torch.ones(3, 1, 4, 5, 8), mask=HeadWindows([2, 3])),
            "2 windows for 4 query heads",
        ),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words):
        call()


@pytest.mark.parametrize("kind", [*MAKE, "chosen"])
def test_wrong_keys_and_values_are_named(kind: str) -> None:
    cache, (k, v) = (MAKE | {"chosen": ChosenCache})[kind](), kv()
    wrong: list[tuple[Any, Any, str]] = [
        (k[0, 0, 0, 0], v, r"cache: k: expected \[batch, heads, tokens, width\], got shape \(\)"),
        (k, v[..., 0], r"cache: v: expected \[batch, heads, tokens, width\], got shape \(2, 3, 4\)"),
        (None, v, "cache: k: expected a torch.Tensor, got NoneType"),
        (k, v.numpy(), "cache: v: expected a torch.Tensor, got ndarray"),
        (k.long(), v, r"cache: k: expected a floating dtype, got torch\.int64"),
        (k, v.to_sparse(), "cache: v: expected a dense tensor"),
        (k, v.to("meta"), "k is on cpu, but v is on meta"),
    ]
    for x, y, words in wrong:
        with pytest.raises(HeadwiseError, match=words):
            cache.append(x, y)
    assert (cache.seen, cache.nbytes) == (0, 0)


def test_no_token_leaves_the_holes_of_selected_heads() -> None:
    layer, cache = SparseHeadMixture(24, 4, top_k=2, keys="chosen"), ChosenCache()
    x, allowed = torch.randn(2, 6, 24), torch.ones(1, 1, 1, 6, dtype=torch.bool)
    nothing, first = x[:, :0], layer(x[:, :0], cache=cache, return_map=True)[1]
    layer(x, mask=Causal(), cache=cache)
    held = cache.nbytes
    y, amap = layer(nothing, mask=allowed, cache=cache, return_map=True)
    assert (y.shape, first.shape, amap.shape) == ((2, 0, 24), (2, 4, 0, 0), (2, 4, 0, 6))
    assert (cache.seen, cache.nbytes) == (6, held)
    assert torch.equal(cache.append(*torch.empty(2, 2, 4, 0, 6))[0].any(-1), cache.chosen.mT)
    assert layer(x[:0], cache=ChosenCache()).shape == (0, 6, 24)


def test_a_cache_takes_as_many_tokens_as_it_has_room_for() -> None:
    cache = KVCache(capacity=5, stored="int8")
    cache.append(*kv())
    cache.append(*kv(n=1))
    with pytest.raises(ShapeError, match="holds 5 tokens, and 1 more"):
        cache.append(*kv(n=1))
    assert cache.seen == 5


@pytest.mark.parametrize("parts", [[12], [1] * 12, [5, 1, 1, 3, 2]])
@pytest.mark.parametrize(
    ("make", "mask"),
    [
        (lambda: SlidingCache(4, sinks=2), Window(4) | Sinks(2)),
        (lambda: BudgetCache([3, None], sinks=1), HeadWindows([3, 3, None, None], sinks=1)),
        (lambda: BudgetCache([4, 4]), Window(4)),
    ],
)
def test_a_cache_masks_by_itself_what_it_does_not_hold(make, mask, parts):
    layer, x = hw.MultiHeadAttention(24, 4, num_kv_heads=2, rotary=True).eval(), torch.randn(2, 12, 24)
    cache = make()
    with torch.no_grad():
        found = torch.cat([layer(part, mask=Causal(), cache=cache) for part in x.split(parts, 1)], 1)
        torch.testing.assert_close(found, layer(x, mask=Causal() & mask), rtol=1e-4, atol=1e-5)
    assert f"12 tokens seen, {cache.nbytes:,} bytes" in repr(cache)


@pytest.mark.parametrize(
    "make",
    [lambda: SlidingCache(4), lambda: SlidingCache(3, 2), lambda: BudgetCache([4, 4]), lambda: BudgetCache([3, None])],
)
def test_no_cache_hides_new_tokens(make: Callable[[], Cache]) -> None:
    """Those after a query too, unless a mask does, whether a map is returned or not."""
    layer, x = hw.MultiHeadAttention(24, 4, num_kv_heads=2).double(), torch.randn(2, 11, 24).double()
    cache, windows = make(), getattr(make(), "windows", None) or [make().window] * 2
    sees = HeadWindows([w for w in windows for _ in range(2)], cache.sinks)
    for start, stop in ((0, 5), (5, 6), (6, 11)):
        part, together = x[:, start:stop], copy(cache)
        expected = layer(x[:, :stop], mask=sees)[:, start:]
        torch.testing.assert_close(layer(part, cache=cache), expected)
        torch.testing.assert_close(layer(part, cache=together, return_map=True)[0], expected)


@pytest.mark.parametrize("mask", [None, Causal()], ids=["no mask", "causal"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: SlidingCache(4),
        lambda: SlidingCache(3, 2),
        lambda: BudgetCache([3, None]),
        lambda: RaggedCache([6, 4]),
    ],
)
def test_no_token_is_a_call_too(make: Callable[[], Cache], mask: Mask | None) -> None:
    layer, x, cache = hw.MultiHeadAttention(24, 4, num_kv_heads=2), torch.randn(2, 6, 24), make()
    score = (hw.ALiBi.standard(4), hw.RelativeBias(torch.randn(4, 12), -11))  # whose tables are joined across a gap
    for start, stop in ((0, 0), (0, 6), (6, 6))[isinstance(cache, RaggedCache) :]:  # its first call has the prompts
        for added in ((), score):
            y = layer(x[:, start:stop], mask=mask, score=added, cache=copy(cache))
            assert y.shape == (2, stop - start, 24)
        layer(x[:, start:stop], mask=mask, cache=cache)
    assert cache.seen == 6


def test_a_ragged_cache_masks_its_padding_by_itself():
    layer, cache = hw.MultiHeadAttention(24, 4, rotary=True).eval(), RaggedCache([5, 2])
    x = torch.randn(2, 7, 24)
    with torch.no_grad():
        found = torch.cat([layer(part, mask=Causal(), cache=cache) for part in x.split([5, 1, 1], 1)], 1)
        torch.testing.assert_close(found[0], layer(x[:1], mask=Causal())[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1, 3:], layer(x[1:, 3:], mask=Causal())[0], rtol=1e-4, atol=1e-5)
    assert "lengths=[7, 4]" in repr(cache)
