"""The smallest case with the same failure, found by halving sizes and leaving features out."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .case import Case, Tree

PLAIN = Case()
SIZES = ("n", "m", "d", "e", "b", "kv", "group")


def shrunk(case: Case, fails: Callable[[Case], bool], tries: int = 400) -> Case:
    """A case that still fails and of which nothing more can be left out, as far as so many tries go."""
    found = True
    while found:
        found = False
        for smaller in _smaller(case):
            if tries == 0:
                return case
            tries -= 1
            if fails(smaller):
                case, found = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with a little less, the largest steps first."""
    for i in range(len(case.reads)):
        yield replace(case, reads=case.reads[:i] + case.reads[i + 1 :])
    for name in ("scores", "bad"):
        held = getattr(case, name)
        for i in range(len(held)):
            yield replace(case, **{name: held[:i] + held[i + 1 :]})
    for tree in _trees(case.mask):
        yield replace(case, mask=tree)
    for i, layout in enumerate(case.layouts):
        if layout:
            laid = (*case.layouts[:i], "", *case.layouts[i + 1 :])
            yield replace(case, layouts=laid)  # type: ignore[arg-type]
    kept = {*SIZES, "seed", "mask", "scores", "bad", "layouts", "reads", "kernel"}
    for name in (one.name for one in fields(Case) if one.name not in kept):
        if getattr(case, name) != getattr(PLAIN, name):
            yield replace(case, **{name: getattr(PLAIN, name)})
    if case.n > case.m > 0:
        yield replace(case, n=case.m)
    if case.e > case.d:
        yield replace(case, e=case.d)
    for name in SIZES:
        size = getattr(case, name)
        for less in dict.fromkeys((1, size // 2, size - size // 4, size - 1)):
            if 0 < less < size:
                yield replace(case, **{name: less})
    if case.n > 1 and case.m > 1:
        for by in (2, 1):
            less_n, less_m = (x // 2 if by == 2 else x - 1 for x in (case.n, case.m))
            yield replace(case, n=less_n, m=less_m)
    yield from (replace(case, seed=seed) for seed in range(1, 4) if case.seed > 3)


def _trees(mask: Tree) -> Iterator[Tree]:
    if not mask:
        return
    yield ()
    if mask[0] in ("and", "or"):
        kind, left, right = mask
        yield left
        yield right
        yield from ((kind, smaller, right) for smaller in _trees(left) if smaller)
        yield from ((kind, left, smaller) for smaller in _trees(right) if smaller)
