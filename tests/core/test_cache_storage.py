"""Numbers in a cache: how far they are from those that came, and what cannot be kept."""

import math
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from threading import Event, Thread
from typing import Any

import pytest
import torch
from hypothesis import example, given as for_all, settings, strategies as st

from headwise.cache import BudgetCache, KVCache, RaggedCache, SlidingCache
from headwise.cache.base import Rows
from headwise.cache.storage import Quantized, Room, Rounded
from headwise.errors import DTypeError
from headwise.kernels.quantized import QuantizedKV
from headwise.map.attention import attend

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def numbers(shape: tuple[int, ...], seed: int, power: int, dtype: torch.dtype) -> torch.Tensor:
    """Vectors of very different length, with zeros and signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    scale = 10.0 ** torch.randint(power - 2, power + 1, (*shape[:3], 1), generator=generator)
    return (x * scale * (torch.rand(shape, generator=generator) > 0.1)).to(dtype)


shapes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 17))


@pytest.mark.thorough
@for_all(shapes, st.integers(0, 999), st.integers(-44, 37), st.sampled_from(DTYPES))
@example((1, 1, 3, 3), 232, -3, torch.float16)  # subnormal in float16
@settings(deadline=None, max_examples=150)
def test_eight_bits_are_within_their_bound(
    shape: tuple[int, int, int, int], seed: int, power: int, dtype: torch.dtype
) -> None:
    x = numbers(shape, seed, min(power, 4) if dtype is torch.float16 else power, dtype)
    storage = Quantized()
    steps, scale = storage.encode(x)
    assert steps.dtype is torch.int8
    assert scale.dtype is torch.float32
    assert scale.shape == (*shape[:3], 1)
    back = storage.decode((steps, scale), dtype)
    assert back.dtype is dtype
    assert ((back.double() - x.double()).abs() <= storage.bound(x)).all()


def test_the_bound_is_the_stated_one_and_is_reached() -> None:
    x = numbers((2, 3, 50, 16), 0, 0, torch.float32)
    storage, largest = Quantized(), x.double().abs().amax(-1, keepdim=True)
    torch.testing.assert_close(storage.bound(x), (largest / 254).expand_as(x).contiguous(), rtol=1e-4, atol=0)
    error = (storage.decode(storage.encode(x), x.dtype) - x).abs()
    assert (error / storage.bound(x)).max() > 0.9
    assert storage.encode(x)[0].abs().amax(-1).eq(127).all()  # all levels are used


def test_each_part_of_a_key_has_its_own_scale() -> None:
    x = torch.cat((torch.randn(1, 1, 5, 6) * 1e3, torch.randn(1, 1, 5, 3)), -1)
    one, two = Quantized(), Quantized((6, 3))
    assert two.encode(x)[1].shape == (1, 1, 5, 2)
    small = x[..., 6:]
    errors = [(s.decode(s.encode(x), x.dtype)[..., 6:] - small).abs().max() for s in (one, two)]
    assert errors[1] <= small.abs().max() / 253
    assert errors[0] > 20 * errors[1]
    assert Quantized((6, 3, 0)).encode(x)[1].shape[-1] == 2
    empty = torch.zeros(1, 1, 5, 0)
    assert Quantized().decode(Quantized().encode(empty), torch.float32).shape == empty.shape


@for_all(shapes, st.integers(0, 999), st.integers(-44, 37), st.sampled_from(["bfloat16", "float16", "float32"]))
@settings(deadline=None, max_examples=100)
def test_rounded_numbers_are_within_their_bound(
    shape: tuple[int, int, int, int], seed: int, power: int, name: str
) -> None:
    storage = Rounded(getattr(torch, name))
    x = numbers(shape, seed, min(power, 3) if name == "float16" else power, torch.float64)
    back = storage.decode(storage.encode(x), torch.float64)
    assert ((back - x).abs() <= storage.bound(x)).all()


@pytest.mark.parametrize("factor", [0.1, 1.0, 4.0])
def test_outputs_are_within_the_bound_of_the_docstring(factor: float) -> None:
    torch.manual_seed(0)
    q = (torch.randn(2, 6, 1, 8) * factor).double()
    k, v = torch.randn(2, 3, 41, 8).double(), torch.randn(2, 3, 41, 5).double()
    k8, v8 = KVCache(stored="int8").append(k, v)
    scale = 8**-0.5
    s_k = (k.abs().amax((-1, -2)) / 254).repeat_interleave(2, 1)[..., None, None]  # [b, h, 1, 1]
    s_v = (v.abs().amax((-1, -2)) / 254).repeat_interleave(2, 1)[..., None, None]
    epsilon = scale * q.abs().sum(-1, keepdim=True) * s_k
    logits, logits8 = (scale * q @ x.repeat_interleave(2, 1).mT for x in (k, k8))
    assert ((logits8 - logits).abs() <= epsilon * (1 + 1e-4)).all()
    largest = v.abs().amax((-1, -2)).repeat_interleave(2, 1)[..., None, None]
    bound = ((2 * epsilon).exp() - 1) * largest + s_v
    difference = (attend(q, k8, v8) - attend(q, k, v)).abs()
    assert (difference <= bound * (1 + 1e-4)).all()
    assert difference.max() > 0


CACHES: dict[str, Any] = {
    "full": KVCache,
    "sliding": lambda stored: SlidingCache(3, stored=stored),
    "budgets": lambda stored: BudgetCache([3, None], stored=stored),
    "ragged": lambda stored: RaggedCache([4, 3], stored=stored),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize(
    ("stored", "value", "words"),
    [
        ("int8", math.inf, "1 of the new values are infinite or NaN.*stored=None"),
        ("int8", -math.inf, "1 of the new values"),
        ("int8", math.nan, "1 of the new values"),
        ("int8", 1e300, "exceeds the float32 range"),
        ("float16", 70000.0, "1 of the new values exceed ±65504.*bfloat16"),
        ("bfloat16", 1e39, r"exceed ±3.3895e\+38"),
    ],
)
def test_numbers_that_are_too_large_are_told_and_change_nothing(
    kind: str, where: str, stored: str, value: float, words: str
) -> None:
    cache = CACHES[kind](stored=stored)
    good = torch.randn(2, 2, 4, 8, dtype=torch.float64)
    cache.append(good, good)
    before, bad = cache.nbytes, torch.randn(2, 2, 1, 8, dtype=torch.float64)
    bad[1, 0, 0, 3] = value
    with pytest.raises(DTypeError, match=f"cache: .*{words}"):
        cache.append(*((bad, bad * 0 + 1) if where == "k" else (torch.ones_like(bad), bad)))
    assert (cache.seen, cache.nbytes) == (4, before)
    k, v = cache.append(torch.ones_like(bad), torch.ones_like(bad))
    assert k.shape == v.shape
    assert k.isfinite().all()


def test_padding_is_not_looked_at() -> None:
    cache = RaggedCache([1, 3], stored="int8")
    k = torch.ones(2, 1, 3, 4)
    k[0, :, :2] = math.nan
    assert cache.append(k, k)[0].isfinite().all()


def test_room_grows_by_doubling_and_keeps_what_was_there() -> None:
    rows, x = Rows(Quantized()), torch.randn(1, 2, 300, 4)
    pointers = set()
    for part in x.split(1, 2):
        rows.add(rows.encoded(part))
        pointers.add(rows._held()[0].data_ptr())
    assert len(pointers) <= 5  # 64, 128, 256, 512
    assert rows.length == 300
    assert torch.equal(rows.read(), Quantized().decode(Quantized().encode(x), x.dtype))


@pytest.mark.thorough
@pytest.mark.parametrize("stored", [None, "int8"])
def test_a_window_with_sinks_is_copied_once_in_many_steps(stored: str | None) -> None:
    """Also after a long prompt, the memory of which is not held."""
    cache = SlidingCache(100, 4, stored=stored)
    cache.append(*torch.randn(2, 1, 2, 5000, 8))
    assert cache._k._room is not None
    assert cache._k._room.capacity <= 208
    places = []
    for _ in range(500):
        keys, _ = cache.take(*torch.randn(2, 1, 2, 1, 8))  # and nothing else holds its memory in the next step
        assert keys.shape[2] == 104
        memory = (keys.steps if isinstance(keys, QuantizedKV) else keys).untyped_storage()
        places.append(memory.data_ptr())
        del keys, memory
    assert sum(place != before for before, place in pairwise(places)) <= 6
    assert cache._k._room.capacity <= 208


@pytest.mark.parametrize(
    "make", [lambda: KVCache(stored="float16"), lambda: SlidingCache(3, 1), lambda: RaggedCache([4, 2])]
)
@pytest.mark.parametrize("first", [True, False])
def test_without_memory_neither_keys_nor_values_are_added(
    make: Callable[[], Any], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, whole, new = make(), make(), torch.randn(2, 2, 2, 4, 8)
    for each in () if first else (cache, whole):
        each.append(*torch.ones(2, 2, 2, 4, 8))
    before, add, calls = (cache.seen, cache.nbytes), Rows.add, []

    def failing(self: Rows, given: Any) -> None:
        calls.append(given)
        if len(calls) == 2:  # the values
            raise MemoryError
        add(self, given)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "add", failing)
        with pytest.raises(MemoryError):
            cache.append(*(torch.randn(2, 2, 5, 4, 8) if first else new))  # of another layer
    assert (cache.seen, cache.nbytes) == before
    for found, expected in zip(cache.append(*new), whole.append(*new), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_can_claim() -> None:
    """Another thread may be claiming at the fork; its lock would stay locked in the child."""
    room = Room([torch.zeros(1, 1, 4, 1)], 0)
    inside, go, shared = Event(), Event(), room.writable

    def slowly(at: int) -> bool:
        inside.set()
        go.wait(0.1)
        return shared(at)

    room.writable = slowly  # type: ignore[method-assign]
    thread = Thread(target=room.claimed, args=(0, 1))
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        signal.alarm(2)  # ends it
        os._exit(0 if Room([torch.zeros(1, 1, 4, 1)], 0).claimed(0, 1) else 1)
    go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
