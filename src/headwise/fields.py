"""What an object holds, said once; its files, its graphs and its parts follow from that.

A class below `Described` declares `holds`: a field for each argument of its constructor, under whose name the value is
an attribute too. An array names its axes: b, h, n and m are batch entries, heads, queries and keys, of size 1 where one
entry stands for all; other letters are axes of its own.

    class Bias(Score):
        holds = {"values": Array("bhnm")}

So one batch entry, some heads, or a rectangle has its share of each array (`cut`), ranks put theirs together
(`joined`), and `write` and `read` make plain values of the object and the object of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from headwise.contents import Entry, each, number, whole, word
from headwise.errors import CheckpointError, ConfigError, ShapeError

DEEPEST = 200  # objects inside objects
Thing = TypeVar("Thing", bound="Described")
Put = Callable[[Tensor], Any]  # keeps a tensor, and returns a plain value that stands for it
Take = Callable[[Any, str], Tensor]  # the tensor that a plain value stands for, at a place of the file


class Section(NamedTuple):
    """The entries [start, stop) of an axis of size `of`."""

    start: int
    stop: int
    of: int


Cuts = Mapping[str, Section]  # by the letter of the axis


class Described:
    """Base of what declares what it holds."""

    # None: it holds what is no field; it then has no place in files and graphs.
    holds: ClassVar[Mapping[str, "Field"] | None]
    known: ClassVar[dict[str, Any]]  # the classes of its kind that files and graphs may name
    called: ClassVar[str]  # what its kind is called in messages

    def cut(self, cuts: Cuts) -> Any:
        """This as some entries of some axes have it; itself if nothing that it holds has those axes."""
        return self._changed(lambda field, name, x: field.cut(x, cuts, f"{type(self).__name__}({name})"))

    def joined(self, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Any:
        """What the parts of all ranks are together, the inverse of `cut`.

        Args:
            size: of the axis in this part. join: a tensor of this part and those of the others, along a dimension.
        """
        return self._changed(lambda field, _, x: field.joined(x, axis, size, join))

    def mapped(self: Thing, change: Callable[[Tensor], Tensor]) -> Thing:
        """This with each of its tensors changed."""
        return self._changed(lambda field, _, x: field.mapped(x, change))

    def _changed(self: Thing, change: Callable[["Field", str, Any], Any]) -> Thing:
        held = {name: getattr(self, name) for name in self.holds or ()}
        new = {name: change(field, name, held[name]) for name, field in (self.holds or {}).items()}
        if all(new[name] is held[name] for name in held):
            return self
        made: Any = type(self)
        found: Thing = made(**new)
        return found


def register(kind: type[Thing]) -> type[Thing]:
    """Let files and graphs name a class, so that its objects can be saved and be part of a graph.

    Raises:
        ConfigError: if it is no such class, holds what is no field, or another class has its name.
    """
    if not (isinstance(kind, type) and issubclass(kind, Described)):
        raise ConfigError(f"register({kind!r}): expected a class of Mask or Score")
    name = kind.__name__
    if kind.holds is None:
        raise ConfigError(f"{kind.called} {name}: holds=None, so it cannot be written; declare its fields")
    if kind.known.setdefault(name, kind) is not kind:
        raise ConfigError(f"{kind.called} {name}: {kind.known[name].__module__} has one of that name already")
    return kind


def unregistered(thing: Described) -> Described | None:
    """The first object in it, or itself, that cannot be written: of a class that was not registered."""
    for one in inside(thing):
        if one.known.get(type(one).__name__) is not type(one):
            return one
    return None


def inside(thing: Described) -> list[Described]:
    """The object and all that are in it."""
    found = [thing]
    for name, field in (thing.holds or {}).items():
        if isinstance(field, Inner):
            found += inside(getattr(thing, name))
    return found


def write(thing: Described, put: Put, deepest: int = DEEPEST) -> dict[str, Any]:
    """An object that `unregistered` finds nothing in, as plain values; its tensors are given to `put`."""
    if not deepest:
        raise CheckpointError(f"more than {DEEPEST} {thing.called}s inside one another cannot be written")
    code: dict[str, Any] = {"kind": type(thing).__name__}
    for name, field in (thing.holds or {}).items():
        code[name] = field.write(getattr(thing, name), put, deepest - 1)
    return code


def read(kind: Any, code: Any, at: str, take: Take, deepest: int = DEEPEST) -> Any:
    """The object of a class below `kind` that `write` was given.

    Args:
        at: where the code stands, for messages.
    Raises:
        HeadwiseError: if it is no such code, or its values are none that the class takes.
    """
    if not deepest:
        raise CheckpointError(f"more than {DEEPEST} {kind.called}s inside one another")
    entry = Entry(code, at)
    name = entry.word("kind")
    found = kind.known.get(name)
    if found is None:
        raise CheckpointError(f"unknown {kind.called} {name!r}; one of another package is known once that is imported")
    if more := [key for key in entry if key != "kind" and key not in found.holds]:
        raise CheckpointError(f"{at}.{more[0]}: a {name} holds no such value")
    held = {key: field.read(entry.raw(key), f"{at}.{key}", take, deepest - 1) for key, field in found.holds.items()}
    return found(**held)


class Field:
    """One value that an object holds. Unless overridden it is plain, and the same in all parts."""

    plain = True  # it is no tensor and has no parts

    def write(self, value: Any, put: Put, deepest: int) -> Any:
        """The value as a plain one."""
        return value

    def read(self, code: Any, at: str, take: Take, deepest: int) -> Any:
        """The value again; raises CheckpointError for what is none."""
        raise NotImplementedError

    def cut(self, value: Any, cuts: Cuts, name: str) -> Any:
        """What some entries of some axes have of it."""
        return value

    def joined(self, value: Any, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Any:
        """What the parts of all ranks are together."""
        return value

    def mapped(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """The value with its tensors changed."""
        return value


class Whole(Field):
    """A whole number."""

    def write(self, value: Any, put: Put, deepest: int) -> Any:
        return value if isinstance(value, torch.SymInt) else int(value)

    def read(self, code: Any, at: str, take: Take, deepest: int) -> int:
        return whole(code, at)


class Number(Field):
    """A finite number."""

    def write(self, value: Any, put: Put, deepest: int) -> Any:
        return float(value)

    def read(self, code: Any, at: str, take: Take, deepest: int) -> float:
        return number(code, at)


class Word(Field):
    """A string."""

    def read(self, code: Any, at: str, take: Take, deepest: int) -> str:
        return word(code, at)


@dataclass(frozen=True)
class Array(Field):
    """A tensor.

    Attributes:
        axes: a letter for each dimension; of several dimensions any may have size 1, one entry for all.
        optional: whether it may be None.
    """

    axes: str
    optional: bool = False
    plain = False

    def write(self, value: Any, put: Put, deepest: int) -> Any:
        return None if value is None else put(value)

    def read(self, code: Any, at: str, take: Take, deepest: int) -> Tensor | None:
        return None if code is None and self.optional else take(code, at)

    def cut(self, value: Any, cuts: Cuts, name: str) -> Any:
        found = value
        for axis, (start, stop, of) in cuts.items():
            at = self.axes.find(axis)
            if value is None or at < 0 or (value.shape[at] == 1 < value.ndim):
                continue  # there is none, or one entry for all
            if value.shape[at] != of:
                raise ShapeError(f"{name}: shape {tuple(value.shape)}, of which dimension {at} should be {of}")
            if (start, stop) != (0, of):
                found = found.narrow(at, start, stop - start)
        return found

    def joined(self, value: Any, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Any:
        at = self.axes.find(axis)
        return value if value is None or at < 0 or value.shape[at] != size else join(value, at)

    def mapped(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        return None if value is None else change(value)


@dataclass(frozen=True)
class Counts(Field):
    """A tuple of counts, one for each entry of an axis; None among them for no limit."""

    axis: str
    plain = False

    def write(self, value: Any, put: Put, deepest: int) -> Any:
        return list(value)

    def read(self, code: Any, at: str, take: Take, deepest: int) -> tuple[int | None, ...]:
        return tuple(each(code, at, lambda x, where: None if x is None else whole(x, where, 0)))

    def cut(self, value: Any, cuts: Cuts, name: str) -> Any:
        if self.axis not in cuts:
            return value
        start, stop, of = cuts[self.axis]
        if len(value) != of:
            raise ShapeError(f"{name}: {len(value)} entries; expected {of}")
        return value if (start, stop) == (0, of) else value[start:stop]

    def joined(self, value: Any, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Any:
        if axis != self.axis:
            return value
        numbers = torch.tensor([-1 if x is None else x for x in value], device="cpu")
        return tuple(None if x < 0 else x for x in join(numbers, 0).tolist())


@dataclass(frozen=True)
class Inner(Field):
    """An object of the same kind or another."""

    kind: Any
    plain = False

    def write(self, value: Any, put: Put, deepest: int) -> Any:
        return write(value, put, deepest)

    def read(self, code: Any, at: str, take: Take, deepest: int) -> Any:
        return read(self.kind, code, at, take, deepest)

    def cut(self, value: Any, cuts: Cuts, name: str) -> Any:
        return value.cut(cuts)

    def joined(self, value: Any, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Any:
        return value.joined(axis, size, join)

    def mapped(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        return value.mapped(change)
