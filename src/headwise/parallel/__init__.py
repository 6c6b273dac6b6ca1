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

from headwise.parallel.heads import clip_gradients, head_parallel_plan, parallelize_heads, whole_state
from headwise.parallel.heads_gather import gather_map
from headwise.parallel.heads_held import HeldHeads, held_heads
from headwise.parallel.layout import Layout, shard, unshard
from headwise.parallel.ring import ring_attend
from headwise.parallel.ring_map import RingMap
from headwise.parallel.sequence import SequenceParallel, sequence_parallel, sum_gradients
from headwise.parallel.ulysses import ulysses_attend
from headwise.parallel.ulysses_map import UlyssesMap

__all__ = [
    "HeldHeads",
    "Layout",
    "RingMap",
    "SequenceParallel",
    "UlyssesMap",
    "clip_gradients",
    "gather_map",
    "head_parallel_plan",
    "held_heads",
    "parallelize_heads",
    "ring_attend",
    "sequence_parallel",
    "shard",
    "sum_gradients",
    "ulysses_attend",
    "unshard",
    "whole_state",
]
