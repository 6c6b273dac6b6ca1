"""Some consecutive query heads of an attention call, with their KV heads."""

import torch
from torch import Tensor

from headwise.fields import Section
from headwise.rule import Rule


def kv_heads(x: Tensor, heads: range, num_heads: int) -> Tensor:
    """Return the KV heads of k or v [b, h_kv, m, d] that these query heads read; a view where they are whole groups or
    parts of one."""
    group = num_heads // x.shape[1]
    start, stop = heads.start // group, -(-heads.stop // group)
    if stop - start == 1 or (heads.start % group == 0 and heads.stop % group == 0):
        return x[:, start:stop]
    return x[:, torch.tensor([head // group for head in heads], device=x.device)]


def of_heads(q: Tensor, k: Tensor, rule: Rule, heads: range) -> tuple[Tensor, Tensor, Rule]:
    """Return queries, keys and rule of these query heads."""
    num_heads = q.shape[1]
    if len(heads) == num_heads:
        return q, k, rule
    part = {"h": Section(heads.start, heads.stop, num_heads)}
    return q[:, heads.start : heads.stop], kv_heads(k, heads, num_heads), rule.cut(part)
