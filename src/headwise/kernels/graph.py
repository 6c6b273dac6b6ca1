"""Attention as one operator of the graph where PyTorch records operations instead of running them.

This holds for torch.compile, torch.export, make_fx and torch.jit.trace, which cannot trace compiled code, and for
torch.func, whose tensors have no memory of their own, and forward-mode derivatives.

The operators, declared in `operators.py`, take plain tensors and numbers: a mask is serialized to integers and tensors
(`write`). They call `headwise.kernels.run` when the graph runs and the data are available, so that the choice of a
kernel and the bits of the result are the same as outside of a graph.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from headwise import fields
from headwise.errors import KernelError
from headwise.kernels import KERNELS, events, named, operators, run
from headwise.kernels.call import Call, traced
from headwise.kernels.gradients import ONCE, REMEDY, PassBack, complete, each_entry, entry, once_only, stacked
from headwise.kernels.second import OfBackward, OfForward
from headwise.kernels.spread import check_local
from headwise.masks import Dense, Everything, Grid, Mask, Span
from headwise.masks.given import shortest
from headwise.rule import Rule, Terms, compute


def in_graph() -> bool:
    """Whether a graph is being recorded now. It is checked in every call, and takes less than a microsecond."""
    return recording() or has_derivatives()


def recording() -> bool:
    """Whether operations are recorded now, by torch.compile, torch.export, make_fx or torch.jit.trace."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and traced()


def has_derivatives() -> bool:
    """Whether tensors may be wrapped by torch.func or have a tangent."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether a function runs within torch.func (grad, vmap, …) or forward-mode derivatives, uncompiled."""
    return has_derivatives() and not recording()


def outside_transforms() -> AbstractContextManager[object]:
    """Within it, operations are not those of torch.func: results of `plain` tensors are plain."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    cleared: AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return cleared


def plain(x: Tensor) -> Tensor:
    """The numbers of a tensor that torch.func has wrapped, unless vmap has batched it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.detach()


def listed(x: Tensor) -> list[Any]:
    """x.tolist() of a vector, within torch.func too, where PyTorch 2.9 raises."""
    return [one.item() for one in x] if torch._C._functorch.is_functorch_wrapped_tensor(x) else x.tolist()


def can_record(rule: Rule) -> bool:
    """Whether the rule can be passed to an operator: its mask class is registered, and it is not a rectangle's."""
    return rule.grid.at_end and write(rule.mask) is not None


def recordable(rule: Rule, device: torch.device) -> Rule:
    """The rule; within torch.func, with its mask as a boolean tensor if its class is not registered."""
    if torch.compiler.is_dynamo_compiling() or not has_derivatives() or not rule.grid.at_end or can_record(rule):
        return rule
    rule.mask.check(rule.grid)
    whole = rule.allowed(Span(0, rule.grid.n), Span(0, rule.grid.m), device)
    return replace(rule, mask=Dense(whole))


def is_batched(x: Tensor) -> bool:
    """Whether torch.func.vmap has batched x."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def has_no_numbers(x: Tensor) -> bool:
    """Whether x only has a shape, a dtype and a device: it is on "meta" or a FakeTensor."""
    return x.is_meta or isinstance(x, FakeTensor)


def shapes(q: Tensor, k: Tensor, v: Tensor, rule: Rule, dropout_p: float, kernel: str) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call on tensors without data, differentiable; the mask has no effect."""
    return record(q, k, v, replace(rule, mask=Everything()), 0.0, kernel)


def record(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, dropout_p: float, kernel: str,
    of: tuple[int, Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp; invalid data of the mask raise when the graph runs. of: the key in `events.recorded` of a
    module that may have subscribers then, and the facts for them."""
    written = write(rule.mask)
    assert written is not None  # the caller has checked can_record()
    mask, held = written
    # Derivatives may be taken of the operations of a kernel that consists of PyTorch's, all of them: those of the
    # operator are only the first, in reverse mode. The compiler cannot see which kernel is in force.
    outside = has_derivatives() and not torch.compiler.is_dynamo_compiling()
    if outside and (chosen := KERNELS.get(named(kernel))) is not None and chosen.by_autograd:
        if not traced():  # its data are known
            rule.mask.check(rule.grid)
        (out, lse, _), _, _ = run(Call(q, k, v, rule, dropout_p), kernel)
        return out, lse
    terms = rule.terms(compute(q[..., :0, :]))
    learned = any(x is not None and x.requires_grad for x in (terms.relative, *terms.biases))
    # The seed stays a tensor: reading a number from it would break the graph.
    seed = torch.randint(1 << 40, (), device="cpu") if dropout_p > 0 else None
    numbers = mask, rule.scale, terms.soft_cap, dropout_p, learned, terms.split, kernel
    tensors = q, k, v, *terms.biases, *held
    if of is not None:
        out, lse, _ = operators.attend_published(
            tensors, len(terms.biases), terms.relative, terms.sinks, seed, *numbers, *of
        )
        return out, lse
    operator = _Attend.apply if has_derivatives() else _Attend.forward
    if torch.compiler.is_dynamo_compiling() and has_derivatives():
        from headwise.kernels.dynamo import apply as operator
    out, lse, _ = operator(len(terms.biases), numbers, terms.relative, terms.sinks, seed, *tensors)
    return out, lse


def _call(
    tensors: Sequence[Tensor], count: int, relative: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
    mask: Sequence[int], scale: float, soft_cap: float, dropout_p: float, learned: bool, split: int,
) -> Call:  # fmt: skip
    """The recorded call; checks the mask's data."""
    q, k, v, *rest = (x.detach() for x in tensors)
    b, h, n, _ = q.shape
    grid = Grid(b, h, n, k.shape[2])
    laid = read(mask, rest[count:])
    laid.check(grid)
    laid = shortest(laid)  # of boolean tensors, whose values were unknown when the graph was recorded
    terms = Terms(
        n, soft_cap, None if relative is None else relative.detach().requires_grad_(learned),
        tuple(bias.requires_grad_(learned) for bias in rest[:count]), None if sinks is None else sinks.detach(), split,
    )  # fmt: skip
    rule = Rule.of_terms(laid, scale, grid, terms)
    return Call(q, k, v, rule, dropout_p, 0 if seed is None else int(seed))


def attend(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the index in KERNELS of the kernel that ran."""
    check_local()
    *of_call, kernel = given
    with torch.no_grad():
        result, chosen, _ = run(_call(*of_call), kernel)
    return (
        result.out.contiguous(),
        result.lse.contiguous(),
        torch.tensor(list(KERNELS).index(chosen.name), device="cpu"),
    )


def attend_published(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`attend` of a module that may have subscribers now. They may keep what they receive, whose memory is the graph's:
    hence copies."""
    *of_call, kernel, key, facts = given
    module = events.recorded.get(key)
    if module is None or not events.subscribed(module):
        return attend(*of_call, kernel)
    check_local()
    with torch.no_grad():
        call = _call(*of_call)
        call = replace(call, q=call.q.clone(), keys=call.k.clone(), values=call.v.clone())
        (publish,) = events.publishers
        out, lse, chosen = publish(module, call, kernel, facts)
    return out.clone(), lse.clone(), torch.tensor(list(KERNELS).index(chosen), device="cpu")


def attend_fake(tensors: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of `attend`."""
    q, v = tensors[0], tensors[2]
    rows = q.shape[:3]
    lse = q.new_empty(rows, dtype=compute(q[..., :0, :]).dtype)
    return q.new_empty(*rows, v.shape[-1]), lse, torch.empty((), dtype=torch.long, device="cpu")


def decomposed(
    tensors: Sequence[Tensor], count: int, relative: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
    mask: Sequence[int], scale: float, soft_cap: float, dropout_p: float, learned: bool, split: int, kernel: str,
) -> Any:  # fmt: skip
    """`attend` by operators of PyTorch; NotImplemented outside of `run_decompositions`, such as in torch.compile."""
    # Only there has the operator kernels in Python for the devices.
    operator = torch.ops.headwise.attend.default
    if torch._C.DispatchKey.CPU not in operator.py_kernels:
        # Inductor's table is made of all that decomposes in an export, and it compiles nothing that is in it.
        if (inductor := sys.modules.get("torch._inductor.decomposition")) is not None:
            inductor.decompositions.pop(operator, None)
            inductor.fast_random_decomps().pop(operator, None)
        return NotImplemented
    from headwise.kernels.decomposed import attend as by_operators

    q, k, v, *rest = tensors
    biases = tuple(bias.to(q.device) for bias in rest[:count])
    terms = Terms(q.shape[2], soft_cap, relative, biases, sinks, split)
    out, lse = by_operators(q, k, v, read(mask, rest[count:]), scale, terms, dropout_p)
    return out, lse, torch.full((), list(KERNELS).index("torch_blocks"), device="cpu")


def attend_backward(*given: Any) -> list[Tensor]:
    """Gradients of q, k and v, and the requested ones of (relative, sinks, *biases)."""
    *of_call, out, lse, ran, grad_out, wanted = given
    call, kernel = _call(*of_call), list(KERNELS.values())[int(ran)]
    with torch.no_grad():
        found = kernel.gradients(call, out, lse, grad_out, wanted)
    tensors, count, relative, sinks, *_ = given
    found = complete(found, (relative, sinks, *tensors[3 : 3 + count]), wanted)
    return [x.contiguous() for x in found if x is not None]


def attend_backward_fake(
    tensors: Sequence[Tensor], count: int, relative: Tensor | None, sinks: Tensor | None, *rest: Any
) -> list[Tensor]:
    """The shapes of `attend_backward`."""
    terms = relative, sinks, *tensors[3 : 3 + count]
    learning = [x for x, want in zip(terms, rest[-1], strict=True) if want and x is not None]
    return [x.new_empty(x.shape) for x in (*tensors[:3], *learning)]


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what `backward` reads."""
    tensors, count, relative, sinks, seed, *numbers = inputs
    _Attend.setup_context(ctx, (count, numbers, relative, sinks, seed, *tensors), output)


def backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Any, ...]:
    """The gradients of the arguments of `attend`."""
    of_tensors, _, of_relative, of_sinks, *_ = ctx.needs_input_grad
    wanted = [of_relative, of_sinks, *of_tensors[3 : 3 + ctx.count]]
    found = _gradients(ctx.count, ctx.numbers, wanted, grad_out, *ctx.saved_tensors)
    d_tensors, d_relative, d_sinks = placed(found, len(of_tensors))
    return d_tensors, None, d_relative, d_sinks, *[None] * (len(ctx.numbers) + 2)


def setup_published(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """`setup` of `attend_published`."""
    setup(ctx, inputs[:-2], output)


def backward_published(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Any, ...]:
    """The gradients of the arguments of `attend_published`."""
    return *backward(ctx, grad_out), None, None


def placed(found: Sequence[Tensor | None], count: int) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """Gradients of the operator's list of `count` tensors, of relative and of sinks, from `_gradients`'s."""
    dq, dk, dv, d_relative, d_sinks, *d_biases = found
    return [dq, dk, dv, *d_biases, *[None] * (count - 3 - len(d_biases))], d_relative, d_sinks


def second_derivative(x: Tensor, grad: Tensor) -> Tensor:
    """Raise KernelError."""
    raise KernelError(ONCE)


def _one_by_one(operator: Any) -> Any:
    """The vmap rule of an operator: one call per entry, since entries may differ in every argument."""

    def each(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        found = [
            operator(*(entry(x, dims, at) for x, dims in zip(given, in_dims, strict=True)))
            for at in range(info.batch_size)
        ]
        results = [stacked(parts) for parts in zip(*found, strict=True)]
        return (tuple(results), (0,) * len(results)) if isinstance(found[0], tuple) else (results, [0] * len(results))

    return each


attend_vmap = _one_by_one(operators.attend)
attend_backward_vmap = _one_by_one(operators.attend_backward)


class _Attend(torch.autograd.Function):
    """count, numbers: the operator's arguments that are not tensors. given: relative, sinks, the seed, its tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, numbers: tuple[Any, ...], *given: Any) -> Any:
        return operators.attend(given[3:], count, *given[:3], *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.count, (*ctx.numbers, _), relative, sinks, seed, *tensors = inputs  # all numbers but the kernel
        (out, lse, ran), given = output, 3 + ctx.count
        saved = *tensors[:3], out, lse, relative, sinks, *tensors[3:given], ran, seed, *tensors[given:]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Any, ...]:
        _, _, of_relative, of_sinks, _, *of_tensors = ctx.needs_input_grad
        wanted = of_relative, of_sinks, *of_tensors[3 : 3 + ctx.count]
        run = partial(_gradients, ctx.count, ctx.numbers, wanted)
        beyond = "" if recording() else OfBackward(partial(_rule_of, ctx.count, ctx.numbers), ctx.count, wanted)
        found = PassBack.apply(run, beyond, grad_out, *ctx.saved_tensors)
        d_tensors, d_relative, d_sinks = placed(found, len(of_tensors))
        return None, None, d_relative, d_sinks, None, *d_tensors

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, relative: Any, sinks: Any, ___: Any, *tensors: Any) -> Any:
        if recording():
            raise KernelError(
                f"attention has no derivative in forward mode (torch.func.jvp, jacfwd, hessian; forward_ad) within a "
                f"graph of torch.compile or make_fx; use reverse mode (torch.func.grad, vjp, jacrev) for first "
                f"derivatives, or leave the graph; {REMEDY}"
            )
        beyond = OfForward(partial(_rule_of, ctx.count, ctx.numbers), ctx.count)
        moves = *tensors[:3], relative, sinks, *tensors[3 : 3 + ctx.count]
        return *each_entry(beyond.move_output, beyond, *moves, *ctx.saved_tensors), None, None


differentiable = _Attend.apply


def _gradients(
    count: int, numbers: Sequence[Any], wanted: Sequence[bool], grad_out: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, relative, sinks and biases, None for those that are not wanted."""
    q, k, v, out, lse, relative, sinks, *rest = saved
    biases, (ran, seed, *held) = rest[:count], rest[count:]
    given = [q, k, v, *biases, *held], count, relative, sinks, seed, *numbers
    dq, dk, dv, *learned = operators.attend_backward(*given, out, lse, ran, grad_out, list(wanted))
    here = iter(learned)
    return dq, dk, dv, *(next(here) if want else None for want in wanted)


def _rule_of(count: int, numbers: Sequence[Any], inputs: Sequence[Any], others: Sequence[Any]) -> Rule:
    """The rule of a recorded call; KernelError if its kernel has no second derivative."""
    (q, k, v, relative, sinks, *biases), (ran, seed, *held) = inputs, others
    if reason := once_only(list(KERNELS.values())[int(ran)], numbers[3]):
        raise KernelError(f"{reason} (torch.func.jvp, jacfwd, hessian; grad or jacrev, applied twice); {REMEDY}")
    return _call([q, k, v, *biases, *held], count, relative, sinks, seed, *numbers).rule


NOTHING, WHOLE, NUMBER, WORD, LIST, OBJECT = range(6)


def write(mask: Mask) -> tuple[list[int], list[Tensor]] | None:
    """Return the mask's numbers and tensors, or None if a class in it is not registered."""
    if fields.unregistered(mask) is not None:
        return None
    numbers: list[int] = []
    tensors: list[Tensor] = []

    def put(x: Tensor) -> int:
        tensors.append(x)
        return len(tensors) - 1

    _write(fields.write(mask, put), numbers)
    return numbers, tensors


def read(numbers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """Return the mask that `write` serialized."""
    found: Mask = fields.read(Mask, _read(iter(numbers)), "mask", lambda code, _: tensors[code])
    return found


def _write(code: Any, numbers: list[int]) -> None:
    if code is None:
        numbers.append(NOTHING)
    elif isinstance(code, dict):
        numbers.extend((OBJECT, len(code)))
        for name, value in code.items():
            _write(name, numbers)
            _write(value, numbers)
    elif isinstance(code, list):
        numbers.extend((LIST, len(code)))
        for value in code:
            _write(value, numbers)
    elif isinstance(code, (int, torch.SymInt)):
        numbers.extend((WHOLE, code))  # type: ignore[arg-type]
    else:
        text = code if isinstance(code, str) else repr(code)
        numbers.extend((WORD if isinstance(code, str) else NUMBER, len(text)))
        numbers.extend([ord(letter) for letter in text])


def _read(numbers: Iterator[int]) -> Any:
    kind = next(numbers)
    if kind == NOTHING:
        return None
    value = next(numbers)
    if kind == WHOLE:
        return value
    if kind == LIST:
        return [_read(numbers) for _ in range(value)]
    if kind == OBJECT:
        return {_read(numbers): _read(numbers) for _ in range(value)}
    text = "".join(chr(next(numbers)) for _ in range(value))
    return text if kind == WORD else float(text)
