"""Scaling and recording heads while a model runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.models.hooks import called
from headwise.models.site import Change, HeadSite
from headwise.nn.owned import eagerly

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

    def scaled(site: HeadSite, gate: Tensor) -> Change:
        def change(concat: Tensor) -> Tensor:
            return concat * gate.repeat_interleave(site.value_dim).to(concat)

        return change

    with ExitStack() as stack:
        for site, gate in zip(sites, gates, strict=True):
            stack.enter_context(tapped(site, scaled(site, gate)))
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

    def recorded(i: int, site: HeadSite) -> Change:
        def change(concat: Tensor) -> Tensor:
            rows = concat[None] if concat.ndim == 2 else concat.flatten(1, -2)  # [b, n, h·d_v]
            heads[i] = rows.unflatten(-1, (site.num_heads, site.value_dim)).transpose(1, 2)
            return concat

        return change

    with ExitStack() as stack:
        for i, site in enumerate(sites):
            stack.enter_context(tapped(site, recorded(i, site)))
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
