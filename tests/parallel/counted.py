"""Bytes that this process sends through torch.distributed, counted where PyTorch hands them to the backend.

    with counted() as sent:
        out = parallel.ring_attend(q, k, v)
    sent.bytes, sent.calls["send"]

A message counts by its size. A collective counts as the algorithm that sends least does, for each of R ranks: an
all-reduce of S bytes as the reduce-scatter and the all-gather that it is, 2·S·(R − 1)/R; an all-gather as its own part
sent to each other rank; a reduce-scatter as the parts that are others'; an all-to-all as the parts that leave. What
goes to one root or comes from one counts on the ranks that send it. Barriers count nothing. The backward pass is
counted on CPUs, where autograd runs it on the thread that asked for it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """What has been sent so far.

    Attributes:
        bytes: all of it; by: bytes of each kind of call; calls: how many there were of each kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        return sum(self.by.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            name = func._schema.name.partition("::")[2]
            kind = KINDS.get(name)
            if kind is not None:
                names = [argument.name for argument in func._schema.arguments]
                given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
                self.calls[kind] += 1
                self.by[kind] += _bytes(kind, given)
            elif name not in SILENT:
                raise NotImplementedError(f"counted() does not know what {func._schema.name} sends")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Sent]:
    """Count what this process sends within it."""
    with Sent() as sent:
        yield sent


KINDS = {
    "send": "send",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "allgather_": "all_gather", "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all", "alltoall_": "all_to_all", "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast", "broadcast": "broadcast", "reduce_": "reduce", "gather_": "gather",
    "scatter_": "scatter",
}  # fmt: skip
SILENT = {"recv_", "recv_any_source_", "barrier", "wait_tensor", "_wrap_tensor_autograd"}


def _bytes(kind: str, given: dict[str, Any]) -> int:
    ranks, rank = _place(given)
    held = _size(given.get("input_tensors", given.get("input", given.get("tensors", given.get("input_tensor")))))
    if kind == "send":
        return held
    if kind == "all_reduce":
        return 2 * held * (ranks - 1) // ranks
    if kind == "all_gather":
        return held * (ranks - 1)
    if kind == "reduce_scatter":
        return held * (ranks - 1) // ranks
    if kind == "all_to_all":
        return held - _own_part(given, held, ranks, rank)
    at_root = given.get("root_rank", 0) == rank
    if kind == "broadcast":
        return held * (ranks - 1) if at_root else 0
    if kind == "scatter":
        return held * (ranks - 1) // ranks if at_root else 0
    return 0 if at_root else held  # gather, reduce


def _own_part(given: dict[str, Any], held: int, ranks: int, rank: int) -> int:
    """Bytes of an all-to-all that stay."""
    splits = given.get("input_split_sizes")
    if isinstance(given.get("input_tensors"), list):
        return _size(given["input_tensors"][rank])
    if not splits:
        return held // ranks
    return held * int(splits[rank]) // max(1, sum(map(int, splits)))


def _place(given: dict[str, Any]) -> tuple[int, int]:
    """Ranks of the call's group, and this one's place among them."""
    group = given.get("process_group")
    if group is not None:
        group = dist.ProcessGroup.unbox(group)
    else:
        name = given["group_name"]
        group = dist.distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name
    return group.size(), group.rank()


def _size(x: Any) -> int:
    """Bytes of a tensor, or of all tensors in a list of any depth."""
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(map(_size, x)) if isinstance(x, list | tuple) else 0
