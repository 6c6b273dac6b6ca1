"""What other libraries' parallelism makes of a call: the heads that it has, of those of the layer, and refusals.

PyTorch splits heads by DTensor parameters (`parallelize_module`, transformers' `tp_plan`), and sequences by
`context_parallel`. `headwise.parallel` does both for headwise's own layers.
"""

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, DTypeError

HELD = "heads_held"  # the attribute of layers whose heads `headwise.parallel` has split
_CALL = nn.Module._call_impl.__code__
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention.default


class Held(NamedTuple):
    """The numbers of the heads of this rank in their layer, and how many the layer has on all ranks."""

    heads: range
    of: int

    def __str__(self) -> str:
        return f"this rank has the heads {self.heads.start} to {self.heads.stop - 1} of {self.of}"


def check_local(**tensors: Any) -> None:
    """Raise for a call of which this rank has only a part: one with DTensors, or under PyTorch's context parallelism.
    It looks at one dictionary if PyTorch's module of neither is imported."""
    if torch.compiler.is_compiling() or "torch.distributed.tensor" not in sys.modules:
        return
    check_no_dtensor(**tensors)
    if "torch.distributed.tensor.experimental" not in sys.modules:
        return
    dispatcher = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    hooks = (hook for module in running() for hook in module._forward_pre_hooks.values())
    owners = (getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks)  # a plan's are partial
    # It dispatches PyTorch's attention, or has gathered the arguments of a running module.
    if _FUSED in dispatcher._custom_op_handlers or any(type(one).__name__ == "_ContextParallel" for one in owners):
        raise ConfigError(
            "attend: PyTorch's context_parallel is active, so this rank has only a part of the sequence, and "
            "attention over it alone would be wrong. Call headwise.parallel.ring_attend, which passes keys between "
            "ranks, or let the model compute its own attention there: detach() the handle of headwise.attach(model), "
            "and stop watch"
        )


def check_no_dtensor(**tensors: Any) -> None:
    """Raise DTypeError for a DTensor."""
    for name, x in tensors.items():
        if is_dtensor(x):
            raise DTypeError(
                f"{name}: expected a plain tensor, got a DTensor with the placements {x.placements}; pass "
                f"{name}.to_local() where heads or batch entries are split, and where the sequence is, call "
                f"headwise.parallel.ring_attend with the local tensors"
            )


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor; without importing its module, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def running() -> Iterator[nn.Module]:
    """The modules whose forward runs in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def held_as_declared(module: nn.Module) -> Held | None:
    """The heads of this rank of a layer that `headwise.parallel` has split."""
    known = getattr(module, HELD, None)
    return None if known is None else Held(known.heads, known.num_heads)


def held_by(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Held | None:
    """The heads of a call among those of its layer, by the DTensor parameters of the module, else of those in which it
    runs, whose part has the call's width. None if it has all; ConfigError if none fits, or some disagree."""
    known = held_as_declared(module)
    if known is not None:
        return known
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    h, split, around = q.shape[1], "", list(running())
    if not h:
        if any(map(is_dtensor, module.parameters())):
            raise ConfigError(f"{type(module).__name__}: {uneven()}")
        return None
    repeated = len(k[0, :, :1].detach().unique_consecutive(dim=0)) if k.numel() else 0
    widths = ({h * x.shape[-1] for x in (q, v)}, {n * x.shape[-1] for x in (q, v) for n in (k.shape[1], repeated)})
    outer = around[around.index(module) + 1 :] if module in around else []
    for one in (module, *outer):
        places, whole, name = _places(one, h, *widths)
        # What is split is not the heads then; beside split parameters, one such width may be by chance.
        if not places and not split and whole > bool(name):
            return None
        split = split or name
        if len(places) > 1 or (places and min(places)[0] < 0):
            break
        for first, of in places:
            return None if of == h else Held(range(first, first + h), of)
    if not split:
        return None
    raise ConfigError(
        f"{type(module).__name__}: {split} is split over ranks, and which heads of the layer the {h} of this call are "
        f"cannot be read from the placements of its parameters; leave the module out (layers=…), or split whole heads, "
        f"as ColwiseParallel does for separate projections of queries, keys and values"
    )


def uneven(counts: Sequence[int] = ()) -> str:
    """What is to be said of ranks with these numbers of heads, or of a rank that has none."""
    have = f"the ranks have {', '.join(map(str, counts))} heads of a layer" if counts else "this rank has no heads"
    return f"{have}: heads that are split unevenly are not supported; take a number of ranks that divides theirs"


def _places(module: nn.Module, h: int, widths: set[int], keys: set[int]) -> tuple[set[tuple[int, int]], int, str]:
    """(first head, heads of the layer) by each split parameter, the axes of the heads' width that are whole, a split
    parameter. widths: of the call's query heads, as queries and as values; keys: of its KV heads."""
    found: tuple[set[tuple[int, int]], ...] = (set(), set())  # by inputs, as of W_O; by outputs, which may be fused
    whole, either, split = 0, 0, ""
    for name, parameter in module.named_parameters():
        axes = _axes(parameter)
        if axes is None or any(local != size for local, _, size in axes):
            split = split or name
        for axis, (local, start, size) in enumerate(axes or ()):
            placed = found[0 if axis == 1 else 1]
            if local == size:
                whole += size in widths and parameter.ndim > 1
            elif local in widths:
                d = local // h
                placed.add((-1, size) if start % d or size % d else (start // d, size // d))
            elif size in widths and axis == 0 and local in keys:  # keys that are split, or queries that are gathered
                either += 1
            elif size in widths:
                placed.add((0, h))
    return found[0] or found[1], whole + either if whole else 0, split


def _axes(parameter: Tensor) -> list[tuple[int, int, int]] | None:
    """(entries on this rank, the first of them, entries on all ranks) of each axis; None if that cannot be read."""
    if getattr(parameter, "tensor_model_parallel", False):  # Megatron's mark
        return None
    if not is_dtensor(parameter):
        return [(size, 0, size) for size in parameter.shape]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements: Any = parameter.placements  # type: ignore[attr-defined]
    if any(type(one).__name__ not in ("Shard", "Replicate") for one in placements):
        return None  # several maps in one, split each
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    local, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return list(zip(local, start, parameter.shape, strict=True))
