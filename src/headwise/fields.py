"""Declarations of the fields of masks and scores, from which serialization, graphs and sharding are derived.

A subclass of `Described` declares `holds`: a field for each argument of its constructor, which is also an attribute of
that name. An array names its axes: b, h, n and m are batch entries, heads, queries and keys, of size 1 where they are
broadcast; other letters are axes of its own.

    class Bias(Score):
        holds = {"values": Array("bhnm")}

From it, `cut` slices the object to some batch entries, heads or a rectangle, `joined` gathers the parts of all ranks,
and `write` and `read` serialize the object to plain values and back.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field as dataclass_field
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from headwise.base.read import Entry, each, number, whole, word
from headwise.errors import CheckpointError, ConfigError, ShapeError

DEEPEST = 200  # the deepest nesting of objects
Thing = TypeVar("Thing", bound="Described")
Put = Callable[[Tensor], Any]  # stores a tensor and returns a plain value that refers to it
Take = Callable[
    [Any, str], Tensor
]  # returns the tensor that a plain value refers to; the string is its place, for errors


class Section(NamedTuple):
    """The entries [start, stop) of an axis of size `of`."""

    start: int
    stop: int
    of: int


Cuts = Mapping[str, Section]  # by the letter of the axis


class Described:
    """Base class of objects that declare their fields."""

    # None: it has values that no field describes; it then cannot be part of files and graphs.
    holds: ClassVar[Mapping[str, "Field"] | None]
    known: ClassVar[dict[str, Any]]  # the registered classes of its kind, which files and graphs may name
    called: ClassVar[str]  # the name of its kind in messages
    saved_as: ClassVar[str] = ""  # its module and name in saved programs, where it has been moved since

    def cut(self, cuts: Cuts) -> Any:
        """The object restricted to some entries of some axes; itself if none of its fields has those axes."""
        return self._changed(lambda field, name, x: field.cut(x, cuts, f"{type(self).__name__}({name})"))

    def joined(self, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Any:
        """The object of all ranks together, the inverse of `cut`, given the size of the axis in this part, and `join`,
        which gathers a tensor from all parts along a dimension."""
        return self._changed(lambda field, _, x: field.joined(x, axis, size, join))

    def mapped(self: Thing, change: Callable[[Tensor], Tensor]) -> Thing:
        """The object with `change` applied to each of its tensors."""
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
    """Register a class, so that its objects can be saved and be part of a graph.

    Raises:
        ConfigError: if it is not a `Described` class, its `holds` is None, or its name is taken.
    """
    if not (isinstance(kind, type) and issubclass(kind, Described)):
        raise ConfigError(f"register({kind!r}): expected a class of Mask or Score")
    name = kind.__name__
    if kind.holds is None:
        raise ConfigError(f"{kind.called} {name}: holds is None, so it cannot be saved; declare its fields")
    if kind.known.setdefault(name, kind) is not kind:
        raise ConfigError(f"{kind.called} {name}: {kind.known[name].__module__} already registers this name")
    if kind not in pytree.SUPPORTED_NODES and all(type(field) in WITHOUT_TENSORS for field in kind.holds.values()):
        _register_tree(kind, kind.holds)
    return kind


@dataclass(frozen=True)
class _Rest:
    """The values of the fields of an object that are no objects themselves, and the object, if it is known."""

    values: tuple[Any, ...]
    made: Any = dataclass_field(default=None, compare=False, repr=False)


def _register_tree(kind: type[Described], holds: Mapping[str, "Field"]) -> None:
    """Let a class without tensors be part of the arguments of an exported program (`torch.export`): a tree of its inner
    objects, or a constant. Those with tensors stay leaves, as who maps over arguments (FSDP) would cast the tensors."""
    inner = [name for name, field in holds.items() if isinstance(field, Inner)]
    own = {name: field for name, field in holds.items() if name not in inner}

    def flatten(thing: Any) -> tuple[list[Any], _Rest]:
        rest = _Rest(tuple(getattr(thing, name) for name in own), thing)
        return [getattr(thing, name) for name in inner], rest

    def flatten_with_keys(thing: Any) -> tuple[list[tuple[Any, Any]], _Rest]:
        parts, rest = flatten(thing)
        return [(pytree.GetAttrKey(name), part) for name, part in zip(inner, parts, strict=True)], rest

    def unflatten(parts: Iterable[Any], rest: _Rest) -> Any:
        held = dict(zip(inner, parts, strict=True))
        made = rest.made  # the same object keeps what is derived from it
        if made is not None and all(getattr(made, name) is part for name, part in held.items()):
            return made
        return kind(**held, **dict(zip(own, rest.values, strict=True)))

    def dump(rest: _Rest) -> str:
        pairs = zip(own.values(), rest.values, strict=True)
        return json.dumps([field.write(value, _no_tensor, 1) for field, value in pairs])

    def load(text: str) -> _Rest:
        pairs = zip(own.items(), json.loads(text), strict=True)
        return _Rest(tuple(field.read(code, name, _no_tensor, 1) for (name, field), code in pairs))

    name = kind.saved_as or f"{kind.__module__}.{kind.__qualname__}"
    pytree.register_pytree_node(
        kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys, to_dumpable_context=dump,
        from_dumpable_context=load, serialized_type_name=name,
    )  # fmt: skip
    # A saved program contains the arguments that it was exported with.
    torch.serialization.add_safe_globals([kind, (kind, name)])


def _no_tensor(*_: Any) -> Any:
    raise AssertionError("a field without tensors has a tensor")


def unregistered(thing: Described) -> Described | None:
    """The first object in it, or itself, whose class is not registered; None if there is none."""
    for one in inside(thing):
        if one.known.get(type(one).__name__) is not type(one):
            return one
    return None


def inside(thing: Described) -> list[Described]:
    """The object and all objects nested in it."""
    found = [thing]
    for name, field in (thing.holds or {}).items():
        if isinstance(field, Inner):
            found += inside(getattr(thing, name))
    return found


def for_each_pair(thing: Described) -> bool:
    """Whether it holds a tensor with a number for each query and key."""
    fields = [field for one in inside(thing) for field in (one.holds or {}).values()]
    return any(isinstance(field, Array) and {"n", "m"} <= set(field.axes) for field in fields)


def same(one: Sequence[Described], other: Sequence[Described]) -> bool:
    """Whether two lists of objects are known to have equal values."""
    if len(one) != len(other):
        return False
    for first, second in zip(one, other, strict=True):
        if first is second:
            continue
        if any(thing.holds is None for top in (first, second) for thing in inside(top)):
            return False
        held: tuple[list[Tensor], list[Tensor]] = ([], [])
        codes = [write(first, _kept_in(held[0])), write(second, _kept_in(held[1]))]
        if codes[0] != codes[1] or not all(
            x.device == y.device and torch.equal(bits(x), bits(y)) for x, y in zip(*held, strict=True)
        ):
            return False
    return True


def bits(x: Tensor) -> Tensor:
    """Floating point numbers as integers, of which copies are equal, those of NaN too; others as they are."""
    if not x.is_floating_point():
        return x
    return x.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def _kept_in(tensors: list[Tensor]) -> Put:
    def put(x: Tensor) -> int:
        tensors.append(x)
        return len(tensors)

    return put


def write(thing: Described, put: Put, deepest: int = DEEPEST) -> dict[str, Any]:
    """Serialize an object of registered classes to plain values; `put` stores its tensors."""
    if not deepest:
        raise CheckpointError(f"{thing.called}s nested more than {DEEPEST} deep cannot be saved")
    code: dict[str, Any] = {"kind": type(thing).__name__}
    for name, field in (thing.holds or {}).items():
        code[name] = field.write(getattr(thing, name), put, deepest - 1)
    return code


def read(kind: Any, code: Any, at: str, take: Take, deepest: int = DEEPEST) -> Any:
    """Deserialize what `write` returned for an object of a subclass of `kind`; `at`: its place in messages.
    HeadwiseError if the code or its values are invalid."""
    if not deepest:
        raise CheckpointError(f"{kind.called}s nested more than {DEEPEST} deep")
    entry = Entry(code, at)
    name = entry.word("kind")
    found = kind.known.get(name)
    if found is None:
        raise CheckpointError(f"unknown {kind.called} {name!r}; if another package defines it, import that package")
    if more := [key for key in entry if key != "kind" and key not in found.holds]:
        raise CheckpointError(f"{at}.{more[0]}: {name} has no such field")
    held = {key: field.read(entry.raw(key), f"{at}.{key}", take, deepest - 1) for key, field in found.holds.items()}
    return found(**held)


class Field:
    """One value of an object. Unless overridden it is a plain value, and the same in all parts."""

    plain = True  # not a tensor, and the same in all parts

    def write(self, value: Any, put: Put, deepest: int) -> Any:
        """Serialize the value."""
        return value

    def read(self, code: Any, at: str, take: Take, deepest: int) -> Any:
        """Deserialize a value; raises CheckpointError if it is invalid."""
        raise NotImplementedError

    def cut(self, value: Any, cuts: Cuts, name: str) -> Any:
        """The value restricted to some entries of some axes."""
        return value

    def joined(self, value: Any, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Any:
        """The value of all ranks together."""
        return value

    def mapped(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """The value with `change` applied to its tensors."""
        return value


class Whole(Field):
    """An integer."""

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
    """A tensor. axes: a letter for each dimension; if there are several, any of them may have size 1 (broadcast).
    optional: whether it may be None."""

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
                continue  # no such axis, or it is broadcast
            if value.shape[at] != of:
                raise ShapeError(f"{name}: got shape {tuple(value.shape)}, expected size {of} in dimension {at}")
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
    """A tuple of counts, one for each entry of an axis; an entry of None means no limit."""

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
            raise ShapeError(f"{name}: got {len(value)} entries, expected {of}")
        return value if (start, stop) == (0, of) else value[start:stop]

    def joined(self, value: Any, axis: str, size: int, join: Callable[[Tensor, int], Tensor]) -> Any:
        if axis != self.axis:
            return value
        numbers = torch.tensor([-1 if x is None else x for x in value], device="cpu")
        return tuple(None if x < 0 else x for x in join(numbers, 0).tolist())


@dataclass(frozen=True)
class Inner(Field):
    """A nested object of the same or another kind."""

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


WITHOUT_TENSORS = (Whole, Number, Word, Counts, Inner)
