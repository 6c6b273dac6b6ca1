"""How weights, squares, diagonals and top keys are made: the same bits always, and no memory but their own."""

import ctypes
import math
import sys
from collections.abc import Callable

import compiled_reads
import pytest
import torch
from kernel_formula import run
from samples import MASKS, qkv
from test_kernel_conduct import (
    at_the_end,
    forks,
    guarded,
    in_child,
    same,
    threads as threads,
    wanted,
    write_wanted,
)  # fmt: skip
from torch import Tensor

from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.masks import Causal, Dense, Grid, Span
from headwise.rule import Rule, lowering
from headwise.rule.lowering import Lowered, lower
from headwise.scores import ALiBi, Bias, SoftCap
from headwise.stats import COLUMN_MASS, ENTROPY, RangeMass, SameLabel, TopKeys, TopWeights

pytestmark = pytest.mark.usefixtures("target")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def everything(dtype: torch.dtype, n: int = 150, m: int = 700) -> list[Tensor]:
    """All that is made of a map, under most of what a rule can hold, of the whole and of a rectangle."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = qkv(2, 6, 3, n, m, 20, 24, dtype=dtype)
    score = (SoftCap(5.0), ALiBi([0.01] * 6), Bias(torch.randn(1, 1, n, m, generator=generator)))
    labels = (torch.randint(0, 9, (2, size), generator=generator, dtype=torch.int32) for size in (m, n))
    mask = MASKS["window and sinks"](2, n, m)
    told = run(q, k, v, mask, score, statistics=[TopWeights(9), TopKeys(9), SameLabel(*labels, 1)])
    found = [told.out, told.lse, *told.statistics.values()]
    whole = Rule(mask, 20**-0.5, Grid(2, 6, n, m), score)
    for rows, cols in ((Span(0, n), Span(0, m)), (Span(n // 3, n - 1), Span(5, m - 3))):
        given = q[:, :, slice(*rows)], k[:, :, slice(*cols)], told.lse[:, :, slice(*rows)], whole.part(rows, cols)
        squares = [x for cell in (1, 4, 50) for x in compiled_reads.squares(*given, cell) or ()]
        found += [
            x for x in (compiled_reads.weights(*given), *squares, compiled_reads.diagonals(*given)) if x is not None
        ]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_for_any_number_of_threads(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    threads(1)
    first = everything(dtype)
    assert len(first) == 5 + 2 * (1 + 9 + 1)
    for count in (2, 3, 8):
        threads(count)
        assert same(everything(dtype), first), count


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["everything", "window and sinks", "lengths", "documents"])
def test_pytorchs_default_dtype_and_device_change_nothing(dtype: torch.dtype, name: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2, 6, 3, 37, 53, 20, 24))
    bias, labels, grad = (
        torch.linspace(-1, 1, 53).view(1, 1, 1, 53),
        torch.arange(53)[None] % 5,
        torch.ones(2, 6, 37, 24),
    )
    mask, score = MASKS[name](2, 37, 53), (ALiBi([0.01, 0.3, 1.0, 3.0, 0.1, 0.0]), Bias(bias.requires_grad_()))
    asked = [
        ENTROPY,
        COLUMN_MASS,
        RangeMass(0, 3, relative=False),
        SameLabel(labels, labels[:, 16:], 1),
        TopWeights(3),
        TopKeys(3),
    ]
    rule = Rule(mask, 20**-0.5, Grid(2, 6, 37, 53), tuple(one.kept() for one in score))

    def found() -> list[Tensor]:
        told = run(q, k, v, mask, score, statistics=asked)
        whole = q.detach(), k.detach(), told.lse, rule
        squares = compiled_reads.squares(*whole, 4)
        parts = [
            told.out.detach(),
            told.lse,
            *told.statistics.values(),
            *torch.autograd.grad(told.out, (q, k, v, bias), grad),
        ]
        return [
            *parts,
            *(squares or ()),
            *(x for x in (compiled_reads.weights(*whole), compiled_reads.diagonals(*whole)) if x is not None),
        ]

    first = found()
    assert len(first) == 2 + len(asked) + 4 + 3 + 2
    lowering._lowered_mask.cache_clear()
    del rule.__dict__["_lowered"]
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            again = found()
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(again, first)


@pytest.mark.thorough
def test_what_an_earlier_call_left_in_memory_changes_nothing() -> None:
    first = everything(torch.float32)
    bad = torch.full((2, 6, 200, 64), math.nan)
    run(bad, bad, bad, statistics=[TopKeys(60)])
    compiled_reads.diagonals(bad, bad, bad[..., 0], Rule(Causal(), 1.0, Grid(2, 6, 200, 200)))
    assert same(everything(torch.float32), first)


@pytest.mark.thorough_except(
    "avx2-everything-1-5-3-dtype0", "avx2-window and sinks-53-131-13-dtype1", "portable-dense-53-131-13-dtype0"
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m", "d"), [(1, 5, 3), (53, 131, 13), (97, 1100, 64)])
@pytest.mark.parametrize("mask", ["everything", "window and sinks", "nothing for some", "dense"])
def test_only_its_own_results_are_written(dtype: torch.dtype, n: int, m: int, d: int, mask: str) -> None:
    b, h, h_kv = 2, 4, 2
    q, k, v = qkv(b, h, h_kv, n, m, d, d, dtype=dtype)
    rule = Rule(MASKS[mask](b, n, m), d**-0.5, Grid(b, h, n, m))
    lowered, handle = lower(rule), library().handle
    assert isinstance(lowered, Lowered)
    assert handle is not None
    lse = run(q, k, v, rule.mask).lse
    sizes, views = (b, h, h_kv, n, m, d), (binding.view(q), binding.view(k))

    def wide(*shape: int) -> tuple[Tensor, Callable[[], bool]]:
        """Memory of int64 numbers, a guarded one of float32 twice as long."""
        return guarded(*shape[:-1], 2 * shape[-1])

    for cell in (1, 7, 60):
        shape = b, h, -(-n // cell), -(-m // cell)
        (mean, one), (largest, two), (allowed, three) = guarded(*shape), guarded(*shape), wide(*shape)
        for fields in ((("mean", mean),), (("mean", mean), ("largest", largest), ("allowed", allowed))):
            request = binding.PoolCall(binding.CODES[dtype], 2, *sizes, *views)
            request.cell = cell
            held = [binding.write_lse(request, lse)]
            for name, x in fields:
                setattr(request, name, x.data_ptr())
            held += binding.write_rule(request.rule, lowered, rule)
            assert handle.headwise_pool(ctypes.byref(request)) == binding.DONE
            assert held
            assert all(check() for check in (one, two, three)[: len(fields)])

    mass, check = guarded(b, h, n + m - 1)
    diagonals = binding.DiagonalsCall(binding.CODES[dtype], 2, *sizes, *views)
    diagonals.mass = mass.data_ptr()
    held = [binding.write_lse(diagonals, lse)]
    held += binding.write_rule(diagonals.rule, lowered, rule)
    assert handle.headwise_diagonals(ctypes.byref(diagonals)) == binding.DONE
    assert check()

    (weights, one), (keys, two), (matched, three) = guarded(b, h, n, 5), wide(b, h, n, 5), guarded(2, b, h, n)
    labels = torch.zeros(m, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    arguments = {name: binding.Argument(x.data_ptr(), 0) for name, x in zip(("keys", "queries"), labels, strict=True)}
    call = binding.ForwardCall(binding.CODES[dtype], 2, *sizes, 0, *views)
    write_wanted(call, [
        *(wanted("same_label", x, numbers=(1,), **arguments) for x in matched),
        wanted("top_weights", weights, count=5), wanted("top_keys", keys, count=5),
    ])  # fmt: skip
    held = binding.write_rule(call.rule, lowered, rule)
    assert handle.headwise_forward(ctypes.byref(call)) in (binding.DONE, binding.FINITE)
    assert all(check() for check in (one, two, three))


@pytest.mark.thorough
@forks
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is protected as Linux does it")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", "dense"])
def test_nothing_is_read_beyond_the_end(dtype: torch.dtype, mask: str) -> None:
    def work() -> bool:
        for n, m, d in ((1, 70, 5), (37, 53, 8), (61, 257, 31), (100, 520, 64)):
            which = MASKS[mask](2, n, m)
            if isinstance(which, Dense):
                which = Dense(at_the_end(which.mask))
            q, k, v = (at_the_end(x) for x in qkv(2, 4, 2, n, m, d, d, dtype=dtype))
            labels = at_the_end(torch.zeros(1, m, dtype=torch.int32)), at_the_end(torch.zeros(1, n, dtype=torch.int32))
            for score in ((), (Bias(at_the_end(torch.randn(2, 1, n, m))), ALiBi(at_the_end(torch.full((4,), 0.1))))):
                told = run(
                    q, k, v, which, score, statistics=[TopKeys(6), SameLabel(*labels, 1), SameLabel(*labels, 999)]
                )
                lse, rule = at_the_end(told.lse), Rule(which, 1.0, Grid(2, 4, n, m), score)
                compiled_reads.weights(q, k, lse, rule)
                compiled_reads.squares(q, k, lse, rule, 5)
                compiled_reads.diagonals(q, k, lse, rule)
        return True

    assert in_child(work) == 0
