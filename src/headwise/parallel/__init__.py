"""One attention over many processes, on torch.distributed.

    import torch.distributed as dist
    from headwise import parallel

    dist.init_process_group("nccl")                                    # or gloo, on CPUs
    q, k, v = (parallel.shard(x, "zigzag") for x in (q, k, v))         # each rank its part of the sequence
    out, amap = parallel.ring_attend(q, k, v, mask=hw.Causal(), return_map=True, measures=["entropy"])

Everything here is a collective: all ranks of the group call it, with the same options, and all run the backward pass.
The loss is the sum of the ranks' losses; what every rank has a copy of (weights, slopes, learned sinks) gets from each
rank its share of the gradient.
"""

from headwise.parallel.layout import Layout as Layout, shard as shard, unshard as unshard
from headwise.parallel.ring import ring_attend as ring_attend
from headwise.parallel.ring_map import RingMap as RingMap
from headwise.parallel.sequence import (
    SequenceParallel as SequenceParallel,
    sequence_parallel as sequence_parallel,
    sum_gradients as sum_gradients,
)
from headwise.parallel.ulysses import ulysses_attend as ulysses_attend
from headwise.parallel.ulysses_map import UlyssesMap as UlyssesMap
