"""Linear maps in place of those of a module whose code does not repeat KV heads, so that heads can share them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from headwise.models.traced.known import Slices, Traced


class SharedMaps(nn.Module):
    """Linear maps of queries, keys or values whose outputs are joined; KV heads are repeated for the heads that share
    them, so that the output has the channels of as many heads of each.

    Attributes:
        repeats: query heads of a KV head. widths: letter → channels of a head, of "k" and "v".
    """

    def __init__(self, maps: Mapping[str, nn.Linear], widths: Mapping[str, int]) -> None:
        super().__init__()
        for letter, linear in maps.items():
            self.add_module(letter, linear)
        self.letters, self.widths, self.repeats = tuple(maps), dict(widths), 1

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        return torch.cat([self._heads(letter, self.get_submodule(letter)(x)) for letter in self.letters], -1)

    def _heads(self, letter: str, y: Tensor) -> Tensor:
        if letter == "q" or self.repeats == 1:
            return y
        return y.unflatten(-1, (-1, self.widths[letter])).repeat_interleave(self.repeats, -2).flatten(-2)


def can_share(known: Traced, module: nn.Module) -> bool:
    """Whether the maps of keys and values in a module can be replaced: `nn.Linear`s, with the heads one after another,
    in which no other module is involved."""
    inside = set(module.modules())
    return known.num_heads == known.num_kv_heads and all(
        type(one.owner) is nn.Linear and one.owner in inside and (one.axis, one.step) == (0, one.width)
        for one in known.slices if one.letter != "o"
    )  # fmt: skip


def with_shared_maps(known: Traced, module: nn.Module) -> Traced:
    """Replace the linear maps of a module that make keys or values, with the same results.

    Returns:
        What is known of the module then.
    """
    owners: dict[nn.Module, list[Slices]] = {}
    for one in known.slices:
        if one.letter != "o":
            owners.setdefault(one.owner, []).append(one)
    slices = [one for one in known.slices if one.letter == "o"]
    sizes = list(known.sizes)
    for owner, those in owners.items():
        assert isinstance(owner, nn.Linear)
        if {one.letter for one in those} == {"q"}:
            slices += those
            continue
        maps = _divided(owner, those, known.num_heads)
        shared = SharedMaps(maps, {one.letter: one.width for one in those})
        shared.train(owner.training)
        shared._forward_hooks, shared._forward_pre_hooks = owner._forward_hooks, owner._forward_pre_hooks
        for parent in list(module.modules()):
            for name, child in list(parent._modules.items()):
                if child is owner:
                    parent._modules[name] = shared
        for one in those:
            heads = "query" if one.letter == "q" else "key"
            size = maps[one.letter].out_features
            slices.append(replace(one, owner=maps[one.letter], start=0, heads=heads, size=size))
        sizes.append((shared, "repeats", "heads of a KV head"))
    return replace(known, slices=tuple(slices), sizes=tuple(sizes), shares=False)


def _divided(owner: nn.Linear, slices: Sequence[Slices], heads: int) -> dict[str, nn.Linear]:
    """One linear map for each letter, in their order."""
    found: dict[str, nn.Linear] = {}
    for one in sorted((one for one in slices if one.name == "weight"), key=lambda one: one.start):
        rows = slice(one.start, one.start + heads * one.width)
        linear = nn.Linear(owner.in_features, rows.stop - rows.start, owner.bias is not None, device="meta")
        for name, x in owner._parameters.items():
            if x is not None:
                linear._parameters[name] = nn.Parameter(x.detach()[rows].clone(), requires_grad=x.requires_grad)
        found[one.letter] = linear
    return found
