"""What is known of the heads of a module that was traced, and its kind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.models.site import Change, HeadSite, Kind
from headwise.models.traced.shared import with_shared_maps
from headwise.models.traced.widths import WIDTH, narrow
from headwise.nn.layout import Layout, Part, Resizing

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


class TracedKind(Kind):
    """Modules whose attention was recognised and traced by `find_heads(model, batch)`."""

    name = "traced"
    about = "attention written by hand, if find_heads is given a batch: find_heads(model, batch)"
    by_class = True  # `sizes` compares a module without a head with one whose head is masked
    merged = "modules found by find_heads(model, batch) whose maps are `nn.Linear`s"

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """As in `Kind`."""
        found = traced(module)
        if found is None:
            return None
        return HeadSite(
            name, module, self.name, found.num_heads, found.num_kv_heads, found.head_dim, found.value_dim, found.output,
            self,
        )  # fmt: skip

    def layout(self, site: HeadSite) -> Layout:
        """As in `Kind`."""
        found = _of(site)
        return Layout(found.parts(), found.output, rotary=False, missing=found.missing)

    def resizing(self, site: HeadSite) -> Resizing:
        """As in `Kind`."""
        found = _of(site)
        unknown = "" if found.plain else (
            f"{type(site.module).__name__} changes its queries and keys before they are multiplied, by positions or "
            f"norms"
        )  # fmt: skip
        return Resizing(found.missing or found.fixed, found.merges, unknown)

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """As in `Kind`."""
        found = _of(site).resized(num_heads, num_kv_heads)
        for module, attribute, role in found.sizes:
            setattr(module, attribute, value_of(role, found))
            if attribute == WIDTH:
                narrow(module, found.inputs(), found.width_of_inputs())
        vars(site.module)[TRACED] = found

    def share(self, site: HeadSite) -> None:
        """As in `Kind`."""
        found = _of(site)
        if found.shares:
            vars(site.module)[TRACED] = with_shared_maps(found, site.module)

    def weights(self, site: HeadSite) -> dict[str, Tensor]:
        """As in `Kind`."""
        found = _of(site)
        super().weights(site)  # raises for what has no plain matrices
        matrices: dict[str, Tensor] = {}
        for one in found.slices:
            x = getattr(one.owner, one.name).detach()
            if x.ndim == 2:
                heads = [x.narrow(one.axis, one.start + i * one.step, one.width) for i in range(found.count(one.heads))]
                transposed = (one.axis == 0) == (one.letter != "o")
                matrices[one.letter] = _stacked([head.mT if transposed else head for head in heads])
        return matrices

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        """As in `Kind`."""
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
    found = traced(site.module)
    assert found is not None
    return found


def _stacked(heads: list[Tensor]) -> Tensor:
    """A view where all heads follow each other at one distance, as they do."""
    first = heads[0]
    if len(heads) == 1:
        return first[None]
    step = heads[1].storage_offset() - first.storage_offset()
    return first.as_strided((len(heads), *first.shape), (step, *first.stride()), first.storage_offset())
