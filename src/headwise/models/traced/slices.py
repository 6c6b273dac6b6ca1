"""Which outputs of a linear map a head's queries, keys or values depend on, read from derivatives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.models.recognise.tracked import Lost
from headwise.models.traced.known import Slices

Names = Mapping[int, Sequence[tuple[nn.Module, str]]]  # id of a parameter → modules that hold it, and its name there
DIGITS = 128  # labels are below it, exact in every floating dtype


@dataclass(frozen=True, eq=False)
class Source:
    """A linear map that was called.

    Attributes:
        leaf: its output, a leaf of the graph of what follows. made_by: the function.
        weight, bias: its tensors; None without a bias. axis: of the weight, that of the outputs.
    """

    leaf: Tensor
    made_by: str
    weight: Tensor
    bias: Tensor | None
    axis: int


@dataclass(frozen=True)
class Span:
    """Head i has `width` of the features, from `start + i · step` on."""

    count: int
    start: int
    step: int
    width: int


def sources_of(x: Tensor, sources: Sequence[Source]) -> list[Source]:
    """The maps whose outputs x depends on, without another one between."""
    if not x.requires_grad or not sources:
        return []
    leaves = [source.leaf for source in sources]
    grads = torch.autograd.grad(x, leaves, torch.ones_like(x), retain_graph=True, allow_unused=True)
    found = [(source, grad) for source, grad in zip(sources, grads, strict=True) if grad is not None]
    if len(found) > 1:  # outputs that were joined, of which x is a part
        found = [(source, grad) for source, grad in found if bool((grad != 0).any())]
    return [source for source, _ in found]


def heads_in(x: Tensor, source: Source, what: str) -> Span:
    """The features of the source's output on which each head of x [b, h, n, d] depends.

    Raises:
        Lost: if they are no slices of one size and distance.
    """
    supports = []
    for head in range(x.shape[1]):
        weights = torch.zeros_like(x)
        weights[:, head] = torch.rand_like(weights[:, head]) + 0.5
        (grad,) = torch.autograd.grad(x, source.leaf, weights, retain_graph=True)
        supports.append((grad.flatten(0, -2) != 0).any(0))  # NaN too
    groups: list[Tensor] = []
    for support in supports:
        if not groups or not torch.equal(groups[-1], support):
            groups.append(support)
    if len(supports) % len(groups) or any(
        not torch.equal(support, groups[i * len(groups) // len(supports)]) for i, support in enumerate(supports)
    ):
        raise Lost(f"its heads share {what} in another order than one KV head for each group of consecutive heads")
    places = [support.nonzero().flatten().tolist() for support in groups]
    width = len(places[0])
    if len(groups) == 1 and len(supports) > 1 and width == source.leaf.shape[-1] > x.shape[3]:
        raise Lost(f"each head reads all {width} outputs of the map of its {what}, as with a norm over all heads")
    if any(not one or one != list(range(one[0], one[0] + width)) for one in places):
        raise Lost(f"the {what} of a head do not lie side by side in the output of their map")
    step = places[1][0] - places[0][0] if len(places) > 1 else width
    if any(one[0] != places[0][0] + i * step for i, one in enumerate(places)) or step < width:
        raise Lost(f"the {what} of its heads do not follow each other at one distance in the output of their map")
    if width != x.shape[3]:
        raise Lost(f"a head of {x.shape[3]} channels depends on {width} outputs of the map of its {what}")
    return Span(len(groups), places[0][0], step, width)


def is_plain(x: Tensor, source: Source, span: Span) -> bool:
    """Whether x [b, h, n, d] is the source's output, times a number at most."""
    labels = (torch.arange(x.shape[3], device=x.device) % DIGITS + 1).to(x.dtype)
    (grad,) = torch.autograd.grad(x, source.leaf, labels.expand_as(x), retain_graph=True)
    rows = grad.flatten(0, -2)
    heads = torch.stack([rows[:, span.start + i * span.step :][:, : span.width] for i in range(span.count)], 1) / labels
    return bool(((heads - heads[:1, :1, :1]).abs() <= 1e-3 * heads.abs()).all())


def slices_of(letter: str, source: Source, span: Span, heads: str, names: Names) -> list[Slices]:
    """The slices of the source's weight and bias.

    Raises:
        Lost: if they are no parameters of one module each.
    """
    found = []
    for tensor, axis in ((source.weight, source.axis), (source.bias, 0)):
        if tensor is None:
            continue
        owner, name = owner_of(tensor, letter, names)
        if (axis == 0 and tensor.shape[0] != source.leaf.shape[-1]) or tensor.ndim > 2:
            raise Lost(f"{name} has shape {tuple(tensor.shape)}, and no row for each output")
        found.append(Slices(letter, owner, name, axis, heads, span.start, span.step, span.width, tensor.shape[axis]))
    return found


def owner_of(tensor: Tensor, letter: str, names: Names) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and its name there."""
    held = names.get(id(tensor), ())
    if not held:
        raise Lost(f"the map of {letter} is computed from other tensors, not a parameter")
    if len(held) > 1:
        raise Lost(f"the parameter {held[0][1]!r} of the map of {letter} belongs to several modules")
    return held[0]
