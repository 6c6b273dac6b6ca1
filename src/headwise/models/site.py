"""The heads of an attention module: where they are, what of each parameter is theirs, how many there can be; and
scaling and recording them while a model runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, DTypeError, ShapeError, check_declared
from headwise.kernels.spread import is_dtensor
from headwise.models.hooks import Hook, called
from headwise.nn.layout import Layout, Part, Resizing, no_layout
from headwise.nn.owned import check_owned, eagerly
from headwise.table.show import as_html, as_text

Change = Callable[[Tensor], Tensor]  # of Concat(head_1 … head_h) [..., n, h·d_v], to the same shape


@dataclass(frozen=True)
class HeadSite:
    """An attention module of a model, and its heads.

    Attributes:
        name: the attention module's qualified name, such as "blocks.0.attention"; "" for the model itself.
        module: the attention module.
        kind: such as "headwise", "torch", "traced", "bert", "gpt2", "llama", "bart", "vit", "distilbert", "t5".
        num_heads, num_kv_heads: query heads and KV heads.
        head_dim, value_dim: sizes of queries and keys, and of values.
        output: the projection whose input is Concat(head_1 … head_h) [..., n, h·d_v]. None where no module is called
            with it (some of headwise's own designs); `scale_heads` and `record_heads` work there too.
            "torch": `nn.MultiheadAttention` reads the weight of its out_proj and never calls it, so hooks on it do
            nothing.
    """

    name: str
    module: nn.Module
    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    output: nn.Module | None
    anatomy: "Kind" = field(repr=False, compare=False)

    def __repr__(self) -> str:
        kv = f", {self.num_kv_heads} KV heads" if self.num_kv_heads != self.num_heads else ""
        width = "" if self.value_dim == self.head_dim else f", value_dim {self.value_dim}"
        return (
            f"HeadSite({self.name!r}: {type(self.module).__name__}, kind {self.kind}, {self.num_heads} heads{kv}, "
            f"head_dim {self.head_dim}{width})"
        )

    @property
    def place(self) -> str:
        """What it is called in messages and tables: its name, or the class of a module that is the model itself."""
        return self.name or type(self.module).__name__

    def weights(self) -> dict[str, Tensor]:
        """The matrices of each head: "q" [h, d_model, d_k], "k" [h_kv, d_model, d_k], "v" [h_kv, d_model, d_v] and
        "o" [h, d_v, d_model] (d_model of keys and values is the context's width in cross attention).

        x @ q[i] is head i's query, without bias, norm and positions. Views where the layout allows it, copies
        otherwise. ConfigError, with the reason, where a head has no such matrices.
        """
        return self.anatomy.weights(self)

    def layout(self) -> Layout:
        """The location of the heads in the module's parameters, and the operations between them."""
        return self.anatomy.layout(self)

    def parts(self) -> list[Part]:
        """The parts of parameters that are laid out by heads. ConfigError if there is no layout, or a part is in an
        adapter."""
        layout = self.layout()
        if not layout.parts:
            raise no_layout(type(self.module).__name__, layout.missing)
        check_owned(self.place, self.module, layout.parts)
        return list(layout.parts)


class HeadSites(list[HeadSite]):
    """Attention modules, as `find_heads` returns them: a list that prints as a table."""

    def __repr__(self) -> str:
        return as_text(_HEAD, [_row(site) for site in self], words=3, gap="  ") if self else "[]"

    def _repr_html_(self) -> str:
        return as_html(_HEAD, [_row(site) for site in self])


_HEAD = ["name", "module", "kind", "heads", "KV heads", "head_dim", "value_dim"]


def _row(site: HeadSite) -> list[str]:
    sizes = (site.num_heads, site.num_kv_heads, site.head_dim, site.value_dim)
    return [site.name or "(the model)", type(site.module).__name__, site.kind, *map(str, sizes)]


class Kind:
    """One kind of attention modules: how to find them, the layout of their heads, and how to resize them. Registered in
    `find.KINDS`.

    Attributes:
        name: the value of `HeadSite.kind`. about: a description for error messages.
        by_class: whether the modules are recognised by class, so that parameters outside of their layout are
            common to all heads. In modules recognised by structure, such a parameter may belong to heads.
        merged: which modules of this kind can share keys and values, for messages; "" if none can.
    Raises:
        ConfigError: on construction, for a kind that does not define one of them.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    by_class: ClassVar[bool] = False
    merged: ClassVar[str] = ""

    def __init__(self) -> None:
        check_declared(type(self), Kind, {
            "name": "the value of HeadSite.kind",
            "about": "a description of the kind, for error messages",
            "site": "the HeadSite of a module, or None if it is of another kind",
            "layout": "where each head's numbers lie in each parameter",
            "resizing": "which numbers of heads can change, or why not",
            "resize": "the sizes that the module's code reads, for another number of heads",
        })  # fmt: skip

    def site(self, name: str, module: nn.Module) -> HeadSite | None:
        """The site, if this module is of this kind; recognised by structure, so that no library is imported."""
        raise NotImplementedError

    def layout(self, site: HeadSite) -> Layout:
        raise NotImplementedError

    def resizing(self, site: HeadSite) -> Resizing:
        """Which numbers of heads of this module can change."""
        raise NotImplementedError

    def resize(self, site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
        """Set the sizes that the module's code reads, for parameters that already have this number of heads."""
        raise NotImplementedError

    def share(self, site: HeadSite) -> None:
        """Prepare a module for KV heads that several query heads share, with the same results."""

    def weights(self, site: HeadSite) -> dict[str, Tensor]:
        """As in `HeadSite`, from the parts named q, k, v and o."""
        if missing := site.layout().missing:
            raise no_layout(type(site.module).__name__, missing)
        found: dict[str, Tensor] = {}
        for part in site.parts():
            x = part.tensor
            if not isinstance(x, Tensor | nn.ParameterList):
                what = f"{site.name}: {type(part.owner).__name__}.{part.name} is not a tensor"
                raise no_layout(what, "a quantised module; load the model unquantised")
            if isinstance(x, Tensor) and not x.is_floating_point():
                raise no_layout(f"{site.name}: {part.name} is {x.dtype}", "quantised weights; load them unquantised")
            if is_dtensor(x):
                raise no_layout(
                    f"{site.name}: {part.name}", "it is split over ranks (a DTensor); use one that is whole"
                )
            if isinstance(x, Tensor) and x.ndim == 2 and part.letter in "qkvo":
                count = site.num_heads if part.heads == "query" else site.num_kv_heads
                piece = x.detach().narrow(part.axis, part.start, count * part.width)
                heads = piece.unflatten(part.axis, (count, part.width)).movedim(part.axis, 0)
                # Heads first: [h, d, d_model] of a row layout, [h, d_model, d] of a column layout, "o" the other way.
                transposed = (part.axis == 0) == (part.letter != "o")
                found[part.letter] = heads.mT if transposed else heads
        return found

    @contextmanager
    def tapped(self, site: HeadSite, change: Change) -> Iterator[None]:
        """Within it, `change` is applied to Concat(head_1 … head_h) before the output projection; not in a copy."""
        assert site.output is not None

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if is_dtensor(args[0]) or args[0].shape[-1] != site.num_heads * site.value_dim:
                raise ConfigError(
                    f"{site.name or type(site.module).__name__}: its output projection is not called with the outputs "
                    f"of all its {site.num_heads} heads: they are split over ranks, and can be neither scaled nor "
                    f"recorded; use a model that is not split"
                )
            return (change(args[0]), *args[1:])

        handle = site.output.register_forward_pre_hook(Hook(before))
        try:
            yield
        finally:
            handle.remove()


def features(linear: object, axis: int) -> int | None:
    """Outputs (axis 0) or inputs (axis 1) of a linear map, None for another object. Quantised maps have them too,
    though their weights have another layout."""
    size = getattr(linear, "out_features" if axis == 0 else "in_features", None)
    return size if isinstance(size, int) else None


def norms_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The norms of queries and keys in a module of another library, by their names."""
    named = {name.lower(): child for name, child in module.named_children() if "norm" in name.lower()}
    return tuple(child for name, child in named.items() if not name.startswith("v"))


def put_sizes(module: nn.Module, **sizes: int) -> None:
    """Set those of the attributes that the module has."""
    for name, value in sizes.items():
        if hasattr(module, name):
            setattr(module, name, value)


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
            index = [
                part.start + head * part.width + i
                for part in along for head in orders[part.heads] for i in range(part.width)
            ]  # fmt: skip
            x = x.detach().index_select(axis, torch.tensor(index, dtype=torch.long, device=x.device))
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
    """Replace a parameter, with the same requires_grad, or a buffer."""
    held, x = getattr(owner, name), x.detach().contiguous()
    setattr(owner, name, nn.Parameter(x, requires_grad=held.requires_grad) if name in owner._parameters else x)
    if name != "weight":
        return
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = x.shape
    elif isinstance(owner, nn.Embedding):
        owner.num_embeddings, owner.embedding_dim = x.shape
    elif hasattr(owner, "nf"):  # Conv1D of transformers
        vars(owner).update(nx=x.shape[0], nf=x.shape[1])


def _of_parameters(site: HeadSite) -> list[tuple[nn.Module, str, list[Part]]]:
    """Group the parts of a site by parameter."""
    found: dict[tuple[int, str], tuple[nn.Module, str, list[Part]]] = {}
    for part in site.parts():
        found.setdefault((id(part.owner), part.name), (part.owner, part.name, []))[2].append(part)
    return list(found.values())


Method = TypeVar("Method", bound="ReplacedMethod")


class ReplacedMethod:
    """The method `name` of a module with the changes of all contexts that are open, which may end in any order; copies
    have none. A subclass defines `changed`. own: the instance's method, if that of the class was replaced."""

    name: ClassVar[str]

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.module, self.own, self.changes = module, own, list[Change]()

    def changed(self, *args: Any, **kwargs: Any) -> Any:
        """The method with the changes."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.changed(*args, **kwargs) if self.changes else self.before(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, self.own)

    @property
    def before(self) -> Callable[..., Any]:
        """The method without the changes."""
        return partial(getattr(type(self.module), self.name), self.module) if self.own is None else self.own

    __wrapped__ = before  # as `functools.wraps` has it

    @classmethod
    @contextmanager
    def with_change(cls: type[Method], module: nn.Module, change: Change) -> Iterator[None]:
        """Within it, the module's method applies a change too."""
        held = vars(module)
        found = held.get(cls.name)
        method = held[cls.name] = found if isinstance(found, cls) else cls(module, found)
        method.changes.append(change)
        try:
            yield
        finally:
            method.changes.remove(change)
            if not method.changes and held.get(cls.name) is method:
                del held[cls.name]
                if method.own is not None:
                    held[cls.name] = method.own


@contextmanager
def scale_heads(sites: Sequence[HeadSite], gates: Sequence[Tensor] | Tensor) -> Iterator[None]:
    """Within it, every head's output is multiplied by its gate before the output projection; compiled models run
    uncompiled.

    Args:
        sites: from `find_heads`.
        gates: one tensor [h] per site, for all batch entries and tokens; it may require a gradient. 0 masks a head.
    Raises:
        ShapeError: naming the site whose gates do not fit. DTypeError: for other things than sites and tensors.
        ConfigError: at the end, naming a module that was called without its heads being scaled.
    """
    check_sites(sites)
    several = isinstance(gates, Sequence) or (isinstance(gates, Tensor) and gates.ndim > 0)
    if not several or not all(isinstance(gate, Tensor) for gate in gates):
        inside = f" of {type(gates[0]).__name__}" if isinstance(gates, Sequence) else ""
        raise DTypeError(
            f"gates: expected one tensor [h] for each site, in their order, got {type(gates).__name__}{inside}"
        )
    if len(gates) != len(sites):
        raise ShapeError(f"gates: {len(gates)} tensors for {len(sites)} sites; expected one tensor [h] each")
    for site, gate in zip(sites, gates, strict=True):
        if gate.shape != (site.num_heads,):
            raise ShapeError(
                f"gates: shape {tuple(gate.shape)} for {site.name!r}; expected [{site.num_heads}], one for each head"
            )
    with ExitStack() as stack:
        for site, gate in zip(sites, gates, strict=True):

            def scaled(concat: Tensor, width: int = site.value_dim, gate: Tensor = gate) -> Tensor:
                return concat * gate.repeat_interleave(width).to(concat)

            stack.enter_context(tapped(site, scaled))
        yield


@contextmanager
def record_heads(sites: Sequence[HeadSite]) -> Iterator[list[Tensor]]:
    """Within it, record the output of every head before the output projection: yields a list with one tensor
    [b, h, n, d_v] per site.

    Entry i is that of the latest call of `sites[i]`, with its graph, and [0, h, 0, d_v] before the first. Positions on
    two axes are flattened row by row; a call without a batch has b = 1.

    Raises:
        ConfigError: at the end, naming a module that was called without its heads being recorded.
    """
    check_sites(sites)
    heads = [torch.empty(0, site.num_heads, 0, site.value_dim) for site in sites]
    with ExitStack() as stack:
        for i, site in enumerate(sites):

            def recorded(concat: Tensor, i: int = i, site: HeadSite = site) -> Tensor:
                rows = concat[None] if concat.ndim == 2 else concat.flatten(1, -2)  # [b, n, h·d_v]
                heads[i] = rows.unflatten(-1, (site.num_heads, site.value_dim)).transpose(1, 2)
                return concat

            stack.enter_context(tapped(site, recorded))
        yield heads


@contextmanager
def tapped(site: HeadSite, change: Change) -> Iterator[None]:
    """Within it, `change` is applied to Concat(head_1 … head_h) before the output projection, uncompiled. ConfigError
    at the end, if the module was called and the change never applied."""
    changes = [0]

    def counted(concat: Tensor) -> Tensor:
        changes[0] += 1
        return change(concat)

    with called({site.module: site.name}) as calls, eagerly(), site.anatomy.tapped(site, counted):
        yield
    if calls and not changes[0]:
        raise ConfigError(
            f"{site.place}: {type(site.module).__name__} was called, but not its output projection with the heads, as "
            f"where its forward was replaced on the instance; its heads were not reached"
        )


def check_sites(sites: object) -> None:
    """Raise DTypeError for anything but sites."""
    if not isinstance(sites, Sequence) or not all(isinstance(site, HeadSite) for site in sites):
        raise DTypeError(f"sites: expected those of find_heads(model), got {type(sites).__name__}")
