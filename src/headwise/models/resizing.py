"""Replaces the parameters of an attention module, and sets its sizes."""

import torch
from torch import Tensor, nn

from headwise.models.site import HeadSite
from headwise.nn.layout import Part

Order = list[int]  # kept heads, in their new order


def pick_heads(site: HeadSite, query: Order, key: Order) -> None:
    """Keep these query and KV heads in this order, in place."""
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
    """Allocate uninitialized parameters for these numbers of heads, to be loaded from a file."""
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
    """Replace a parameter, with the same requires_grad."""
    held = getattr(owner, name)
    setattr(owner, name, nn.Parameter(x.detach().contiguous(), requires_grad=held.requires_grad))
    if name != "weight":
        return
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = x.shape
    elif hasattr(owner, "nf"):  # Conv1D of transformers
        vars(owner).update(nx=x.shape[0], nf=x.shape[1])


def _of_parameters(site: HeadSite) -> list[tuple[nn.Module, str, list[Part]]]:
    """Group the parts of a site by parameter."""
    found: dict[tuple[int, str], tuple[nn.Module, str, list[Part]]] = {}
    for part in site.parts():
        found.setdefault((id(part.owner), part.name), (part.owner, part.name, []))[2].append(part)
    return list(found.values())


def _entries(part: Part, heads: Order) -> Tensor:
    """Return the indices of these heads along the axis."""
    first = torch.tensor(heads, dtype=torch.long) * part.width + part.start
    return (first[:, None] + torch.arange(part.width)).flatten()
