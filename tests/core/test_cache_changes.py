"""Copies, `crop` and `select` of a cache: the next call is the same as of a full pass over the tokens that are left."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from design_samples import CASES, design, given, once

import headwise as hw
from headwise.cache import BudgetCache, ChosenCache, KVCache, RaggedCache, SlidingCache
from headwise.cache.base import Mark
from headwise.cache.storage import Room
from headwise.errors import ConfigError, HeadwiseError, ShapeError
from headwise.kernels.quantized import QuantizedKV, Vectors, decoded
from headwise.lm.model import Decoder, DecoderConfig
from headwise.masks import Causal, HeadWindows, Mask, Sinks, Window
from headwise.nn import SparseHeadMixture
from headwise.nn.registry import DESIGNS

MAKE: dict[str, Callable[[], Any]] = {
    "full": KVCache,
    "capacity": lambda: KVCache(capacity=40),
    "int8": lambda: KVCache(stored="int8"),
    "sliding": lambda: SlidingCache(5),
    "sinks": lambda: SlidingCache(4, 2, stored="int8"),
    "budgets": lambda: BudgetCache([None, 4, 1], 1),
    "equal budgets": lambda: BudgetCache([6] * 3),
    "ragged": lambda: RaggedCache([5, 3]),
}
SHORT: dict[str, Mask] = {  # those that drop tokens
    "sliding": Window(5),
    "sinks": Window(4) | Sinks(2),
    "budgets": HeadWindows([None, None, 4, 4, 1, 1], 1),
    "equal budgets": Window(6),
}
every = pytest.mark.parametrize("kind", MAKE)


@pytest.fixture(params=["no_grad", "inference_mode"])
def without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with getattr(torch, request.param)():
        yield


def layer_and(n: int = 20) -> tuple[hw.MultiHeadAttention, torch.Tensor]:
    """In float64, in which int8 vectors do not depend on how the tokens are split into calls."""
    torch.manual_seed(0)
    return hw.MultiHeadAttention(24, 6, num_kv_heads=3, rotary=True).double(), torch.randn(2, n, 24).double()


def filled(kind: str, layer: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A cache that has seen x, in a call of 5 and then one by one, and the outputs."""
    cache = MAKE[kind]()
    parts = x.split([5, *[1] * (x.shape[1] - 5)], 1)
    return cache, torch.cat([layer(part, mask=Causal(), cache=cache) for part in parts], 1)


@pytest.mark.thorough
@every
@pytest.mark.parametrize("before", [5, 12])
@pytest.mark.usefixtures("without_gradients")
def test_copies_are_independent(kind: str, before: int) -> None:
    layer, x = layer_and()
    others = [torch.cat((x[:, :before], torch.randn(2, 8, 24).double()), 1) for _ in range(3)]
    expected = [filled(kind, layer, one)[1][:, before:] for one in others]
    caches = [filled(kind, layer, x[:, :before])[0]]
    caches += [copy(caches[0])]
    caches += [copy(caches[1])]
    found: list[list[torch.Tensor]] = [[], [], []]
    for i in range(before, before + 8):  # in turn, so that each writes where another has written
        for one, cache, out in zip(others, caches, found, strict=True):
            out.append(layer(one[:, i : i + 1], mask=Causal(), cache=cache))
    for out, wanted, cache in zip(found, expected, caches, strict=True):
        assert torch.equal(torch.cat(out, 1), wanted)
        assert cache.seen == before + 8


def test_copies_share_memory_until_one_writes_where_another_has_written() -> None:
    cache, x = KVCache(), torch.randn(1, 2, 5, 4)
    cache.append(x, x)
    other, one = copy(cache), x[:, :, :1]
    first, second, again = (held.append(one, one)[0].data_ptr() for held in (cache, other, other))
    assert first != second == again
    assert cache.append(one, one)[0].data_ptr() == first


@pytest.mark.parametrize("kind", ["full", "capacity", "sliding", "ragged"])
def test_copies_go_on_in_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two of them write to the same place, even if all look at once whether they may."""
    looks = Room.writable

    def slow(self: Room, at: int) -> bool:
        found = looks(self, at)
        time.sleep(0.002)
        return found

    def step(cache: Any, number: int) -> list[float]:
        with torch.no_grad():
            keys, values = cache.append(*torch.full((2, 2, 3, 1, 4), float(number)))
        return [*keys[:, :, -1].unique().tolist(), *values[:, :, -1].unique().tolist()]

    prompt = MAKE[kind]()
    prompt.append(*torch.ones(2, 2, 3, 9, 4))
    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(Room, "writable", slow)
        found = list(pool.map(step, [copy(prompt) for _ in range(3)], range(3)))
    assert found == [[i, i] for i in range(3)]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["full", "capacity", "int8", "ragged"])
@pytest.mark.usefixtures("without_gradients")
def test_rejected_tokens_leave_no_trace(kind: str) -> None:
    layer, x = layer_and()
    _, expected = filled(kind, layer, x)
    cache, _ = filled(kind, layer, x[:, :5])
    for at in range(5, 18, 2):  # four are proposed, and two accepted
        proposed = torch.cat((x[:, at : at + 2], torch.randn(2, 2, 24).double()), 1)
        found = layer(proposed, mask=Causal(), cache=cache)[:, :2]
        torch.testing.assert_close(found, expected[:, at : at + 2], rtol=0, atol=1e-12)
        cache.crop(at + 2)
        assert cache.seen == at + 2
        assert cache.nbytes == filled(kind, layer, x[:, : at + 2])[0].nbytes


@pytest.mark.thorough_except("no_grad-5-full", "no_grad-5-sliding", "no_grad-7-capacity", "inference_mode-6-sinks")
@every
@pytest.mark.parametrize("seen", [5, 6, 7, 11])
@pytest.mark.usefixtures("without_gradients")
def test_a_crop_is_exact_or_refused(kind: str, seen: int) -> None:
    layer, x = layer_and()
    held = (SHORT.get(kind, Causal()) & Causal()).to_dense(seen + 1, seen + 1, heads=6)[0, :, -1, :seen]
    for length in range(seen + 1):
        cache, _ = filled(kind, layer, x[:, :seen])
        read = (SHORT.get(kind, Causal()) & Causal()).to_dense(length + 1, length + 1, heads=6)[0, :, -1, :length]
        if length < seen and bool((read & ~held[:, :length]).any()):
            before = deepcopy(cache)
            with pytest.raises(ConfigError, match=rf"crop\(length={length}\): .*were dropped.*copy.copy\(cache\)"):
                cache.crop(length)
            assert (cache.seen, cache.nbytes) == (seen, before.nbytes)
            last = x[:, seen : seen + 1]
            assert torch.equal(layer(last, cache=cache), layer(last, cache=before))
            continue
        cache.crop(length)
        assert cache.seen == length
        rest = x[:, length:18]
        if kind == "ragged" and length == 0:  # the next call has the prompts again
            torch.testing.assert_close(layer(rest[:, :5], mask=Causal(), cache=cache), filled(kind, layer, x[:, :5])[1])
        elif kind == "ragged":
            found = layer(rest, mask=Causal(), cache=cache)
            torch.testing.assert_close(found[:1], layer(x[:1, :18], mask=Causal())[:, length:])
            alone = layer(x[1:, min(2, length) : 18], mask=Causal())[:, max(0, length - 2) :]
            torch.testing.assert_close(found[1:], alone)
            assert cache.lengths == [18, 18 - min(2, length)]
        else:
            found = layer(rest, mask=Causal(), cache=cache)
            again = MAKE[kind]()
            expected = layer(x[:, :18], mask=Causal(), cache=again)
            torch.testing.assert_close(found, expected[:, length:], rtol=0, atol=1e-12)
            assert cache.nbytes == again.nbytes


@pytest.mark.thorough_except(
    "no_grad-indices0-full", "no_grad-indices0-sliding", "no_grad-indices2-capacity", "inference_mode-indices3-int8"
)
@every
@pytest.mark.parametrize("indices", [[1, 0], [1, 1, 0, 1], [1], torch.tensor([0, 0], dtype=torch.int32)])
@pytest.mark.usefixtures("without_gradients")
def test_selected_entries_go_on(kind: str, indices: Any) -> None:
    layer, x = layer_and()
    cache, _ = filled(kind, layer, x[:, :11])
    kept = copy(cache)
    cache.select(indices)
    _, expected = filled(kind, layer, x)
    for i in range(11, 20):
        found = layer(x[indices, i : i + 1], mask=Causal(), cache=cache)
        torch.testing.assert_close(found, expected[indices, i : i + 1], rtol=0, atol=1e-12)
        assert torch.equal(layer(x[:, i : i + 1], mask=Causal(), cache=kept), expected[:, i : i + 1])
    if kind == "ragged":
        assert cache.lengths == [[20, 18][i] for i in indices]


@pytest.mark.usefixtures("without_gradients")
def test_a_ragged_cache_without_its_longest_sequence_is_shorter() -> None:
    layer, x = layer_and()
    cache = RaggedCache([3, 4])
    layer(x[:, :9], mask=Causal(), cache=cache)  # padded more than needed
    mask = torch.ones(1, 1, 1, 10, dtype=torch.bool)  # over all tokens, padding too
    y = layer(x[:, 9:10], mask=mask, cache=cache)
    torch.testing.assert_close(y[1], layer(x[1:, 5:10], mask=Causal())[0, -1:])
    whole = cache.nbytes
    cache.select([0])
    assert (cache.lengths, cache.nbytes) == ([4], whole * 4 // 10)
    y = layer(x[:1, 10:11], mask=torch.ones(1, 1, 1, 11, dtype=torch.bool), cache=cache)
    torch.testing.assert_close(y[0], layer(x[:1, 6:11], mask=Causal())[0, -1:])


CACHED = [(n, o) for n, o in CASES if DESIGNS[n].takes_cache and o.get("per") != "sequence"]


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(("name", "options"), once(CACHED), ids=lambda value: str(value))
@pytest.mark.usefixtures("without_gradients")
def test_every_design_goes_on_after_a_crop_and_a_selection(name: str, options: dict[str, Any]) -> None:
    layer, x = design(name, options), given(11)
    expected, entries = layer(x, mask=Causal()), [1, 0, 1]
    cache = layer.new_cache()
    layer(torch.cat((x[:, :4], x[:, :3].flip(1)), 1), mask=Causal(), cache=cache)
    other = copy(cache)
    cache.crop(4)
    other.crop(4)
    cache.select(entries)
    for part in (slice(4, 7), slice(7, 8), slice(8, 11)):
        found = layer(x[entries, part], mask=Causal(), cache=cache)
        torch.testing.assert_close(found, expected[entries, part])
        torch.testing.assert_close(layer(x[:, part], mask=Causal(), cache=other), expected[:, part])
    assert cache.nbytes * 2 == other.nbytes * 3 or isinstance(cache, ChosenCache)


@pytest.mark.usefixtures("without_gradients")
def test_a_decoder_continues_one_prompt_in_several_ways() -> None:
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(31, d_model=24, num_layers=3, num_heads=6, num_kv_heads=2, d_ff=20)).eval()
    prompt, more = torch.randint(31, (1, 8)), torch.randint(31, (3, 5))
    prefix = decoder.new_caches()
    decoder(prompt, caches=prefix)
    for _ in range(2):
        beams = [copy(cache) for cache in prefix]
        for cache in beams:
            cache.select([0, 0, 0])
        logits = torch.cat([decoder(part, caches=beams) for part in more.split(1, 1)], 1)
        expected = decoder(torch.cat((prompt.expand(3, -1), more), 1))[:, 8:]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough_beyond(6)
@every
@pytest.mark.parametrize(
    "change", [lambda cache: None, lambda cache: cache.crop(5), lambda cache: cache.select([1, 0])]
)
@pytest.mark.parametrize("after", ["no_grad", "enable_grad"])
def test_a_prompt_of_inference_mode_is_continued_outside_of_it(
    kind: str, change: Callable[[Any], None], after: str
) -> None:
    layer, x = layer_and()
    expected, cache = MAKE[kind](), MAKE[kind]()
    with torch.no_grad():
        layer(x[:, :5], mask=Causal(), cache=expected)
    with torch.inference_mode():
        layer(x[:, :5], mask=Causal(), cache=cache)
        change(cache)
    change(expected)
    with getattr(torch, after)():
        for i in range(5, 9):
            one = x[:, i : i + 1]
            assert torch.equal(layer(one, mask=Causal(), cache=cache), layer(one, mask=Causal(), cache=expected))
    with torch.inference_mode():
        layer(x[:, 9:10], mask=Causal(), cache=cache)


def test_a_sparse_mixture_continues_a_prompt_of_inference_mode() -> None:
    torch.manual_seed(0)
    layer, x = SparseHeadMixture(16, 4, top_k=2, keys="chosen").eval(), torch.randn(2, 9, 16)
    with torch.inference_mode():
        cache, expected = layer.new_cache(), layer(x, mask=Causal())
        layer(x[:, :5], mask=Causal(), cache=cache)
    with torch.no_grad():
        found = [layer(part, mask=Causal(), cache=cache) for part in x[:, 5:].split(1, 1)]
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 5:])


@pytest.mark.parametrize("kind", ["full", "budgets", "ragged"])
def test_gradients_flow_through_copies_crops_and_selections(kind: str) -> None:
    layer, x = layer_and(9)
    first = 5 if kind == "ragged" else 0  # a prompt of 3 tokens after 5 of padding
    alone = layer(torch.cat((x[1:, first:6], x[:1, 6:]), 1), mask=Causal())[:, 6 - first :]
    expected = torch.autograd.grad(2 * alone.square().sum(), layer.k_proj.weight)[0]
    cache = MAKE[kind]() if kind != "budgets" else BudgetCache([20, None, 20])
    layer(x[:, :8], mask=Causal(), cache=cache)
    cache = copy(cache)
    cache.crop(6)
    cache.select([1, 1])
    y = layer(x[[0, 0], 6:], mask=Causal(), cache=cache)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), layer.k_proj.weight)[0], expected)


def test_after_a_crop_tokens_are_written_in_place_unless_a_map_holds_them() -> None:
    layer, x = layer_and()
    with torch.no_grad():
        cache, _ = filled("full", layer, x[:, :9])
        place = cache._k.read().data_ptr()
        cache.crop(6)
        layer(x[:, 6:9], mask=Causal(), cache=cache)
        assert cache._k.read().data_ptr() == place
        _, amap = layer(x[:, 9:12], mask=Causal(), cache=cache, return_map=True)
        weights = amap[:, :, :, :].clone()
        cache.crop(9)
        layer(x[:, 15:18], mask=Causal(), cache=cache)
        assert torch.equal(amap[:, :, :, :], weights)
        assert cache._k.read().data_ptr() != place


@every
def test_seen_is_read_only(kind: str) -> None:
    cache = MAKE[kind]()
    with pytest.raises(AttributeError, match="seen"):
        cache.seen = 8
    with pytest.raises(AttributeError, match="seen"):
        ChosenCache().seen = 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cache: cache.crop(12), r"crop\(length=12\): the cache has seen 11 tokens"),
        (lambda cache: cache.crop(-1), r"crop\(length=-1\): expected a whole number"),
        (lambda cache: cache.crop(2.5), r"crop\(length=2.5\): expected a whole number"),
        (lambda cache: cache.select([0, 2]), r"select\(indices\): 2 is not an entry of the batch of 2"),
        (lambda cache: cache.select([-1]), r"select\(indices\): -1 is not an entry"),
        (
            lambda cache: cache.select([[0]]),
            r"select\(indices\): expected whole numbers \[new batch size\], got \[\[0\]\]",
        ),
        (lambda cache: cache.select([0.0]), r"select\(indices\): expected whole numbers"),
        (lambda cache: cache.select(torch.tensor([True, False])), r"select\(indices\): expected whole numbers"),
        (lambda cache: cache.select("01"), r"select\(indices\): expected whole numbers"),
    ],
)
@every
@torch.no_grad()
def test_changes_that_cannot_be_are_named(kind: str, change: Callable[[Any], None], words: str) -> None:
    layer, x = layer_and()
    cache, _ = filled(kind, layer, x[:, :11])
    held = cache.nbytes
    with pytest.raises(HeadwiseError, match=words):
        change(cache)
    assert (cache.seen, cache.nbytes) == (11, held)


@every
def test_a_new_cache_has_nothing_to_change(kind: str) -> None:
    cache = MAKE[kind]()
    cache.crop(0)
    cache.select([0] if kind == "ragged" else [3, 1])
    if kind == "ragged":
        assert cache.mask(5).keys.tolist() == [5]
        with pytest.raises(ShapeError, match="1 is not an entry"):
            cache.select([1])
    assert cache.seen == cache.nbytes == 0


@pytest.mark.thorough_except("0-0-None", "3-0-None", "5-0-None")
@pytest.mark.parametrize("stored", [None, "int8"])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_changes_keeps_what_was_read(seed: int, sinks: int, stored: str | None) -> None:
    """Steps, tensors that are held, copies and failed calls of a sliding window, against a list of all tokens."""
    draw, window, width = random.Random(seed), 5, 4
    caches = [(SlidingCache(window, sinks, stored=stored), torch.empty(1, 2, 0, width))]
    held: list[tuple[Vectors, torch.Tensor]] = []
    for _ in range(150):
        at = draw.randrange(len(caches))
        cache, tokens = caches[at]
        new = torch.randn(1, 2, draw.choice((1, 1, 1, 1, 2, 9)), width)
        what = draw.choice(("step", "step", "step", "hold", "forget", "copy", "fail", "crop"))
        mark = Mark(cache)
        keys, values = cache.take(new, -new)
        former, tokens = tokens, torch.cat((tokens, decoded(QuantizedKV.of(new)) if stored else new), 2)
        first = max(sinks, former.shape[2] - window + 1)
        expected = torch.cat((tokens[:, :, :sinks], tokens[:, :, first:]), 2)
        assert torch.equal(decoded(keys), expected)
        assert torch.equal(decoded(values), -expected)
        if what == "fail":
            mark.restore()
            tokens = former
        elif what == "crop" and cache.gap.size == 0:
            cache.crop(former.shape[2])
            tokens = former
        elif what == "copy":
            caches = [*caches[-2:], (copy(cache), tokens)]
        elif what == "hold":
            held.append((keys, expected))
        elif what == "forget":
            held.clear()
        caches = [(c, tokens if c is cache else t) for c, t in caches]
        assert all(torch.equal(decoded(x), wanted) for x, wanted in held)
        del keys, values


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind != "ragged"])
@pytest.mark.parametrize("empty", ["crop", "no tokens"])
@torch.no_grad()
def test_a_cache_without_tokens_takes_another_batch(kind: str, empty: str) -> None:
    layer, x = layer_and(7)
    cache = MAKE[kind]()
    if empty == "crop":
        layer(x, mask=Causal(), cache=cache)
        cache.crop(0)
    else:
        cache.append(torch.randn(2, 3, 0, 4), torch.randn(2, 3, 0, 4))
    assert (cache.seen, cache.nbytes) == (0, 0)
    cache.select([6, 6])  # it has no entries yet
    fresh, other = MAKE[kind](), torch.cat((x, x[:1]))
    for rows in (slice(0, 5), slice(5, 7)):
        assert torch.equal(*(layer(other[:, rows], mask=Causal(), cache=each) for each in (cache, fresh)))
    with pytest.raises(ShapeError, match=r"batch 2.*batch 3"):
        layer(x, mask=Causal(), cache=cache)


@torch.no_grad()
def test_a_cache_of_chosen_heads_takes_another_batch_when_it_is_empty() -> None:
    layer, x = SparseHeadMixture(8, 4, top_k=2, keys="chosen").eval(), torch.randn(3, 5, 8)
    cache = ChosenCache()
    layer(x[:2, :2], mask=Causal(), cache=cache)
    cache.crop(0)
    assert torch.equal(*(layer(x, mask=Causal(), cache=each) for each in (cache, ChosenCache())))
    assert cache.seen == 5
