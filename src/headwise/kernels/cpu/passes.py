"""Calls of the compiled library: output, log-sum-exp and row statistics in one pass over the keys; gradients; measures
of rows; and how long a call takes on each target.

The C++ code is in `native/`; each file begins with a description. It runs on `torch.get_num_threads()` of PyTorch's
threads, and gives the same bits for any number of them.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.call import Call, Declined, traced
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.kernels.joint import RowGradients
from headwise.kernels.quantized import QuantizedKV, Vectors, in_memory
from headwise.masks import Everything, Grid
from headwise.rule import Rule, without_masked_queries
from headwise.rule.lowering import Lowered
from headwise.stats import Compiled, Statistic
from headwise.stats.statistic import Reduced, ToReduce

MOST_NUMBERS = 512  # the most numbers per row in one statistic
ROW = "): float32[b, h, n]"  # ends the signature of a statistic with one number per query
MOST_KEYS = 2**31 - 1
ALMOST_ALL = 1.0 - 2.0**-24  # the largest dropout probability below 1 in float32


def refusal(call: Call) -> str | None:
    """Return the reason why the library does not support the call, or None if it does."""
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace compiled code"
    if traced():
        return "torch.jit.trace and make_fx cannot record compiled code"
    q, grid = call.q, call.rule.grid
    if q.device.type != "cpu":
        return f"it requires tensors on the CPU, got {q.device.type}"
    if q.dtype not in binding.CODES:
        return f"it computes in float32, got {q.dtype}"
    if not all(map(_has_memory, (q, call.keys, call.values))):
        return "a tensor has no memory of its own (vmap, fake tensors or a subclass)"
    if 0 in (grid.b, grid.h, grid.n, grid.m):
        return "there are no queries or no keys"
    if call.keys.shape[1] == 0:
        return "there are no KV heads"
    if grid.m > MOST_KEYS:
        return f"it supports at most {MOST_KEYS} keys, got {grid.m}"
    found = library()
    if found.reason:
        return found.reason
    if isinstance(call.lowered, str):
        return call.lowered
    return None


def forward(call: Call) -> tuple[Tensor, Tensor, dict[Statistic, Tensor]]:
    """Output, log-sum-exp, supported statistics. Declined if a key or value masked for some query is not finite."""
    k, v, *scales = in_memory(call.keys, call.values)
    found = _forward(call, k, v, scales) if scales else None
    if found is None:
        found = _forward(call, call.k, call.v)
    assert found is not None  # it is None only for quantized KV
    return found


def _forward(
    call: Call, k: Tensor, v: Tensor, scales: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, dict[Statistic, Tensor]] | None:
    """Run on float keys and values, or on quantized ones with their scales; None if they must be dequantized first."""
    q, k, v = map(in_rows, (call.q, k, v))
    b, h, n, d = q.shape
    h_kv, m = k.shape[1], k.shape[2]
    out = q.new_empty(b, h, n, v.shape[-1])
    lse = floats(b, h, n)
    request = binding.ForwardCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, h_kv, n, m, d, v.shape[-1],
        binding.view(q), binding.view(k), binding.view(v), binding.view(out),
    )  # fmt: skip
    request.lse = lse.data_ptr()
    request.dropout, request.seed = min(call.dropout_p, ALMOST_ALL), call.seed
    if scales:
        request.key_scales, request.value_scales = map(binding.view, scales)
    statistics, held = _request_statistics(request, call)
    status = send("headwise_forward", request, call)
    del held
    if status == binding.FINITE:
        call.__dict__["values_finite"] = True  # saves the property a pass over the data
    return None if status == binding.TOO_MANY_QUERIES else (out, lse, statistics)


def like(
    q: Tensor, k: Tensor, v: Tensor, shape: Sequence[int], call: Call, scales: Sequence[Tensor] = ()
) -> tuple[binding.ForwardCall, list[Any]]:  # fmt: skip
    """The request of headwise_again for such tensors and a contiguous output; and what it points to, to be kept."""
    assert isinstance(call.lowered, Lowered)  # refusal() has checked
    b, h, n, d_v = shape
    nowhere = (binding.TensorView(None, *x.stride()[:3]) for x in (q, k, v))
    request = binding.ForwardCall(
        binding.CODES[q.dtype], 0, b, h, k.shape[1], n, k.shape[2], q.shape[3], d_v,
        *nowhere, binding.TensorView(None, h * n * d_v, n * d_v, d_v),
    )  # fmt: skip
    if scales:
        request.key_scales, request.value_scales = (binding.TensorView(None, *x.stride()[:3]) for x in scales)
    return request, binding.write_rule(request.rule, call.lowered, call.rule)


def like_backward(
    forward: binding.ForwardCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor
) -> binding.BackwardCall | None:
    """The request of headwise_again_backward for such tensors, after that of the forward pass, which holds what it
    points to; None if they are not those of such a forward pass, or not in rows."""
    b, h, h_kv, n, m, d, d_v = (getattr(forward, size) for size in ("b", "h", "h_kv", "n", "m", "d", "d_v"))
    of_q, of_k, of_v, of_out = (b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, d_v), (b, h, n, d_v)
    given = q, k, v, out, grad_out
    if [tuple(x.shape) for x in given] != [of_q, of_k, of_v, of_out, of_out]:
        return None
    if any(binding.CODES.get(x.dtype) != forward.dtype or x.stride(3) != 1 for x in given):
        return None
    if lse.shape != of_q[:3] or lse.dtype != torch.float32 or not lse.is_contiguous():
        return None
    strides = [x.stride()[:3] for x in given] + [(x[1] * x[2] * x[3], x[2] * x[3], x[3]) for x in (of_q, of_k, of_v)]
    views = (binding.TensorView(None, *x) for x in strides)
    request = binding.BackwardCall(forward.dtype, 0, b, h, h_kv, n, m, d, d_v, *views)
    request.rule = forward.rule
    return request


def backward(
    call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool] = (False, False, False),
    more: RowGradients | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v; relative, bias and sinks if `wanted` (float32, else None); rowsum(grad_out ∘ out)."""
    q = call.q
    if bool((lse == -torch.inf).any()):  # copies, which take a tenth of a small call's time
        q, grad_out = (without_masked_queries(x.detach(), lse) for x in (q, grad_out))
    q, k, v, out, grad_out = map(in_rows, (q, call.k, call.v, out, grad_out))
    b, h, n, d = q.shape
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = floats(b, h, n)
    request = binding.BackwardCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, k.shape[1], n, k.shape[2], d, v.shape[-1],
        *map(binding.view, (q, k, v, out, grad_out, dq, dk, dv)),
    )  # fmt: skip
    request.dropout, request.seed = min(call.dropout_p, ALMOST_ALL), call.seed
    request.delta = delta.data_ptr()
    assert isinstance(call.lowered, Lowered)  # refusal() has checked
    terms = call.lowered.relative, call.lowered.bias, call.lowered.sinks
    learned = [floats(*x.shape) if want and x is not None else None for x, want in zip(terms, wanted, strict=True)]
    binding.write_learned(request, *learned)
    held = [] if more is None else _request_rows(request, more)
    try:
        send("headwise_backward", request, call, lse)
    except Declined:
        # The forward pass would have declined non-finite keys that are visible to a query: these are fully masked.
        k, v = (x.detach().nan_to_num(0.0, 0.0, 0.0) for x in (call.k, call.v))
        return backward(replace(call, keys=k, values=v), out, lse, grad_out, wanted, more)
    del held
    return dq, dk, dv, *learned, delta


def _request_rows(request: binding.BackwardCall, more: RowGradients) -> list[Any]:
    """Add gradients of statistics of rows to the request. Returns the objects that it points to."""
    b, m = request.b, request.m
    held: list[Any] = []

    def address(x: Tensor | None) -> int | None:
        if x is None:
            return None
        held.append(x.contiguous())
        return int(held[-1].data_ptr())

    request.shift, request.logs, request.distance = map(address, more[:3])
    entries: list[Any] = [
        (address(factor), _argument(slope.keys, b, m, held), *(slope.within or (0, 0, False)))
        for factor, slope in more.masses
    ]
    held.append((binding.MassGradient * len(entries))(*entries))
    request.mass_count, request.masses = len(entries), held[-1]
    return held


def transposed(call: Call, lse: Tensor, y: Tensor) -> Tensor:
    """Weightsᵀ @ y for y [b, h, n, e] in q's dtype: [b, h_kv, m, e], summed over the query heads of each KV head."""
    q, k, y = in_rows(call.q), in_rows(call.k), in_rows(y)
    b, h, n, d = q.shape
    out = q.new_empty(b, k.shape[1], k.shape[2], y.shape[-1])
    nothing = binding.TensorView()
    request = binding.BackwardCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, k.shape[1], n, k.shape[2], d, y.shape[-1],
        binding.view(q), binding.view(k), nothing, nothing, binding.view(y), nothing, nothing, binding.view(out),
    )  # fmt: skip
    send("headwise_backward", request, call, lse)
    return out


def send(name: str, request: binding.Request, call: Call, lse: Tensor | None = None) -> int:
    """Call the library's function `name` with the call's rule, and any log-sum-exp, in the request; return its status,
    or raise on errors."""
    handle, lowered = library().handle, call.lowered
    assert handle is not None  # refusal() has checked
    assert isinstance(lowered, Lowered)
    held = binding.write_rule(request.rule, lowered, call.rule)
    if lse is not None and not isinstance(request, binding.ForwardCall):
        held.append(binding.write_lse(request, lse))
    status = getattr(handle, name)(ctypes.byref(request))
    del held
    if status == binding.NOT_FINITE:
        raise Declined("a masked key or value is not finite and would affect the rows that it is masked for")
    if status == binding.NO_MEMORY:
        raise KernelError("kernel='cpu' ran out of memory; use fewer or shorter sequences")
    return int(status)


def floats(*sizes: int) -> Tensor:
    """An output of the library: float32 on the CPU, regardless of PyTorch's defaults."""
    return torch.empty(sizes, dtype=torch.float32, device="cpu")


def in_rows(x: Tensor) -> Tensor:
    """Return x detached, with contiguous rows and signs resolved: PyTorch may keep that of z.conj().imag as a flag."""
    x = x.detach().resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


def _request_statistics(request: binding.ForwardCall, call: Call) -> tuple[dict[Statistic, Tensor], list[Any]]:
    """Add the supported statistics to the request. Returns their results and the objects that must outlive it."""
    b, h, n, m = call.rule.grid
    codes = library().statistics
    chosen: list[tuple[int, Statistic, Compiled]] = []
    for statistic in call.statistics:
        if (compiled := statistic.compiled) is None or (compiled.count or 0) > MOST_NUMBERS:
            continue
        if compiled.per == "key" and call.dropout_p > 0:  # that pass only has weights after dropout
            continue
        if (code := codes.get(compiled.signature)) is not None:
            chosen.append((code, statistic, compiled))
    if not chosen:
        return {}, []
    chosen.sort(key=itemgetter(0))
    rows = floats(sum(compiled.signature.endswith(ROW) for _, _, compiled in chosen), b, h, n)  # all such results
    views, address, size = iter(rows.unbind()), rows.data_ptr(), b * h * n * 4
    found: dict[Statistic, Tensor] = {}
    held: list[Any] = []
    entries: list[Any] = []
    for code, statistic, compiled in chosen:
        if compiled.signature.endswith(ROW):
            found[statistic] = next(views)
            entry: tuple[Any, ...] = code, 1, address, compiled.numbers
            address += size
        else:
            shape = b, h, m if compiled.per == "key" else n, *(() if compiled.count is None else (compiled.count,))
            found[statistic] = result = torch.empty(shape, dtype=compiled.dtype, device="cpu")
            entry = code, compiled.count or 1, result.data_ptr(), compiled.numbers
        if compiled.keys is not None or compiled.queries is not None:
            entry += _argument(compiled.keys, b, m, held), _argument(compiled.queries, b, n, held)
        entries.append(entry)
    wanted = (binding.Wanted * len(entries))(*entries)
    held.append(wanted)
    request.wanted_count, request.wanted = len(entries), wanted
    return found, held


def _argument(x: Tensor | None, b: int, size: int, held: list[Any]) -> tuple[int, int]:
    """headwise_argument, from [1 or b, size]."""
    if x is None:
        return 0, 0
    x = x.expand(b if len(x) > 1 else 1, size).contiguous()
    held.append(x)
    return x.data_ptr(), size if len(x) > 1 else 0


def _has_memory(x: Vectors) -> bool:
    if isinstance(x, QuantizedKV):
        return _has_memory(x.steps) and _has_memory(x.scales)
    if type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


FORMULAS = {"same": 0, "inverse": 1, "share": 2, "logit": 3, "log_sum": 4}  # as in native/headwise.h


def reduce_rows(lse: Tensor, measures: Sequence[ToReduce]) -> Reduced | None:
    """Measures reduced over the rows of each head; None if the library does not support one of them, or a tensor."""
    handle = library().handle
    given = [lse, *(one.x for one in measures if one.x is not None)]
    if handle is None or not all(_fits(x, lse) for x in given):
        return None
    if any(one.value.formula.name not in FORMULAS for one in measures):
        return None
    b, h, n = lse.shape
    entries, held = row_values(measures, [0] * len(measures), b, n)
    for entry, one in zip(entries, measures, strict=True):
        entry.x = None if one.x is None else one.x.data_ptr()
    result = empty(len(measures), b, h)
    request = binding.RowsCall(
        b, h, n, lse.data_ptr(), len(measures), entries, result.values.data_ptr(), result.sums[0].data_ptr(),
        result.sums[1].data_ptr(), result.nonfinite.data_ptr(),
    )  # fmt: skip
    handle.headwise_rows(ctypes.byref(request))
    del held
    return result


def row_values(measures: Sequence[ToReduce], places: Sequence[int], b: int, n: int) -> tuple[Any, list[Any]]:
    """An array of headwise_row_value, and the tensors that it points to; places: of statistics in the request."""
    held: list[Any] = []
    entries: list[Any] = []
    for one, place in zip(measures, places, strict=True):
        counted = one.value.counted
        if counted is not None:
            counted = counted.expand(-1, 1, n).contiguous()
            held.append(counted)
        entries.append((
            None, None if counted is None else counted.data_ptr(), n if counted is not None and len(counted) > 1 else 0,
            FORMULAS[one.value.formula.name], int(one.largest), place,
        ))  # fmt: skip
    return (binding.RowValue * len(entries))(*entries), held


def empty(count: int, b: int, h: int) -> Reduced:
    """A result to be written."""
    values = torch.empty(count, b, h, dtype=torch.float32, device="cpu")
    sums = torch.empty(2, count, b, h, dtype=torch.float64, device="cpu")
    return Reduced(values, sums, torch.empty(b, h, dtype=torch.int64, device="cpu"))


def _fits(x: Tensor, lse: Tensor) -> bool:
    return type(x) is Tensor and x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() and x.shape == lse.shape


SHAPE = (1, 8, 1024, 64)
ROUNDS = 7
TOLERANCE = 1.10  # the selected target is wrong if it takes more than this times as long as the fastest


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a forward call with q, k and v of `SHAPE` and no mask, by target: the minimum of `ROUNDS`."""

    dtype: str
    milliseconds: dict[str, float]
    selected: str

    @property
    def fastest(self) -> str:
        """The fastest target."""
        return min(self.milliseconds, key=self.milliseconds.__getitem__)

    @property
    def wrong(self) -> bool:
        """Whether another target is faster than the selected one by more than `TOLERANCE`."""
        return self.milliseconds[self.selected] > TOLERANCE * self.milliseconds[self.fastest]


def measure_targets() -> list[Timing]:
    """Time every target that runs on this CPU, alternately, in float32 and bfloat16; takes a few seconds. Other threads
    must not call attention meanwhile. Returns [] if no library is loaded."""
    found = library()
    if found.handle is None:
        return []
    names = found.runnable()
    timings = []
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
        call = Call(q, q, q, Rule(Everything(), SHAPE[-1] ** -0.5, Grid(*SHAPE[:3], SHAPE[2])))
        shortest = dict.fromkeys(names, float("inf"))
        for _ in range(ROUNDS):
            for name in names:
                with found.using(name):
                    began = perf_counter()
                    forward(call)
                    shortest[name] = min(shortest[name], 1e3 * (perf_counter() - began))
        timings.append(Timing(str(dtype).removeprefix("torch."), shortest, str(found.target())))
    return timings
