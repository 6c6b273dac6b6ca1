"""Attention among the tokens that selected a head, for sparse mixtures with `keys="chosen"`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.cache.kinds import ChosenCache
from headwise.kernels.compiling import eager
from headwise.kernels.graph import listed
from headwise.map.attention import attend_to
from headwise.masks import Everything, Grid
from headwise.nn.base import ProjectedLayer, normed
from headwise.nn.sparse_attention import Extras, Pairs, Picks, Result, SparseCall, buckets, heads_of
from headwise.nn.steps import rotated

FEW = 64  # tokens of a head, on average, below which copying its weights would cost more than it saves


@dataclass(frozen=True)
class Selected:
    """The (head, token) pairs of a selection, sorted by head, entry and position, each [pairs]; ranks: how many earlier
    tokens of the entry selected the head; counts [b, h] of tokens that did; n tokens an entry."""

    heads: Tensor
    entries: Tensor
    positions: Tensor
    ranks: Tensor
    counts: Tensor
    n: int

    @classmethod
    def of(cls, chosen: Tensor) -> "Selected":
        """The pairs of boolean [b, n, h]."""
        heads, entries, positions = chosen.permute(2, 0, 1).nonzero().unbind(1)
        counts = chosen.sum(1)
        ends = counts.T.flatten().cumsum(0)
        group = heads * len(chosen) + entries
        ranks = torch.arange(len(heads), device=chosen.device) - (ends - counts.T.flatten())[group]
        return cls(heads, entries, positions, ranks, counts, chosen.shape[1])

    @property
    def rows(self) -> Tensor:
        """The index of each pair's token among b · n tokens."""
        return self.entries * self.n + self.positions


@eager  # the selected pairs are known only at run time
def by_choice(call: SparseCall) -> Result:
    """Compute queries, keys and values of each head for the tokens that selected it, and attend among these."""
    layer, x = call.layer, call.x
    b, n, h = x.shape[0], x.shape[1], layer.num_heads
    at = Selected.of(call.gates.chosen)
    sizes, loads = listed(at.counts.sum(0)), listed(at.counts.amax(0))
    tokens = at.rows.split(sizes)
    flat = x.reshape(b * n, -1)
    q, k, v = _projected(layer, [flat.index_select(0, rows) for rows in tokens])
    start = 0 if call.cache is None else call.cache.seen
    q, k = normed(q, layer.q_norm), normed(k, layer.k_norm)
    if layer.rotary is not None:
        angles = [part[at.positions] for part in layer.rotary.table(q, n, start)]
        q, k = rotated(q, *angles), rotated(k, *angles)
    q, k = q.to(v.dtype), k.to(v.dtype)
    cache = call.cache
    assert cache is None or isinstance(cache, ChosenCache)  # checked by the layer
    if cache is not None:
        cache.store(k, v, call.gates.chosen, at.heads, at.entries, at.positions, at.ranks)
    m = start + n
    grid = Grid(b, h, n, m)
    mask = call.options["mask"] or Everything()
    mask.check(grid)
    extras = Extras(call, grid, v, keys=call.gates.chosen if cache is None else cache.chosen)
    outs: list[Tensor | None] = [None] * h
    gates = call.gates.weights[at.entries, at.positions, at.heads]
    for members in buckets(loads, n):
        place = torch.full((h,), -1, device=x.device)
        place[members] = torch.arange(len(members), device=x.device)
        mine = place[at.heads] >= 0 if len(members) < h else slice(None)
        entries, ranks, positions = at.entries[mine], at.ranks[mine], at.positions[mine]
        cells, wide = b * len(members), max(loads[i] for i in members)
        target = (entries * len(members) + place[at.heads[mine]]) * wide + ranks

        def padded(part: Tensor, target: Tensor = target, shape: tuple[int, ...] = (cells, wide)) -> Tensor:
            empty = part.new_zeros(shape[0] * shape[1], part.shape[-1])
            return empty.index_copy(0, target, part).view(*shape, -1)

        places = torch.full((cells * wide,), -1, device=x.device).index_copy(0, target, positions).view(cells, wide)
        if cache is None:
            keys = places.masked_fill(places < 0, m)
            key, value = padded(k[mine]), padded(v[mine])
        else:
            key, value, keys = cache.read(members)
        picked = Pairs(mask, grid, torch.tensor(members, device=x.device), places, keys)
        options = {**call.options, "mask": picked}
        out, part = attend_to(padded(q[mine])[:, None], key[:, None], value[:, None], **options)
        found = out.flatten(0, 2).index_select(0, target) * gates[mine, None].to(out.dtype)
        for i, head in zip(members, found.split([sizes[i] for i in members]), strict=True):
            outs[i] = head
        shape = (b, len(members), wide)
        picks = Picks(picked.heads.expand(b, -1), places.clamp_min(0).view(shape), (places >= 0).view(shape))
        extras.add(picks, padded(found).view(*shape, -1), part)
        if call.options["return_map"]:
            index = (torch.arange(cells, device=x.device)[:, None].expand_as(keys), torch.arange(keys.shape[1]))
            held = keys < m
            cell = index[0][held]
            extras.add_keys((cell // len(members), picked.heads[cell % len(members)], keys[held]), key[held])
            extras.add_values(
                (slice(None), members), value.masked_fill(~held[..., None], 0.0).view(b, -1, *value.shape[1:])
            )
    y = v.new_zeros(b * n, layer.d_model)
    w_o = layer.o_proj.weight.view(layer.d_model, h, layer.value_dim).unbind(1)
    for rows, head, w in zip(tokens, outs, w_o, strict=True):
        if head is not None:
            y.index_add_(0, rows, F.linear(head, w).to(y.dtype))
    y = y if layer.o_proj.bias is None else y + layer.o_proj.bias.to(y.dtype)
    return y.view(b, n, -1), extras.map(), extras.concat()


def _projected(layer: ProjectedLayer, taken: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [pairs, d] of each head's tokens [tokens of the head, d_model]."""
    h, linears = layer.num_heads, (layer.q_proj, layer.k_proj, layer.v_proj)
    parts = [heads_of(linear, h) for linear in linears]
    if sum(map(len, taken)) < FEW * h:
        used = [i for i, x in enumerate(taken) if len(x)] or [0]
        q, k, v = (torch.cat([F.linear(taken[i], w[i], biases[i]) for i in used]) for w, biases in parts)
        return q, k, v
    # One wide product of each head is faster than three narrow ones, and costs a copy of the weights.
    weights = [torch.cat(of_head) for of_head in zip(*(w for w, _ in parts), strict=True)]
    biases = (
        [None] * h if linears[0].bias is None else [torch.cat(one) for one in zip(*(b for _, b in parts), strict=True)]
    )
    whole = torch.cat([F.linear(x, w, bias) for x, w, bias in zip(taken, weights, biases, strict=True)])
    q, k, v = whole.split([layer.head_dim, layer.head_dim, layer.value_dim], -1)
    return q, k, v
