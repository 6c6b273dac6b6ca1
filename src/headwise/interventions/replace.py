"""Weights replaced by those of another run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError
from headwise.interventions.edit import Arguments, Edit
from headwise.interventions.heads import of_heads
from headwise.interventions.tokens import Tokens
from headwise.map import AttentionMap
from headwise.masks import Grid, real_tokens


class Replace(Edit):
    """The weights are those of another run, and the values those of this one (activation patching of a pattern).

    The weights are computed from the queries and keys of the map: O(n) memory. Gradients flow to the values.

    Args:
        maps: the map of the other run, or name of the module → map, as `record.maps` has them. Its size must be that
            of the call, [b, h, n, m], and so are the columns of its padding.
        heads: numbers of the query heads; None for all. queries: a set of tokens; None for all.
    """

    own_keys = False

    def __init__(
        self, maps: AttentionMap | Mapping[str, AttentionMap], *, heads: Sequence[int] | int | None = None,
        queries: Tokens = None,
    ) -> None:  # fmt: skip
        super().__init__(heads, queries)
        given = maps.values() if isinstance(maps, Mapping) else [maps]
        if not given or not all(isinstance(amap, AttentionMap) for amap in given):
            raise ConfigError(
                f"Replace(maps): expected an AttentionMap, or a mapping from names of modules to them, got "
                f"{type(maps).__name__}"
            )
        self.maps = maps

    def changed(self, call: Arguments) -> Arguments:
        amap = self._map(call)
        b, _, n, m = call.grid
        if amap.shape != (b, call.num_heads, n, m):
            raise ShapeError(
                f"Replace(maps): the map of {call.name or 'the module'} is {amap.shape}, but its call is "
                f"{(b, call.num_heads, n, m)}"
            )
        if bool((_real(amap.rule.grid, real_tokens(amap.mask, amap.rule.grid)) != _real(call.grid, call.real)).any()):
            raise ShapeError(
                f"Replace(maps): the padding of {call.name or 'the module'} is in other columns than that of its map, "
                f"whose weights would be of other tokens; give it a batch that is padded alike"
            )
        q, k, rule = of_heads(amap.q, amap.k, amap.rule, call.heads)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # those of the call may be grouped in another way
        v = call.v.repeat_interleave(q.shape[1] // call.v.shape[1], 1)
        return replace(call, q=q.to(v), k=k.to(v), v=v, mask=rule.mask, scale=rule.scale, scores=rule.scores)

    def _map(self, call: Arguments) -> AttentionMap:
        if isinstance(self.maps, AttentionMap):
            return self.maps
        if call.name not in self.maps:
            raise ConfigError(f"Replace(maps): no map of {call.name!r}; expected one for each module that is edited")
        return self.maps[call.name]


def _real(grid: Grid, real: Tensor | None) -> Tensor:
    """Which keys are no padding, boolean [b or 1, m], from the tokens that are not."""
    return torch.ones(1, grid.m, dtype=torch.bool, device="cpu") if real is None else grid.of_keys(real, fill=True)
