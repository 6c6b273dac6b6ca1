"""Attention over several processes with torch.distributed.

    import torch.distributed as dist
    from headwise import parallel

    dist.init_process_group("nccl")                                    # or gloo, on CPUs
    q, k, v = (parallel.shard(x, "zigzag") for x in (q, k, v))         # this rank's part of the sequence
    out, amap = parallel.ring_attend(q, k, v, mask=hw.Causal(), return_map=True, measures=["entropy"])

All functions are collectives: all ranks of the group must call them with the same options, and all must run the
backward pass. The loss is the sum of the ranks' losses. For replicated tensors (weights, slopes, learned sinks), each
rank computes its share of the gradient.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Imported on first use: torch.distributed.tensor takes as long to import as PyTorch itself.
_HOMES = {
    "heads": ["clip_gradients", "head_parallel_plan", "parallelize_heads", "whole_state"],
    "heads_held": ["HeldHeads", "gather_map", "held_heads"],
    "layout": ["Layout", "shard", "unshard"],
    "maps": ["RingMap", "UlyssesMap"],
    "ring": ["ring_attend"],
    "sequence": ["SequenceParallel", "sequence_parallel", "sum_gradients"],
    "ulysses": ["ulysses_attend"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)

if TYPE_CHECKING:
    from headwise.parallel.heads import (
        clip_gradients as clip_gradients,
        head_parallel_plan as head_parallel_plan,
        parallelize_heads as parallelize_heads,
        whole_state as whole_state,
    )
    from headwise.parallel.heads_held import HeldHeads as HeldHeads, gather_map as gather_map, held_heads as held_heads
    from headwise.parallel.layout import Layout as Layout, shard as shard, unshard as unshard
    from headwise.parallel.maps import RingMap as RingMap, UlyssesMap as UlyssesMap
    from headwise.parallel.ring import ring_attend as ring_attend
    from headwise.parallel.sequence import (
        SequenceParallel as SequenceParallel,
        sequence_parallel as sequence_parallel,
        sum_gradients as sum_gradients,
    )
    from headwise.parallel.ulysses import ulysses_attend as ulysses_attend


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'headwise.parallel' has no attribute {name!r}")
    value = getattr(import_module(f"headwise.parallel.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
