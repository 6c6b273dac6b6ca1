"""What is known of the heads of a module that was traced."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from headwise.nn.layout import Part

TRACED = "_headwise_heads"  # attribute of a module that was traced; a copy of the module has it too


@dataclass(frozen=True)
class Slices:
    """The slices of one parameter by head: head i has `width` entries of the axis, from `start + i · step` on.

    Attributes:
        letter: "q", "k", "v" or "o". owner, name: the module that holds the parameter, and its attribute name.
        heads: "query" or "key". size: of the axis.
    """

    letter: str
    owner: nn.Module
    name: str
    axis: int
    heads: str
    start: int
    step: int
    width: int
    size: int


@dataclass(frozen=True)
class Traced:
    """The heads of one module.

    Attributes:
        slices: of its parameters; () if `missing` says why there are none.
        output: the module that is called with Concat(head_1 … head_h), or None, and `unheard` says why.
        batch_first: whether that input is [b, n, h·d_v], not [n, b, h·d_v].
        plain: whether queries and keys are the outputs of their layers, without positions or norms.
        sizes: (module, attribute, role) for each attribute that depends on numbers of heads; see `ROLES`.
        fixed: why the number of heads cannot change. merges: whether KV heads can be merged. shares: whether the maps
            must be replaced by `SharedMaps` for that.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    slices: tuple[Slices, ...] = ()
    missing: str = ""
    output: nn.Module | None = None
    unheard: str = ""
    batch_first: bool = True
    plain: bool = False
    sizes: tuple[tuple[nn.Module, str, str], ...] = ()
    fixed: str = ""
    merges: bool = False
    shares: bool = False

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
        return list(dict.fromkeys(one.owner for one in self.slices if one.letter != "o"))

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


def value_of(role: str, x: Traced) -> int:
    """The value of an attribute with this role."""
    return ROLES[role](x)


def traced(module: nn.Module) -> Traced | None:
    """What is known of the heads of a module."""
    found = vars(module).get(TRACED)
    return found if isinstance(found, Traced) else None
