"""Attention with a cache that holds other tokens for some KV heads. Each part of it attends alone, so that a step reads
what is held and no more. A map is of all heads together, and is made of the keys that `append` returns instead."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.cache import Cache
from headwise.cache.rows import of_heads
from headwise.fields import Section
from headwise.kernels.quantized import QuantizedKV, Vectors
from headwise.masks import Grid, Mask
from headwise.scores import Score, check_scores


class Run(NamedTuple):
    """KV heads that attend in one call.

    Attributes:
        heads: which of all KV heads. within: which of those of their part of the cache; None for all.
        options: of `attend`, for their query heads and the keys that the part holds.
    """

    heads: list[int]
    within: slice | None
    options: dict[str, Any]


def runs_of(
    heads: list[int], group: int, mask: Mask | None, scores: tuple[Score, ...], grid: Grid, device: torch.device
) -> list[Run]:
    """The runs of one part of a cache: one, or if the mask or a score differs between heads, one for each range of
    consecutive heads.

    Args:
        heads: the KV heads of the part, increasing. group: the number of query heads for each.
        mask, scores: over `grid`, that of all query heads and the keys of the part.
    """
    if mask is not None:
        mask.check(grid)
    check_scores(scores, grid, device)
    one = {"h": Section(0, group, grid.h)}
    if all(each.cut(one) is each for each in (*scores, *([] if mask is None else [mask]))):
        return [Run(heads, None, _options(mask, scores))]
    ends = [at for at in range(1, len(heads) + 1) if at == len(heads) or heads[at] != heads[at - 1] + 1]
    runs = []
    for start, stop in zip([0, *ends], ends, strict=False):
        cuts = {"h": Section(heads[start] * group, (heads[stop - 1] + 1) * group, grid.h)}
        options = _options(None if mask is None else mask.cut(cuts), tuple(score.cut(cuts) for score in scores))
        runs.append(Run(heads[start:stop], slice(start, stop), options))
    return runs


def _options(mask: Mask | None, scores: tuple[Score, ...]) -> dict[str, Any]:
    return {"mask": mask, "score": scores} if scores else {"mask": mask}


def attend_in_parts(
    attention: Callable[..., tuple[Tensor, Any]], cache: Cache, q: Tensor, k: Tensor, v: Tensor,
    parts: Sequence[Sequence[Run]], **options: Any,
) -> Tensor:  # fmt: skip
    """Append k and v to the cache, and return the output of every query head [b, h, n, d_v].

    Args:
        attention: called as `attend`, returns an output and a map. parts: the runs of each of `cache.parts`.
    """
    group = q.shape[1] // k.shape[1]
    outs: list[Tensor] = []
    order: list[int] = []
    for (keys, values), runs in zip(cache.take_parts(k, v), parts, strict=True):  # type: ignore[attr-defined]
        for run in runs:
            queries = [i for head in run.heads for i in range(head * group, (head + 1) * group)]
            some_k, some_v = _of(keys, run.within), _of(values, run.within)
            some_q = of_heads(q, queries).to(some_v.dtype)
            outs.append(attention(some_q, some_k.to(some_v.dtype), some_v, **{**options, **run.options})[0])
            order += queries
    out = torch.cat(outs, 1)
    if order == sorted(order):
        return out
    return out[:, sorted(range(len(order)), key=order.__getitem__)]


def _of(x: Vectors, within: slice | None) -> Vectors:
    if within is None:
        return x
    if isinstance(x, QuantizedKV):
        return replace(x, steps=x.steps[:, within], scales=x.scales[:, within])
    return x[:, within]
