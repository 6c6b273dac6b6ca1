"""Heads of attention that is written by hand, found while it runs.

`find_heads(model, batch)` runs the model once. Which numbers of which layer belong to head i follows from derivatives:
queries, keys and values of head i depend on these outputs of a linear map and on no others, and the numbers that the
output projection receives are exactly those of the heads, in their order. Which attributes hold the number of heads
is found by removing a head and comparing the module with the one in which that head is masked.

Here is the kind: what is known of a module, its slices of parameters, and maps that repeat KV heads.

tracing  the forward pass in which it is found, and the projection that receives the heads
sizes    attributes that hold numbers of heads
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headwise.errors import ConfigError
from headwise.models.recognise.tracked import Lost
from headwise.models.site import Change, HeadSite, Kind
from headwise.nn.layout import Layout, Part, Resizing

WIDTH = "_headwise_width"  # attribute of a module: the width that its code shall read
_INPUTS = "_headwise_inputs"  # and the one that its inputs have
_WHOLE = "_headwise_whole"  # attribute of an input that was narrowed


def narrow(module: nn.Module, maps: Collection[nn.Module], inputs: int) -> None:
    """Give the code of a module the first `WIDTH` channels of tensors that have `inputs` channels, and these maps all
    of them. Calling it again changes nothing."""
    vars(module)[_INPUTS] = inputs
    if _narrowed not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_narrowed, with_kwargs=True)
    for one in maps:
        if _whole not in one._forward_pre_hooks.values():
            one.register_forward_pre_hook(_whole)


def whole(x: Any) -> Any:
    """The tensor of which a tensor is the first channels, if the code of a module got it in its place."""
    return getattr(x, _WHOLE, x)


def _narrowed(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    inputs, width = vars(module)[_INPUTS], vars(module)[WIDTH]

    def first(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim or x.shape[-1] != inputs or width >= inputs:
            return x
        part = x.narrow(-1, 0, width)
        setattr(part, _WHOLE, x)
        return part

    changed: tuple[Any, Any] = tree_map(first, (args, kwargs))
    return changed


def _whole(module: nn.Module, args: Any) -> Any:
    return tuple(map(whole, args))


OF_HEAD = "h"  # letter of slices of parameters and buffers with numbers of each head, such as slopes and temperatures
TRACED = "_headwise_heads"  # attribute of a module that was traced; a copy of the module has it too


@dataclass(frozen=True)
class Slices:
    """The slices of one parameter by head: head i has `width` entries of the axis, from `start + i · step` on."""

    letter: str  # "q", "k", "v", "o" or `OF_HEAD`
    owner: nn.Module  # owner, name: the module that holds the parameter, and its attribute name
    name: str
    axis: int
    heads: str  # "query" or "key"
    start: int
    step: int
    width: int
    size: int  # of the axis


@dataclass(frozen=True)
class Traced:
    """The heads of one module."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    slices: tuple[Slices, ...] = ()  # of its parameters; () if `missing` says why there are none
    missing: str = ""
    # The module that is called with Concat(head_1 … head_h), or None, and `unheard` says why
    output: nn.Module | None = None
    unheard: str = ""
    batch_first: bool = True  # whether that input is [b, n, h·d_v], not [n, b, h·d_v]
    plain: bool = False  # whether queries and keys are the outputs of their layers, without positions or norms
    # (module, attribute, role) for each attribute that depends on numbers of heads; see `ROLES`
    sizes: tuple[tuple[nn.Module, str, str], ...] = ()
    fixed: str = ""  # why the number of heads cannot change
    merges: bool = False  # whether KV heads can be merged
    shares: bool = False  # whether the maps must be replaced by `SharedMaps` for that

    def count(self, heads: str) -> int:
        """Number of query or KV heads."""
        return self.num_heads if heads == "query" else self.num_kv_heads

    def parts(self) -> tuple[Part, ...]:
        """The parts of parameters by head; queries, keys and values of a head that lie side by side are one part."""
        found: list[Part] = []
        mixed: dict[tuple[int, str, int], list[Slices]] = {}
        for one in self.slices:
            if one.step == one.width:
                found.append(Part(one.letter, one.owner, one.name, one.axis, one.heads, one.width, one.start))
            else:
                mixed.setdefault((id(one.owner), one.name, one.axis), []).append(one)
        for several in mixed.values():
            first = min(several, key=lambda one: one.start)
            letters = "".join(one.letter for one in sorted(several, key=lambda one: one.start))
            found.append(Part(letters, first.owner, first.name, first.axis, first.heads, first.step, first.start))
        return tuple(found)

    def inputs(self) -> list[nn.Module]:
        """The modules that hold the maps of queries, keys and values."""
        return list(dict.fromkeys(one.owner for one in self.slices if one.letter in "qkv"))

    def width_of_inputs(self) -> int:
        """The size of what these maps take."""
        one = next(one for one in self.slices if one.letter == "q" and getattr(one.owner, one.name).ndim == 2)
        return int(getattr(one.owner, one.name).shape[1 - one.axis])

    def resized(self, num_heads: int, num_kv_heads: int) -> "Traced":
        """The same for parameters with these numbers of heads, which hold nothing else."""
        new = replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads)
        starts: dict[tuple[int, str, int], int] = {}
        slices = []
        for one in sorted(self.slices, key=lambda one: one.start):
            key = (id(one.owner), one.name, one.axis)
            whole = one.step == one.width
            start = starts.get(key, 0) if whole else one.start
            extent = new.count(one.heads) * one.step
            starts[key] = start + extent if whole else 0
            slices.append(replace(one, start=start, size=one.size - (self.count(one.heads) * one.step - extent)))
        return replace(new, slices=tuple(slices))


ROLES: dict[str, Callable[[Traced], int]] = {
    "heads": lambda x: x.num_heads,
    "KV heads": lambda x: x.num_kv_heads,
    "heads of a KV head": lambda x: x.num_heads // x.num_kv_heads,
    "width of queries": lambda x: x.num_heads * x.head_dim,
    "width of keys": lambda x: x.num_kv_heads * x.head_dim,
    "width of values": lambda x: x.num_kv_heads * x.value_dim,
    "width of the output": lambda x: x.num_heads * x.value_dim,
    "width of all": lambda x: (x.num_heads + x.num_kv_heads) * x.head_dim + x.num_kv_heads * x.value_dim,
}


Names = Mapping[int, Sequence[tuple[nn.Module, str]]]  # id of a parameter → modules that hold it, and its name there
DIGITS = 128  # labels are below it, exact in every floating dtype


@dataclass(frozen=True, eq=False)
class Source:
    """A linear map that was called."""

    leaf: Tensor  # its output, a leaf of the graph of what follows
    made_by: str  # the function
    weight: Tensor  # weight, bias: its tensors; None without a bias
    bias: Tensor | None
    axis: int  # of the weight, that of the outputs


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
    """The features of the source's output on which each head of x [b, h, n, d] depends; Lost if they are no slices of
    one size and distance."""
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
    """The slices of the source's weight and bias; Lost if they are no parameters of one module each."""
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


class SharedMaps(nn.Module):
    """Linear maps of queries, keys or values whose outputs are joined; KV heads are repeated for the heads that share
    them. widths: letter → channels of a head, of "k" and "v"."""

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


def with_shared_maps(known: Traced, module: nn.Module) -> Traced:
    """Replace the linear maps of a module that make keys or values, with equal results; what is known then."""
    owners: dict[nn.Module, list[Slices]] = {}
    for one in known.slices:
        if one.letter in "qkv":
            owners.setdefault(one.owner, []).append(one)
    slices = [one for one in known.slices if one.letter not in "qkv"]
    sizes = list(known.sizes)
    for owner, those in owners.items():
        assert isinstance(owner, nn.Linear)
        if {one.letter for one in those} == {"q"}:
            slices += those
            continue
        maps: dict[str, nn.Linear] = {}  # one for each letter, in their order
        for one in sorted((one for one in those if one.name == "weight"), key=lambda one: one.start):
            rows = slice(one.start, one.start + known.num_heads * one.width)
            linear = nn.Linear(owner.in_features, rows.stop - rows.start, owner.bias is not None, device="meta")
            for name, x in owner._parameters.items():
                if x is not None:
                    linear._parameters[name] = nn.Parameter(x.detach()[rows].clone(), requires_grad=x.requires_grad)
            maps[one.letter] = linear
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


class TracedKind(Kind):
    """Modules whose attention was recognised and traced by `find_heads(model, batch)`."""

    name = "traced"
    about = "attention written by hand, if find_heads is given a batch: find_heads(model, batch)"
    by_class = True  # `sizes` compares a module without a head with one whose head is masked
    merged = "modules found by find_heads(model, batch) whose maps are `nn.Linear`s"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        found = vars(module).get(TRACED)
        if not isinstance(found, Traced):
            return None
        return HeadSite(
            name, module, self.name, found.num_heads, found.num_kv_heads, found.head_dim, found.value_dim, found.output,
            self,
        )  # fmt: skip

    def layout(self, site: HeadSite) -> Layout:
        found = _of(site)
        return Layout(found.parts(), found.output, rotary=False, missing=found.missing)

    def resizing(self, site: HeadSite) -> Resizing:
        found = _of(site)
        unknown = "" if found.plain else (
            f"{type(site.module).__name__} changes its queries and keys before they are multiplied, by positions or "
            f"norms"
        )  # fmt: skip
        return Resizing(found.missing or found.fixed, found.merges, unknown)

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        found = _of(site).resized(num_heads, num_kv_heads)
        for module, attribute, role in found.sizes:
            setattr(module, attribute, ROLES[role](found))
            if attribute == WIDTH:
                narrow(module, found.inputs(), found.width_of_inputs())
        vars(site.module)[TRACED] = found

    def share(self, site: HeadSite) -> None:
        found = _of(site)
        if found.shares:
            vars(site.module)[TRACED] = with_shared_maps(found, site.module)

    def weights(self, site: HeadSite) -> dict[str, Tensor]:
        found = _of(site)
        super().weights(site)  # raises for what has no plain matrices
        matrices: dict[str, Tensor] = {}
        for one in found.slices:
            x = getattr(one.owner, one.name).detach()
            if x.ndim == 2 and one.letter != OF_HEAD:
                heads = [x.narrow(one.axis, one.start + i * one.step, one.width) for i in range(found.count(one.heads))]
                transposed = (one.axis == 0) == (one.letter != "o")
                first = heads[0].mT if transposed else heads[0]
                # A view: all heads follow each other at one distance.
                step = heads[1].storage_offset() - first.storage_offset() if len(heads) > 1 else 0
                sizes, strides = (len(heads), *first.shape), (step, *first.stride())
                matrices[one.letter] = first.as_strided(sizes, strides, first.storage_offset())
        return matrices

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        found = _of(site)
        if found.output is None:
            raise ConfigError(f"{site.name or type(site.module).__name__}: {found.unheard}")

        def turned(concat: Tensor) -> Tensor:
            if found.batch_first or concat.ndim != 3:
                return change(concat)
            return change(concat.transpose(0, 1)).transpose(0, 1)

        with super().tapped(site, turned):
            yield


def _of(site: HeadSite) -> Traced:
    found: Traced = vars(site.module)[TRACED]
    return found
