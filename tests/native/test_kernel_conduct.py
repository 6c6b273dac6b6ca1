"""How the compiled kernel behaves: the same bits always, nothing written or read but its own, threads, forks."""

import ctypes
import faulthandler
import math
import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kernel_formula import run
from samples import MASKS, qkv
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from headwise.kernels.call import Call
from headwise.kernels.cpu import binding, passes
from headwise.kernels.cpu.library import library
from headwise.kernels.quantized import QuantizedKV
from headwise.map.attention import attend
from headwise.masks import Causal, Everything, Grid, Mask
from headwise.rule import Rule
from headwise.rule.lowering import Lowered, lower
from headwise.scores import ALiBi, Bias, SinkLogits, SoftCap
from headwise.stats import (
    COLUMN_MASS,
    CONCENTRATION,
    DISTANCE,
    DISTANCE_VARIANCE,
    ENTROPY,
    LARGEST,
    SQUARES,
    KeyWeights,
    RangeMass,
)

pytestmark = pytest.mark.usefixtures("target")

ROWS = (LARGEST, ENTROPY, SQUARES, CONCENTRATION, DISTANCE, DISTANCE_VARIANCE, RangeMass(-3, 1, relative=True))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON = 0x7FC0BEEF  # a NaN that no arithmetic makes
GUARD = 64  # floats
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def everything(n: int, dtype: torch.dtype, dropout: float = 0.0) -> list[Tensor]:
    """Results and gradients of a call that uses most of what there is."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (x.requires_grad_() for x in qkv(2, 6, 3, n, 700, 20, 24, dtype=dtype))
    score = (
        SoftCap(5.0),
        ALiBi([0.01] * 6),
        SinkLogits([0.5] * 6),
        Bias(torch.randn(1, 1, n, 700, generator=generator)),
    )
    columns = () if dropout else (COLUMN_MASS,)
    wanted = (*ROWS, *columns, KeyWeights(torch.rand(2, 700, generator=generator)))
    found = run(q, k, v, MASKS["window and sinks"](2, n, 700), score, statistics=wanted, dropout=dropout, seed=3)
    found.out.backward(torch.randn(found.out.shape, generator=generator).to(dtype))
    return [found.out.detach(), found.lse, *found.statistics.values(), q.grad, k.grad, v.grad]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("n", [3, 150])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_same_bits_for_any_number_of_threads(n: int, dropout: float, threads: Callable[[int], None]) -> None:
    for dtype in DTYPES:
        threads(1)
        first = everything(n, dtype, dropout)
        for count in (1, 3, 8):
            threads(count)
            assert same(everything(n, dtype, dropout), first), count


@pytest.mark.parametrize("h", [2, 40])
def test_the_same_bits_where_heads_are_packed_by_each_thread(h: int, threads: Callable[[int], None]) -> None:
    q, k, v = qkv(2, h, h, 130, 130, 8, 8)
    found = []
    for count in (1, 2, 3, 5, 8):
        threads(count)
        result = run(q, k, v, Causal(), statistics=[*ROWS, COLUMN_MASS])
        found.append([result.out, result.lse, *result.statistics.values()])
    assert all(same(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["everything", "causal", "dense"])
def test_statistics_change_no_bit(dtype: torch.dtype, name: str) -> None:
    for n in (2, 60):
        q, k, v = qkv(2, 6, 3, n, 300, 20, 24, dtype=dtype)
        plain = run(q, k, v, MASKS[name](2, n, 300))
        for wanted in ((LARGEST,), (ENTROPY,), (DISTANCE,), ROWS, *(((COLUMN_MASS, *ROWS),) if n > 4 else ())):
            found = run(q, k, v, MASKS[name](2, n, 300), statistics=wanted)
            assert torch.equal(found.out, plain.out)
            assert torch.equal(found.lse, plain.lse)


@pytest.mark.thorough_except("avx2-dtype2")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_earlier_call_left_in_memory_changes_nothing(dtype: torch.dtype) -> None:
    for n in (3, 150):
        first = everything(n, dtype)
        bad = torch.full((2, 6, 200, 64), math.nan, dtype=dtype).requires_grad_()
        run(bad, bad, bad, statistics=[*ROWS, COLUMN_MASS]).out.sum().backward()
        assert same(everything(n, dtype), first)


def wanted(name: str, result: Tensor, **given: Any) -> binding.Wanted:
    """An entry of a request."""
    (code,) = (code for signature, code in library().statistics.items() if signature.startswith(f"{name}("))
    return binding.Wanted(code=code, result=result.data_ptr(), **{"count": 1, **given})


def write_wanted(request: binding.ForwardCall, entries: list[binding.Wanted]) -> None:
    """Put them into the request, sorted by code as headwise.h requires."""
    entries = sorted(entries, key=lambda entry: entry.code)
    request.wanted_count, request.wanted = len(entries), (binding.Wanted * len(entries))(*entries)


def guarded(*shape: int, dtype: torch.dtype = torch.float32, gaps: bool = False) -> tuple[Tensor, Callable[[], bool]]:
    """Poisoned memory for a result, and whether it was written, all of it and nothing else.

    Zones lie around it, and with `gaps` after each row, head and entry too.
    """
    size = torch.empty(0, dtype=dtype).element_size()
    outer = [x + 3 for x in shape] if gaps else [*shape]
    memory = torch.full((GUARD * 2 + math.prod(outer),), POISON, dtype=torch.int32)
    memory = memory if size == 4 else (memory & 0xFFFF).to(torch.int16)
    inside = memory[GUARD : GUARD + math.prod(outer)].view(outer)
    inside = inside[tuple(slice(0, x) for x in shape)]
    before = memory.clone()

    def clean() -> bool:
        # A number may equal the poison's 16 bits by chance, but not many.
        written = float((inside != before[0]).float().mean()) if inside.numel() else 1.0
        inside.copy_(before[0].expand(shape))
        return written > (0.999 if size == 4 else 0.98) and torch.equal(memory, before)

    return inside.view(dtype), clean


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("n", "d", "e"), [(1, 5, 3), (4, 16, 16), (53, 13, 21), (97, 64, 65)])
@pytest.mark.parametrize("mask", ["everything", "window and sinks", "nothing for some"])
def test_only_its_own_results_are_written(dtype: torch.dtype, gaps: bool, n: int, d: int, e: int, mask: str) -> None:
    b, h, h_kv, m = 2, 4, 2, 131
    q, k, v = qkv(b, h, h_kv, n, m, d, e, dtype=dtype)
    rule = Rule(MASKS[mask](b, n, m), d**-0.5, Grid(b, h, n, m))
    lowered = lower(rule)
    assert isinstance(lowered, Lowered)
    out, *checks = guarded(b, h, n, e, dtype=dtype, gaps=gaps)
    request = binding.ForwardCall(
        binding.CODES[dtype], 2, b, h, h_kv, n, m, d, e, *map(binding.view, (q, k, v, out)),
    )  # fmt: skip
    held: list[object] = [binding.write_rule(request.rule, lowered, rule)]
    memory, check = guarded(b, h, n)
    request.lse = memory.data_ptr()
    held.append(memory)
    checks.append(check)
    classes = torch.rand(b, m), torch.rand(1, m)
    arguments: list[tuple[str, dict[str, object]]] = [
        ("largest", {}), ("entropy", {}), ("squares", {}), ("distance", {}), ("variance", {}),
        ("range_mass", {"numbers": (0, 9, 0)}), ("range_mass", {"numbers": (-5, 1, 1)}),
        *(("key_weights", {"keys": binding.Argument(x.data_ptr(), m if len(x) > 1 else 0)}) for x in classes),
        *[("column_mass", {})] * (2 if n > 4 else 0),
    ]  # fmt: skip
    entries = []
    for name, given in arguments:
        memory, check = guarded(b, h, m if name == "column_mass" else n)
        entries.append(wanted(name, memory, **given))
        held.append(memory)
        checks.append(check)
    write_wanted(request, entries)
    handle = library().handle
    assert handle is not None
    assert handle.headwise_forward(ctypes.byref(request)) in (binding.DONE, binding.FINITE)
    assert all(check() for check in checks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d", "e"), [(1, 5, 3), (53, 13, 21), (97, 64, 65)])
def test_only_its_own_gradients_are_written(dtype: torch.dtype, n: int, d: int, e: int) -> None:
    b, h, h_kv, m = 2, 4, 2, 131
    q, k, v = qkv(b, h, h_kv, n, m, d, e, dtype=dtype)
    rule = Rule(Causal(), d**-0.5, Grid(b, h, n, m))
    lowered = lower(rule)
    assert isinstance(lowered, Lowered)
    result = run(q, k, v, Causal())
    grad = torch.randn(result.out.shape).to(dtype)
    outs = [guarded(*x.shape, dtype=dtype, gaps=True) for x in (q, k, v)]
    delta, check = guarded(b, h, n)
    views = map(binding.view, (q, k, v, result.out, grad, *(x for x, _ in outs)))
    request = binding.BackwardCall(binding.CODES[dtype], 2, b, h, h_kv, n, m, d, e, *views)
    request.delta = delta.data_ptr()
    held = [binding.write_lse(request, result.lse)]
    held += binding.write_rule(request.rule, lowered, rule)
    handle = library().handle
    assert handle is not None
    assert handle.headwise_backward(ctypes.byref(request)) == binding.DONE
    assert held
    assert check()
    assert all(clean() for _, clean in outs)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_two_callers_at_once(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    threads(2)
    wanted = {n: everything(n, dtype) for n in (3, 60, 150)}

    def work(n: int) -> bool:
        torch.set_num_threads(2)
        return all(same(everything(n, dtype), wanted[n]) for _ in range(4))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, (3, 60, 150, 60, 3, 150)))


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers here")
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_signals_change_no_bit(dtype: torch.dtype) -> None:
    """Registers, and tiles where there are any, come back as they were."""
    wanted = everything(150, dtype)
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(True))
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        found = [everything(150, dtype) for _ in range(3)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        time.sleep(0.01)  # a last signal may still be on its way to another thread
        signal.signal(signal.SIGALRM, before)
    assert came
    assert all(same(one, wanted) for one in found)


def in_child(work: Callable[[], bool], seconds: float = 60.0) -> int | None:
    """The exit code of a forked child that does the work: 0 if it is true; None if it did not end."""

    def main() -> None:
        # PyTorch's own operators wait for ever for the parent's threads, so it gets one, as in a DataLoader's worker.
        # The kernel is told of two all the same: that it does not wait for them is what is tested.
        torch.set_num_threads(1)
        torch.get_num_threads = lambda: 2  # type: ignore[assignment]
        os._exit(0 if work() else 7)

    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
        return None
    return child.exitcode


@pytest.mark.thorough
@forks
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_the_same(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    threads(2)
    q, k, v = qkv(2, 6, 3, 150, 300, dtype=dtype)
    wanted = run(q, k, v, Causal(), statistics=[COLUMN_MASS])
    few = run(q[:, :, :2], k, v)

    def work() -> bool:
        found = run(q, k, v, Causal(), statistics=[COLUMN_MASS])
        return (
            torch.equal(found.out, wanted.out)
            and torch.equal(found.statistics[COLUMN_MASS], wanted.statistics[COLUMN_MASS])
            and torch.equal(run(q[:, :, :2], k, v).out, few.out)
        )

    assert in_child(work) == 0
    assert work()  # and so does the parent, afterwards


class Attended(Dataset[Tensor]):
    """Ten outputs of attention."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return attend(*qkv(1, 2, 2, 40, 40, seed=index), mask=Causal(), kernel="cpu")


@pytest.mark.thorough
@forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:This DataLoader will create")
def test_workers_of_a_loader_compute_the_same(threads: Callable[[int], None]) -> None:
    threads(2)
    wanted = [Attended()[i] for i in range(10)]
    loader = DataLoader(Attended(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert same(list(loader), wanted)


def at_the_end(x: Tensor) -> Tensor:
    """A copy that ends where memory ends: reading or writing on ends the process."""
    page = mmap.PAGESIZE
    bytes_ = x.numel() * x.element_size()
    size = -(-bytes_ // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + size), page, 0) == 0
    flat = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=size - bytes_)
    return flat.view(x.shape).copy_(x)


@pytest.mark.thorough
@forks
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is protected as Linux does it")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", "dense"])
def test_nothing_is_read_beyond_the_end(dtype: torch.dtype, mask: str) -> None:
    def work() -> bool:
        for n, m, d, e in ((1, 70, 5, 3), (3, 65, 33, 19), (37, 53, 8, 5), (61, 257, 31, 65)):
            which: Mask = MASKS[mask](2, n, m)
            if mask == "dense":
                which = type(which)(at_the_end(which.mask))  # type: ignore[attr-defined,call-arg]
            score = (
                Bias(at_the_end(torch.randn(2, 1, n, m))),
                ALiBi(at_the_end(torch.full((4,), 0.1))),
                SinkLogits(at_the_end(torch.zeros(4))),
            )
            q, k, v = (at_the_end(x).requires_grad_() for x in qkv(2, 4, 2, n, m, d, e, dtype=dtype))
            wanted = (*ROWS, *((COLUMN_MASS,) if n > 4 else ()), KeyWeights(at_the_end(torch.rand(2, m))))
            for more in ((), score):
                result = run(q, k, v, which, more, statistics=wanted)
                result.out.backward(at_the_end(torch.ones(result.out.shape, dtype=dtype)))
            bias = (Bias(at_the_end(torch.randn(1, 1, 1, m))),)
            run(q, k, v, which, bias)
        return True

    # At the fork, another thread may hold a lock of the sanitizers' allocator, for which the child waits for ever.
    code = in_child(work)
    assert (in_child(work) if code is None else code) == 0


def test_guards_notice() -> None:
    """The guards and the page's end can fail."""
    memory, clean = guarded(2, 3)
    assert not clean()  # nothing was written
    memory, clean = guarded(2, 3)
    memory.fill_(1.0)
    assert clean()
    memory, clean = guarded(2, 3, gaps=True)
    memory.fill_(1.0)
    torch.as_strided(memory, (1,), (1,), memory.storage_offset() + 3).fill_(1.0)
    assert not clean()


@forks
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is protected as Linux does it")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_end_of_memory_notices() -> None:
    def work() -> bool:
        faulthandler.disable()  # the crash is meant
        x = at_the_end(torch.ones(9))
        ctypes.string_at(x.data_ptr() + 36, 1)
        return True

    assert in_child(work) not in (0, 7, None)  # a signal, or what a sanitizer makes of it


@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16, "int8"], ids=str)
@pytest.mark.parametrize("m", [1, 7, 64, 3000])
def test_decoding_returns_whether_keys_and_values_are_finite(m: int, form: torch.dtype | str) -> None:
    """Where a weight is 0 too, and where a key of -inf is like one that is masked."""
    q, k, v = qkv(2, 4, 2, 1, m, 20, 12, dtype=torch.float32 if form == "int8" else form)
    q = q.abs()

    def known(k: Tensor, v: Tensor) -> bool:
        keys, values = (QuantizedKV.of(x) if form == "int8" else x for x in (k, v))
        call = Call(q, keys, values, Rule(Everything(), 0.5, Grid(2, 4, 1, m)))
        passes.forward(call)
        return "values_finite" in vars(call)

    assert known(k, v)
    for bad in (math.nan, math.inf, -math.inf):
        if form == "int8":
            break
        for x, place in ((k, (1, 1, m - 1, 19)), (v, (0, 1, m // 2, 3)), (k, (0, 0, 0))):
            before = x[place].clone()
            x[place] = bad
            assert not known(k, v)
            x[place] = before
    far, strange = k.clone(), v.clone()
    far[1, 0, m // 2], strange[1, 0, m // 2, 5] = -1e4, math.inf
    assert form == "int8" or not known(far, strange)
