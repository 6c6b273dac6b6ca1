"""Long calls answer signals while they compute: an exception of a handler ends them soon, and nothing else changes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import headwise as hw
from headwise.kernels import KERNELS
from headwise.kernels.call import Call
from headwise.kernels.cpu.kernel import CPU
from headwise.kernels.reads import Matrix
from headwise.masks import Causal, Everything, Grid
from headwise.rule import Rule
from headwise.scores import Bias, RelativeBias
from headwise.stats import COLUMN_MASS, ENTROPY

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers")
H, N, D = 16, 16384, 64  # a TFLOP and more: some seconds on any core


class Alarm(Exception):
    """What a handler raises."""


@contextmanager
def alarm(handler: Callable[..., None], after: float, every: float = 0.0) -> Iterator[None]:
    """Within it, `handler` is called after so many seconds."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, after, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def heads(seed: int, size: int = D) -> torch.Tensor:
    """[1, H, N, size]; all heads are the same numbers in memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 1, N, size, generator=generator).expand(1, H, N, size)


def backward(*scores: hw.scores.Score) -> Callable[[], object]:
    q, k, v = map(heads, range(3))
    call = Call(q, k, v, Rule(Everything(), 0.1, Grid(1, H, N, N), scores))
    lse, wanted = torch.full((1, H, N), 10.0), [False, False, *[True for one in scores if isinstance(one, Bias)]]
    wanted[0] = any(isinstance(one, RelativeBias) for one in scores)
    return lambda: CPU().gradients(call, q, lse, v, wanted)


def read(name: str, *given: object) -> Callable[[], object]:
    """A read of a map whose log-sum-exp need not be computed."""
    of = Matrix(heads(0), heads(1), torch.full((1, H, N), 10.0), Rule(Everything(), 0.1, Grid(1, H, N, N)))
    return lambda: getattr(KERNELS["cpu"].reads, name)(of, *given)


def attend(**options: object) -> Callable[[], object]:
    q, k, v = map(heads, range(3))
    return lambda: hw.attend(q, k, v, kernel="cpu", **options)  # type: ignore[call-overload]


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "forward": attend,
    "forward of a causal call": lambda: attend(mask=Causal()),
    "forward in bfloat16": lambda: lambda: hw.attend(*(heads(i).bfloat16() for i in range(3)), kernel="cpu"),
    "forward with dropout": lambda: attend(dropout_p=0.1),
    "forward with statistics": lambda: attend(return_map=True, measures=["entropy", "mean_distance"]),
    "backward": backward,
    "backward with distances": lambda: backward(RelativeBias(torch.randn(H, 99), -98)),
    "backward with a bias of all": lambda: backward(Bias(torch.randn(1, 1, 1, N))),
    "statistics": lambda: read("statistics", (ENTROPY,)),
    "columns": lambda: read("statistics", (COLUMN_MASS,)),
    "largest": lambda: read("top", 8),
    "product": lambda: read("times", heads(2)),
    "transposed product": lambda: read("transposed_times", heads(2)),
    "picture": lambda: read("squares", 64),
    "picture of one square": lambda: read("squares", N),
    "diagonals": lambda: read("diagonals"),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in ("forward", "backward") else pytest.mark.thorough) for x in CALLS]
)
def test_a_handler_that_raises_ends_the_call(name: str, target: str) -> None:
    def handler(*_: object) -> None:
        raise Alarm

    run = CALLS[name]()
    began = time.process_time()  # of all threads, on a machine that does other things too
    with pytest.raises(Alarm), alarm(handler, 0.2):
        run()
    assert time.process_time() - began < 1.2


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_ctrl_c_ends_the_call_and_the_next_one_is_right(target: str) -> None:
    q = torch.randn(1, 3, 67, 16, generator=torch.Generator().manual_seed(3))
    expected = hw.attend(q, q, q, kernel="cpu")
    run = attend()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.process_time()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert time.process_time() - began < 1.2
    assert torch.equal(hw.attend(q, q, q, kernel="cpu"), expected)


@pytest.mark.thorough
@pytest.mark.every_target
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_handlers_that_return_change_nothing_though_they_attend(dtype: torch.dtype, target: str) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, 4001, 64, generator=generator).to(dtype) for _ in range(3))
    small = q[:, :, :101]
    expected, of_small = hw.attend(q, k, v, kernel="cpu"), hw.attend(small, small, small, kernel="cpu")
    found: list[torch.Tensor] = []
    began = time.perf_counter()
    while len(found) < 3 and time.perf_counter() - began < 10.0:
        with alarm(lambda *_: found.append(hw.attend(small, small, small, kernel="cpu")), 0.02, 0.02):
            out = hw.attend(q, k, v, kernel="cpu")
        assert torch.equal(out, expected)
    assert len(found) >= 3
    assert all(torch.equal(one, of_small) for one in found)


@pytest.mark.thorough
def test_calls_of_other_threads_go_on_while_the_main_thread_answers(target: str) -> None:
    q = torch.randn(1, 2, 4001, 64, generator=torch.Generator().manual_seed(5))
    expected, found, answered = hw.attend(q, q, q, kernel="cpu"), [], []
    worker = threading.Thread(target=lambda: found.append(hw.attend(q, q, q, kernel="cpu")))

    def handler(*_: object) -> None:
        answered.append(worker.is_alive())
        raise Alarm

    worker.start()
    with pytest.raises(Alarm), alarm(handler, 0.01):
        time.sleep(10.0)
    worker.join()
    assert answered == [True]
    assert torch.equal(found[0], expected)


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kernel", ["torch_blocks", "reference"])
def test_kernels_of_operations_answer_between_them(kernel: str) -> None:
    def handler(*_: object) -> None:
        raise Alarm

    n = 60_000 if kernel == "torch_blocks" else 2000
    q = torch.randn(1, 1, n, D, generator=torch.Generator().manual_seed(6))
    began = time.process_time()
    with pytest.raises(Alarm), alarm(handler, 0.2):
        any(hw.attend(q, q, q, kernel=kernel) is None for _ in range(999))
    assert time.process_time() - began < 1.2
