"""Code that must not see batched tensors, one entry after another where vmap has batched them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LEVELS = 64  # of the vmap before torch.func
Run = Callable[..., tuple[Tensor | None, ...]]


def each_entry(run: Run, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """`run(*tensors)`; for each entry of the batch within torch.func.vmap, and for gradients that
    `torch.autograd.grad(is_grads_batched=True)` has batched, as `torch.autograd.functional.jacobian(vectorize=True)`
    does."""
    if any(map(torch._C._functorch.is_legacy_batchedtensor, tensors)):
        return _each_batched_gradient(run, tensors)
    if torch._C._functorch.peek_interpreter_stack() is None:
        return run(*tensors)
    found: tuple[Tensor | None, ...] = _EachEntry.apply(run, *tensors)
    return found


def _each_batched_gradient(run: Run, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """`torch.autograd` still uses the vmap before torch.func, whose batched tensors no `autograd.Function` receives
    one by one: the innermost batch is removed, and put back around the results."""
    batched = [torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors]
    level = max(_level(x) for x, b in zip(tensors, batched, strict=True) if b)
    whole = [torch._remove_batch_dim(x, level, 1, 0) if b else x for x, b in zip(tensors, batched, strict=True)]
    size = max(len(x) for x, b in zip(whole, batched, strict=True) if b)
    entries = ([x[at] if b else x for x, b in zip(whole, batched, strict=True)] for at in range(size))
    with _outside_vmap():
        results = _stacked_each([each_entry(run, *entry) for entry in entries])
    return tuple(None if x is None else torch._add_batch_dim(x, 0, level) for x in results)


def _level(x: Tensor) -> int:
    """The innermost vmap that has batched x: for any other, a dimension of the given size, 0, is added to x."""
    return next(level for level in range(LEVELS - 1, 0, -1) if len(torch._remove_batch_dim(x, level, 0, 0)))


@contextmanager
def _outside_vmap() -> Iterator[None]:
    """Leaves the innermost vmap of this thread, which forbids random numbers, such as dropout's."""
    within = torch._C._vmapmode_increment_nesting() > 1  # not in autograd's threads for other devices
    for _ in range(1 + within):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        if within:
            torch._C._vmapmode_increment_nesting()


class _EachEntry(torch.autograd.Function):
    @staticmethod
    def forward(run: Run, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Nothing is saved: only vmap runs it, and records what `run` does."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], run: Run, *tensors: Tensor) -> Any:
        def entry(at: int) -> list[Tensor]:
            return [x if dim is None else x.select(dim, at) for x, dim in zip(tensors, in_dims[1:], strict=True)]

        results = _stacked_each([each_entry(run, *entry(at)) for at in range(info.batch_size)])
        return results, tuple(None if x is None else 0 for x in results)


def _stacked_each(found: Sequence[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    return tuple(None if parts[0] is None else stacked(parts) for parts in zip(*found, strict=True))


def stacked(parts: Sequence[Any]) -> Tensor:
    """Like torch.stack, which fails for float16 on a CPU under autocast, in vmap even if autocast is disabled."""
    whole: Tensor = parts[0].new_empty(len(parts), *parts[0].shape)
    for at, part in enumerate(parts):
        whole[at] = part
    return whole
