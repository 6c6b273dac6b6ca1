"""Attributes, parameters and buffers of a module that depend on its numbers of heads, found by trying: without a head,
the module must compute what it computes with that head masked."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headwise.models.difference import difference
from headwise.models.frames import line_of_error
from headwise.models.site import HeadSite, pick_heads, scale_heads
from headwise.models.traced import OF_HEAD, ROLES, TRACED, WIDTH, SharedMaps, Slices, Traced, TracedKind

TRIES = 128  # assignments of heads to tensors, and of roles to attributes
Size = tuple[nn.Module, str, str]  # module, attribute, role


class Call(NamedTuple):
    """The arguments of a module's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def with_sizes(known: Traced, module: nn.Module, running: Sequence[tuple[nn.Module, Call]]) -> Traced:
    """What is known, with the attributes to change, or the reason why the number of heads cannot. running: the modules
    that were running, the innermost first, with the arguments of their calls."""
    owners = {one.owner for one in known.slices}
    around = next(((one, call) for one, call in running if owners <= set(one.modules())), None)
    if around is None:
        return replace(known, fixed=f"the maps of {type(module).__name__} belong to modules outside of it")
    held: dict[tuple[int, str, int], int] = defaultdict(int)
    for part in known.parts():
        held[id(part.owner), part.name, part.axis] += known.count(part.heads) * part.width
    for cut in known.slices:
        if (own := held[id(cut.owner), cut.name, cut.axis]) != cut.size:
            reason = f"{own} of the {cut.size} entries of {cut.name} belong to heads, and the others to something else"
            return replace(known, fixed=reason)
    if known.num_heads == 1:
        return replace(known, fixed="it has one head")
    whole, call = around
    h, kv = known.num_heads, known.num_kv_heads
    group = h // kv
    tests = [_Test(list(range(group, h)), list(range(1, kv)))] if kv > 1 else []
    if group > 1:
        tests.append(_Test([i for i in range(h) if i % group], list(range(kv))))
    factor = next((p for p in range(2, kv + 1) if kv % p == 0), 1)
    fewer = _Test(list(range(h)), list(range(0, kv, factor))) if factor > 1 else None
    letters = {one.letter: one.owner for one in known.slices if one.letter != OF_HEAD}
    # Whether queries, keys, values and the output have an `nn.Linear` each
    separate = len(set(letters.values())) == 4 and all(isinstance(owner, nn.Linear) for owner in letters.values())
    merging = fewer if separate and all(one.name in ("weight", "bias") for one in known.slices) else None
    trial = _Trial(known, module, whole, call)
    found = None
    reason = ""
    with torch.no_grad(), trial.noise():
        for one in trial.assignments([*tests, *([merging] if merging else [])]):
            why = next((why for test in tests if (why := trial.differs(one, test))), "")
            reason = reason or why
            if not why:
                found = found or one
                if merging is None:
                    break
                if not trial.differs(one, merging):
                    return replace(one, merges=True)
        if found is None:
            way_out = "the code may read its sizes from attributes of the module; or mask heads with scale_heads"
            return replace(known, fixed=f"{reason}{suspects(known, whole)}; {way_out}")
        # Maps that can be replaced: the heads one after another, and no other module involved
        inside, maps = set(module.modules()), [one for one in found.slices if one.letter in "qkv"]
        if fewer is not None and h == kv and all(
            type(one.owner) is nn.Linear and one.owner in inside and (one.axis, one.step) == (0, one.width)
            for one in maps
        ):  # fmt: skip
            shared = replace(found, merges=True, shares=True)
            if not _Trial(shared, module, whole, call).differs(shared, fewer):
                return shared
        return found


class _Test(NamedTuple):
    """Query and KV heads that are kept."""

    query: list[int]
    key: list[int]


class _Trial:
    """Runs `whole`, a module or one around it that has all of its maps, with some of its heads."""

    def __init__(self, known: Traced, module: nn.Module, whole: nn.Module, call: Call) -> None:
        self.known, self.module, self.whole, self.call = known, module, whole, call

    def _slices(self) -> Iterator[list[Slices | None]]:
        """For each parameter and buffer that may be laid out by heads, the axes along which they may lie, or None."""
        heads = {self.known.num_kv_heads: "key", self.known.num_heads: "query"}
        for path, x in _of_that_size(self.known, self.whole):
            inside, _, name = path.rpartition(".")
            owner = self.whole.get_submodule(inside)
            if x.is_floating_point() and (name in owner._parameters or name in owner._buffers):
                axes = [(axis, size) for axis, size in enumerate(x.shape) if size in heads]
                yield [*(Slices(OF_HEAD, owner, name, axis, heads[size], 0, 1, 1, size) for axis, size in axes), None]

    def assignments(self, tests: Sequence[_Test]) -> Iterator[Traced]:
        """Which tensors may be laid out by heads and which attributes may have which roles, most of them first."""
        after = [replace(self.known, num_heads=len(test.query), num_kv_heads=len(test.key)) for test in tests]
        places: list[list[Any]] = [*self._slices()]
        inside = list(self.whole.modules())
        holders = {self.module, self.whole, *(one for one in inside if self.module in one.children())}
        holders |= {one for one in inside if isinstance(one, SharedMaps)}
        for holder in holders:
            for name, value in vars(holder).items():
                if type(value) is not int or name.startswith("_"):
                    continue
                if options := self._options(holder, name, value, after):
                    places.append([*options, None])
        for width in self._widths(after):
            for chosen in islice(product(*places), TRIES):
                given = [one for one in (*chosen, width) if one is not None]
                slices = [one for one in given if isinstance(one, Slices)]
                sizes = tuple(one for one in given if not isinstance(one, Slices))
                yield replace(self.known, slices=(*self.known.slices, *slices), sizes=sizes)

    def _options(self, holder: nn.Module, name: str, value: int, after: Sequence[Traced]) -> list[Size]:
        """The roles that an attribute with this value may have, of those that give it the same values only one."""
        found: dict[tuple[int, ...], Size] = {}
        for role in ROLES:
            values = tuple(ROLES[role](one) for one in after)
            if ROLES[role](self.known) == value and any(one != value for one in values):
                found.setdefault(values, (holder, name, role))
        return list(found.values())

    def _widths(self, after: Sequence[Traced]) -> list[Size | None]:
        """The roles that the width of the inputs may have in the code; None if it has none."""
        if WIDTH in vars(self.whole):
            return [*self._options(self.whole, WIDTH, vars(self.whole)[WIDTH], after)]
        return [None, *self._options(self.whole, WIDTH, self.known.width_of_inputs(), after)]

    def differs(self, found: Traced, test: _Test) -> str:
        """Why the module with these heads does not compute what it computes with the others masked; "" if it does."""
        known = self.known
        try:
            expected = self._masked(test)
        except Exception as error:  # such as a cache that the first call has filled
            vars(self.module).pop(TRACED, None)
            return f"called a second time with the same arguments, {_raises(self.module, error)}"
        vars(self.module)[TRACED] = found
        removed = "without a head" if len(test.query) < known.num_heads else "with fewer KV heads"
        try:
            with _restored(self.whole):
                TracedKind().share(_site(self.module))
                pick_heads(_site(self.module), test.query, test.key)
                results = tree_leaves(self.whole(*self.call.args, **self.call.kwargs))
        except Exception as error:  # whatever the user's code raises
            return f"{removed}, {_raises(self.module, error)}"
        finally:
            vars(self.module).pop(TRACED, None)
        kind = type(self.module).__name__
        why = _apart(results, expected, test.query, known.num_heads, f"the result of {kind}")
        return f"{removed}, {why or f'the code of {kind} returns tensors of other shapes'}" if why != "" else ""

    @contextmanager
    def noise(self) -> Iterator[None]:
        """Within it, parameters in no slice and buffers that may be laid out by heads have noise: no two are equal."""
        of_heads = {(id(one.owner), one.name) for one in self.known.slices}
        buffers = [(one.owner, one.name) for places in self._slices() if (one := places[0]) is not None]
        with _restored(self.whole), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for module in self.whole.modules():
                for name, x in module._parameters.items():
                    if x is not None and (id(module), name) not in of_heads and x.is_floating_point():
                        module._parameters[name] = nn.Parameter(_noisy(x))
            for module, name in buffers:
                if (buffer := module._buffers.get(name)) is not None:
                    module._buffers[name] = _noisy(buffer)
            yield

    def _masked(self, test: _Test) -> list[Any]:
        """What the module returns with the other heads masked, and with keys and values of the first of each group."""
        known = self.known
        gates = torch.zeros(known.num_heads)
        gates[test.query] = 1
        with _restored(self.whole):
            group = known.num_kv_heads // len(test.key)
            for one in known.slices if len(test.query) == known.num_heads else ():
                if one.letter in "kv":
                    x = getattr(one.owner, one.name).detach().clone()
                    for head in range(known.num_kv_heads):
                        first = one.start + head // group * group * one.step
                        piece = x.narrow(one.axis, first, one.width).clone()
                        x.narrow(one.axis, one.start + head * one.step, one.width).copy_(piece)
                    one.owner._parameters[one.name] = nn.Parameter(x)
            vars(self.module)[TRACED] = known
            with scale_heads([_site(self.module)], [gates]):
                return tree_leaves(self.whole(*self.call.args, **self.call.kwargs))


def _of_that_size(known: Traced, whole: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the modules that are in no slice and have an axis of the number of heads or KV heads, by name."""
    of_heads = {id(getattr(one.owner, one.name)) for one in known.slices}
    for path, module in whole.named_modules():
        for name, x in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(x, Tensor) and id(x) not in of_heads and {known.num_heads, known.num_kv_heads} & {*x.shape}:
                yield f"{path}.{name}".lstrip("."), x


def suspects(known: Traced, whole: nn.Module) -> str:
    """The tensors that may be laid out by heads, in words; "" if there are none."""
    named = ", ".join(f"{name} {tuple(x.shape)}" for name, x in _of_that_size(known, whole))
    return f" ({named} may belong to heads, but not so that a head can be cut out)" if named else ""


def _noisy(x: Tensor) -> Tensor:
    return x.detach() * (1 + 0.1 * torch.rand_like(x)) + 0.01 * torch.rand_like(x)


def _raises(module: nn.Module, error: Exception) -> str:
    first, line = (str(error) or "-").splitlines()[0], line_of_error(error)
    at = f" at {line}" if line else ""
    return f"the code of {type(module).__name__} raises {type(error).__name__}{at}: {first}"


def _site(module: nn.Module) -> HeadSite:
    site = TracedKind().site("", module)
    assert site is not None
    return site


def _apart(found: list[Any], expected: list[Any], kept: list[int], heads: int, what: str) -> str | None:
    """How the results differ beyond rounding, "" if they do not; None if shapes differ other than by the heads."""
    why, compared = "", 0
    for mine, theirs in zip(found, expected, strict=False):
        if not isinstance(theirs, Tensor) or not isinstance(mine, Tensor) or not theirs.is_floating_point():
            continue
        if mine.shape != theirs.shape:
            axes = [i for i, size in enumerate(theirs.shape) if size == heads]
            picked = [theirs.index_select(i, torch.tensor(kept, device=theirs.device)) for i in axes]
            fits = [one for one in picked if one.shape == mine.shape]
            if not fits:
                return None
            theirs = fits[0]
        compared += 1
        if theirs.numel():
            tolerance = 1e-4 if theirs.dtype.itemsize > 2 else 0.05
            apart = difference(mine.reshape(1, -1), theirs.reshape(1, -1), order=torch.inf)
            why = why or apart.reason(what, "that with the others masked", tolerance)
    return why if compared and len(found) == len(expected) else None


@contextmanager
def _restored(whole: nn.Module) -> Iterator[None]:
    """Afterwards all attributes, parameters, buffers, modules and hooks are the same objects as before."""
    before = [(vars(one), dict(vars(one))) for one in whole.modules()]
    before += [(held, dict(held)) for one in whole.modules() for held in vars(one).values() if isinstance(held, dict)]
    try:
        yield
    finally:
        for held, values in before:
            replaced(held, values)


def replaced(held: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Give a dictionary these entries and no others."""
    held.clear()
    held.update(values)
