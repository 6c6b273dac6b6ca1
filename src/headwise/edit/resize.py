"""Parameters of an attention module put in the place of others, and the module's sizes set with them."""

import torch
from torch import Tensor, nn

from headwise.models import HeadSite, Part

Order = list[int]  # heads that stay, in their new order


def pick_heads(site: HeadSite, query: Order, key: Order) -> None:
    """Keep these query heads and these key and value heads, in this order; everything in place."""
    orders = {"query": query, "key": key}
    for owner, name, parts in _of_parameters(site):
        x = getattr(owner, name)
        if isinstance(x, nn.ParameterList):
            setattr(owner, name, nn.ParameterList(x[i] for i in orders[parts[0].heads]))
            continue
        for axis in sorted({part.axis for part in parts}):
            along = sorted((part for part in parts if part.axis == axis), key=lambda part: part.start)
            index = torch.cat([_entries(part, orders[part.heads]) for part in along])
            x = x.detach().index_select(axis, index.to(x.device))
        put(owner, name, x)
    site.anatomy.resize(site, len(query), len(key))


def make_room(site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
    """Parameters for so many heads, with nothing in them yet; what a file holds is then loaded into them."""
    counts = {"query": num_heads, "key": num_kv_heads}
    for owner, name, parts in _of_parameters(site):
        x = getattr(owner, name)
        if isinstance(x, nn.ParameterList):
            raise TypeError(f"{type(site.module).__name__} keeps lists of parameters")
        shape = list(x.shape)
        for axis in {part.axis for part in parts}:
            shape[axis] = sum(counts[part.heads] * part.width for part in parts if part.axis == axis)
        put(owner, name, x.detach().new_empty(shape))
    site.anatomy.resize(site, num_heads, num_kv_heads)


def put(owner: nn.Module, name: str, x: Tensor) -> None:
    """A new parameter in the place of another, trainable as that was."""
    held = getattr(owner, name)
    setattr(owner, name, nn.Parameter(x.detach().contiguous(), requires_grad=held.requires_grad))
    if name != "weight":
        return
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = x.shape
    elif hasattr(owner, "nf"):  # Conv1D of transformers
        vars(owner).update(nx=x.shape[0], nf=x.shape[1])


def _of_parameters(site: HeadSite) -> list[tuple[nn.Module, str, list[Part]]]:
    """The parts of each parameter together."""
    found: dict[tuple[int, str], tuple[nn.Module, str, list[Part]]] = {}
    for part in site.parts():
        found.setdefault((id(part.owner), part.name), (part.owner, part.name, []))[2].append(part)
    return list(found.values())


def _entries(part: Part, heads: Order) -> Tensor:
    """Where these heads lie on the axis."""
    first = torch.tensor(heads, dtype=torch.long) * part.width + part.start
    return (first[:, None] + torch.arange(part.width)).flatten()
