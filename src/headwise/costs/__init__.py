"""The cost of attention by formulas, without running it: parameters, FLOPs, bytes, memory and the least time.

    counts   costs of a layer per token and per pair         configs  published models, recurrent layers
    work     numbers of queries and keys, and the mask       stages   both combined: FLOPs, bytes, memory, time
    model    a whole published Transformer                   communication  between devices

The costs of a head design are in its own file, as the method `costs` of its class; `headwise.nn.registry` finds it by
name.

>>> from headwise.costs import Work, attention_stages
>>> from headwise.nn.registry import counts_of
>>> counts = counts_of("multi_head", {"d_model": 512, "num_heads": 8})
>>> {stage.name: stage.flops for stage in attention_stages(counts, Work(batch=1, queries=100, keys=100, causal=False))}
{'projections': 157286400, 'scores': 10240000, 'softmax': 0, 'weighted sum': 10240000, 'output': 52428800}
"""

from headwise.costs.configs import CONFIGS, ModelConfig
from headwise.costs.work import (
    Attentions,
    Counts,
    Machine,
    Stage,
    Work,
    allowed_pairs,
    attention_stages,
    backward_flops,
    cache_bytes,
    kept_bytes,
    kept_tokens,
    score_bytes,
)

__all__ = [
    "CONFIGS",
    "Attentions",
    "Counts",
    "Machine",
    "ModelConfig",
    "Stage",
    "Work",
    "allowed_pairs",
    "attention_stages",
    "backward_flops",
    "cache_bytes",
    "kept_bytes",
    "kept_tokens",
    "score_bytes",
]
