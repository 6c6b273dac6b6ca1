"""From a `Call` to kernel launches: output with statistics, column sums, and all gradients."""
# mypy: disable-error-code="import-not-found"

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.kernels.call import Call, Result
from headwise.kernels.gradients import Learned, learns
from headwise.kernels.joint import RowGradients
from headwise.kernels.kernel import Answer, Kernel
from headwise.kernels.triton_gpu.backward import (
    bias_gradient_kernel,
    column_mass_kernel,
    delta_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
    relative_gradient_kernel,
)
from headwise.kernels.triton_gpu.forward import attend_kernel, merge_kernel
from headwise.kernels.triton_gpu.plan import (
    DECODE_QUERIES,
    Blocks,
    decode_blocks,
    forward_blocks,
    padded,
    splits,
    used,
)
from headwise.kernels.triton_gpu.problem import LIMIT, Problem, Wanted, of_rows, shared_memory, stride, walk
from headwise.kernels.triton_gpu.tile import FORMULAS, LSE, MASSES, MAX, SHARES
from headwise.masks import Grid
from headwise.rule import Rule, sink_gradient
from headwise.rule.lowering import of_terms, requested

Learning = tuple[bool, bool, bool] | None


def options(size: Blocks, *, busy: bool = False) -> dict[str, Any]:
    """Compile options; a kernel that accumulates statistics needs more registers, so it gets more warps."""
    # Contraction to fused multiply-adds is requested explicitly: Triton's default is about to change.
    warps = max(size.warps, 8) if busy else size.warps
    return {"num_warps": warps, "num_stages": size.stages, "enable_fp_fusion": True}


class Launch:
    """Launches of a kernel with the same arguments, but for the first ones.

    What Triton compiles depends on whether pointers and numbers are multiples of 16, and numbers are 1, or larger than
    an int32. `kind` is all of that for the first arguments: Triton looks at arguments once for each kind.
    """

    def __init__(self, kernel: Any, *rest: Any, options: dict[str, Any], **constants: Any) -> None:
        self.kernel, self.options, self.compiled = kernel, options, dict[Hashable, Any]()
        self.rest = *rest, *(constants[name] for name in kernel.arg_names[-len(constants) :])

    def __call__(self, kind: Hashable, grid: tuple[int, int, int], *first: Any) -> None:
        if (found := self.compiled.get(kind)) is not None:
            found[grid](*first, *self.rest)
        else:  # the interpreter returns nothing
            self.compiled[kind] = self.kernel[grid](*first, *self.rest, **self.options) or self.kernel


MERGE_ROWS = 16


class Forward:
    """The forward pass of calls that differ only in addresses, in the strides of k and v over batch and heads, and in
    decoding, where the query attends to all keys, in their number. held: what it reads besides q, k and v."""

    def __init__(self, problem: Problem, wanted: Wanted) -> None:
        b, h, h_kv, n, _ = problem.sizes
        q, whole, d_v = problem.q, problem.whole, problem.v.shape[-1]
        self.fold = fold = n <= DECODE_QUERIES
        of = q.shape[-1], d_v, q.dtype
        if fold:
            size = decode_blocks(*of, extras=problem.extras)
        else:
            size = forward_blocks(*of, extras=problem.extras, shared=shared_memory(q.device))
        row_blocks = -(-(h // h_kv * n) // size.rows) if fold else -(-n // size.rows)
        plan = None if whole else problem.keys_of(n if fold else size.rows, size.cols)
        rule = problem.score_inputs(whole=whole)
        mass_count = len(wanted.table)
        g = 1 << (mass_count - 1).bit_length() if mass_count else 0
        self.cols, self.programs, self.rows = size.cols, row_blocks * b * (h_kv if fold else h), b * h * n
        self.shape, self.planes = (b, h, n, d_v), (SHARES + mass_count if wanted.busy else MAX + 1, b, h, n)
        self.sums = d_v + MASSES + g  # partial sums of each row and range of keys
        entries, table = (*wanted.table, *[(-1, 0, 0, 0)] * (g - mass_count)), None
        if entries:
            (table,) = problem.placed(*entries, make=lambda: (torch.tensor(entries, dtype=torch.int32, device="cpu"),))
        weights = torch.cat([x.to(q.device) for x in wanted.weights]).contiguous() if wanted.weights else None
        self.held = tuple(x for x in (*rule, *(plan or ()), table, weights) if isinstance(x, Tensor))
        flags: dict[str, Any] = {
            "HAS_SINKS": problem.sinks is not None,
            "DROP": problem.drop > 0,
            **{flag: flag in wanted.flags for _, flag in FORMULAS.values() if flag},
            "G": g,
        }
        self.attend = Launch(
            attend_kernel, *q.stride(), *problem.k.stride()[2:], *problem.v.stride()[2:], h, h_kv, n, *rule,
            problem.sinks, problem.seed, problem.drop, *walk(plan), row_blocks, self.rows, table, mass_count, weights,
            problem.shift, **problem.constants(size), **flags, WEIGHTED=weights is not None, FOLD=fold,
            options=options(size, busy=wanted.busy),
        )  # fmt: skip
        self.merge = Launch(
            merge_kernel, problem.sinks, h, n, self.rows, table, mass_count, problem.drop,
            DV=d_v, DVP=padded(d_v), BM=MERGE_ROWS, **flags, PRECISION=problem.precision, options={"num_warps": 4},
        )  # fmt: skip

    def parts(self, m: int) -> int:
        """The number of ranges of m keys."""
        return splits(m, self.programs) if self.fold else 1

    def kind(self, q: Tensor, k: Tensor, v: Tensor) -> Hashable:
        """What the compiled kernels depend on, of these tensors."""
        m, pointers = k.shape[2], (q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16)
        numbers = (m, *k.stride()[:2], *v.stride()[:2])
        return self.parts(m) > 1, pointers, *((x == 1, x % 16 == 0, x > LIMIT) for x in numbers)

    def run(self, kind: Hashable, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output [b, h, n, d_v] in q's dtype, and float32 [planes, b, h, n] in the order of `tile.LSE` and so on."""
        m = k.shape[2]
        parts, blocks, partial = self.parts(m), -(-m // self.cols), None
        out, results = q.new_empty(self.shape), q.new_empty(self.planes, dtype=torch.float32)
        if parts > 1:
            partial = q.new_empty(parts * self.rows * self.sums, dtype=torch.float32)
        with torch.cuda.device_of(q):
            self.attend(
                kind, (self.programs, parts, 1), q, k, v, out, results, partial, m, -(-blocks // parts),
                *k.stride()[:2], *v.stride()[:2],
            )  # fmt: skip
            if parts > 1:
                self.merge(kind, (-(-self.rows // MERGE_ROWS), 1, 1), out, results, partial, parts)
        return out, results


def forward(problem: Problem, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """`Forward.run`, once."""
    found, given = Forward(problem, wanted), (problem.q, problem.k, problem.v)
    return found.run(found.kind(*given), *given)


class Again(NamedTuple):
    """`Kernel.prepared` of calls without a map. rule: of one of them. refusal: that of `check`, with `learned`."""

    forward: Forward
    rule: Rule
    refusal: Callable[[Call, Learning], str | None]
    learned: Learning = None

    def run(self, q: Tensor, memory: Sequence[Tensor], m: int, gap: tuple[int, int] | None) -> Answer | None:
        """As `Prepared.run`."""
        found = self.computed(q, *memory)
        return None if found is None else (found[0], None)

    def computed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `Forward.run`; None if the call is refused."""
        kind = self.forward.kind(q, k, v)
        if kind not in self.forward.attend.compiled:  # with other numbers of keys, it may be checked as another kind
            b, h, n, _ = q.shape
            rule = replace(self.rule, grid=Grid(b, h, n, k.shape[2]))
            if self.refusal(Call(q, k, v, rule), self.learned):
                return None
        used(self.forward.held, q.device)
        return self.forward.run(kind, q, k, v)

    def trained(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `Learned.forward`."""
        found = self.computed(q, k, v)
        return None if found is None else (found[0], found[1][LSE])


def columns(problem: Problem, lse: Tensor) -> Tensor:
    """The weight that each key receives, Σ_i p_ij: float32 [b, h, m]."""
    b, h, _, _, m = problem.sizes
    size = problem.backward_size()
    plan = problem.queries_of(size.rows, size.cols)
    received = torch.empty(b, h, m, dtype=torch.float32, device=lse.device)
    col_blocks = -(-m // size.cols)
    constants = problem.constants(size)
    del constants["DV"], constants["DVP"]
    with torch.cuda.device_of(lse):
        column_mass_kernel[(col_blocks * b * h,)](
            problem.q, problem.k, *problem.q.stride(), *problem.k.stride(), *problem.sizes[1:],
            *problem.score_inputs(), *walk(plan), lse, received, col_blocks, **constants, **options(size),
        )  # fmt: skip
    return received


DELTA_ROWS = 64


class Gradients(NamedTuple):
    """Gradients of q, k, v; of the terms added to the scores, where requested; and δ = rowsum(dO ∘ O), [b, h, n], whose
    sum is the importance of a head, the gradient of a factor ξ = 1 on its output (Michel et al. 2019)."""

    q: Tensor
    k: Tensor
    v: Tensor
    relative: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    delta: Tensor


def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, *, score_gradients: tuple[bool, bool, bool],
    more: RowGradients | None = None,
) -> Gradients:  # fmt: skip
    """Compute all gradients; `score_gradients`: whether relative, bias and sinks require theirs. more: those of
    statistics of rows."""
    b, h, h_kv, n, m = problem.sizes
    q, v = problem.q, problem.v
    d, d_v = q.shape[-1], v.shape[-1]
    added = of_rows(problem, more)
    size = problem.backward_size(joint=added is not None)
    plan = problem.keys_of(size.rows, size.cols)
    rows, cols = -(-n // size.rows), -(-m // size.cols)
    back = problem.queries_of(size.rows, size.cols)
    delta = torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    dq = torch.empty(b, h, n, d, dtype=q.dtype, device=q.device)
    dk = torch.empty(b, h_kv, m, d, dtype=q.dtype, device=q.device)
    dv = torch.empty(b, h_kv, m, d_v, dtype=q.dtype, device=q.device)
    common = (*problem.inputs, *problem.score_inputs(), problem.seed, problem.drop)
    flags = {**problem.constants(size), "DROP": problem.drop > 0, **options(size)}
    with torch.cuda.device_of(q):
        delta_kernel[(-(-delta.numel() // DELTA_ROWS),)](
            out, d_out, delta, *d_out.stride(), h, n, delta.numel(), DV=d_v, DVP=padded(d_v), BM=DELTA_ROWS
        )
        shifted = delta if more is None else delta + more.shift
        given = (d_out, *d_out.stride(), lse, shifted, added)
        query_gradient_kernel[(rows * b * h,)](*common, *walk(plan), *given, dq, rows, problem.scale, **flags)
        key_gradient_kernel[(cols * b * h_kv,)](*common, *walk(back), *given, dk, dv, cols, problem.scale, **flags)
        want_relative, want_bias, want_sinks = score_gradients
        relative = _relative_gradient(problem, size, common, given, flags) if want_relative else None
        bias = _bias_gradient(problem, size, common, given, flags) if want_bias else None
        assert problem.sinks is not None or not want_sinks
        of_sink = shifted if more is None or more.logs is None else shifted + more.logs
        sinks = sink_gradient(problem.sinks, lse, of_sink) if problem.sinks is not None and want_sinks else None
    return Gradients(dq, dk, dv, relative, bias, sinks, delta)


def _relative_gradient(
    problem: Problem, size: Blocks, common: tuple[Any, ...], given: tuple[Any, ...], flags: dict[str, Any]
) -> Tensor:
    """Gradient of the table [h or 1, n + m − 1]. The halves of neighbouring bands overlap and are added here."""
    b, h, _, n, m = problem.sizes
    assert problem.relative is not None
    height = size.rows
    bands = -(-(n + m - 1) // height) + 1
    parts = torch.empty(h, bands, 2 * height, dtype=torch.float32, device=problem.q.device)
    seen = problem.range_of(height)
    flags = {name: value for name, value in flags.items() if name != "BN"}
    relative_gradient_kernel[(h * bands,)](
        *common, seen, stride(seen, 0), *given, parts, b, -(-n // height), bands, **flags
    )
    sums = parts.new_zeros(h, bands + 1, height)
    sums[:, :-1] += parts[..., :height]
    sums[:, 1:] += parts[..., height:]
    table = sums.view(h, -1)[:, height - 1 : height - 1 + n + m - 1]
    return table if len(problem.relative) == h else table.sum(0, keepdim=True)


def _bias_gradient(
    problem: Problem, size: Blocks, common: tuple[Any, ...], given: tuple[Any, ...], flags: dict[str, Any]
) -> Tensor:
    """Gradient of the bias [b|1, h|1, n|1, m|1], summed over the axes along which it is broadcast."""
    b, h, _, n, m = problem.sizes
    assert problem.bias is not None
    result = torch.empty(problem.bias.shape, dtype=torch.float32, device=problem.q.device)
    own_b, own_h, own_n, own_m = result.shape
    rows, cols = -(-n // size.rows), -(-m // size.cols)
    row_blocks, row_steps = (1, rows) if own_n == 1 else (rows, 1)
    col_blocks, col_steps = (1, cols) if own_m == 1 else (cols, 1)
    seen = problem.range_of(size.rows)
    bias_gradient_kernel[(own_b * own_h * row_blocks * col_blocks,)](
        *common, seen, stride(seen, 0), *given, result, *result.stride(), b // own_b, h // own_h,
        row_steps, col_steps, row_blocks, col_blocks, ALL_ROWS=own_n == 1, ALL_COLS=own_m == 1, **flags,
    )  # fmt: skip
    return result


def attend(call: Call) -> Result:
    """Run a call that was not refused, with all requested statistics that the kernels support."""
    problem = Problem.of(call)
    wanted = Wanted.of(call.statistics, call.rule.grid)
    out, planes = forward(problem, wanted)
    found = {statistic: planes[at] for statistic, at in wanted.planes.items()}
    if wanted.columns:
        found |= dict.fromkeys(wanted.columns, columns(problem, planes[LSE]))
    return Result(out, planes[LSE], found)


def again(kernel: Kernel, call: Call, refusal: Callable[[Call, Learning], str | None]) -> Again | Learned:
    """What is kept for calls like this one, which has no statistics."""
    found = Again(
        Forward(Problem.of(call), Wanted()), call.rule, refusal, (False, False, False) if learns(call) else None
    )
    return found if found.learned is None else Learned(kernel, call.rule, found.trained)


def gradients(
    call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool], more: RowGradients | None = None
) -> list[Tensor | None]:
    """`Kernel.gradients`. The kernels add all biases into one; its gradient is reduced to the shape of each."""
    terms = call.rule.terms(lse[..., :0])
    found = backward(Problem.of(call), out, lse, grad_out, score_gradients=requested(terms, wanted), more=more)
    relative, biases = of_terms(terms, wanted, found.relative, found.bias)
    return [found.q, found.k, found.v, relative, found.sinks, *biases]
