"""A method of a module that is replaced while the outputs of its heads are changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import nn

from headwise.models.site import Change

Method = TypeVar("Method", bound="ReplacedMethod")


class ReplacedMethod:
    """The method `name` of a module with all changes of the contexts that are open. They may end in any order, and the
    class of the module may change meanwhile. A copy of the module, by `deepcopy` or `pickle`, has none of the changes.
    A subclass defines `changed`, with the arguments of the method.

    Attributes:
        own: the module's own method, if that of its class was replaced already; None.
        changes: of the outputs of the heads; the first is applied first.
    """

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
