"""Checks of masks and scores."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from headwise.errors import KernelError
from headwise.fields import Array, Section, inside, same, unregistered
from headwise.kernels import KERNELS
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Everything, Grid, Mask, Span, State, spans
from headwise.rule import Rule
from headwise.scores import Score
from headwise.testing.failed import CheckFailed, check, require, require_close
from headwise.testing.truth import SIZES, Formula, truth, vectors


@check
def check_mask(mask: Mask, *, sizes: tuple[int, int, int, int] = SIZES, aligned: bool = True) -> None:
    """Check that a mask is one set of cells in all its forms, and that all kernels follow it.

    Its tiles (`state`), ranges (`spans`), rectangles, batch entries, compositions and gaps are compared with `allowed`,
    cell by cell; outputs and weights of each kernel with a softmax in float64. Of a registered mask, files and graphs
    are checked too.

    Args:
        sizes: batch, heads, queries and keys of the matrix that it fits, with fewer queries than keys.
        aligned: whether its queries are the last of the keys, so that fewer queries have the last rows. False for a
            mask that numbers the queries from the first one on.
    Raises:
        CheckFailed: naming what it does not hold.
    """
    b, h, n, m = sizes
    grid, rows, cols = Grid(*sizes), torch.arange(n), torch.arange(m)
    mask.check(grid)
    cells = mask.allowed(rows, cols, grid)
    fits = cells.ndim == 4 and all(size in (1, full) for size, full in zip(cells.shape, (b, h), strict=False))
    require(cells.dtype == torch.bool, mask, f"allowed returns {cells.dtype}, expected booleans")
    require(
        fits and cells.shape[2:] == (n, m), mask,
        f"allowed returns shape {tuple(cells.shape)}, expected [{b} or 1, {h} or 1, {n}, {m}]",
    )  # fmt: skip
    dense = cells.expand(*sizes)
    some, few = torch.tensor([0, n // 2, n - 1]), torch.tensor([m - 1, 0, m // 3])
    picked = mask.allowed(some, few, grid).expand(b, h, 3, 3)
    require(torch.equal(picked, dense[:, :, some][..., few]), mask, "allowed differs for some of the rows and columns")
    with torch.device("meta"):
        anywhere = mask.to_dense(n, m, batch=b, heads=h)
    require(torch.equal(anywhere.expand(*sizes), dense), mask, "allowed depends on PyTorch's default device")
    if aligned and not any("n" in field.axes for field in _arrays(mask)):
        square = mask.to_dense(m, m, batch=b, heads=h)[..., -n:, :].expand(*sizes)
        require(
            torch.equal(square, dense), mask,
            f"queries are not aligned to the end of the keys: to_dense({n}, {m}) differs from the last {n} rows of "
            f"to_dense({m}, {m}); the position of query i is rows + grid.shift",
        )  # fmt: skip
    _check_states(mask, grid, dense)
    _check_spans(mask, grid, dense)
    _check_properties(mask, grid, dense)
    _check_parts_of_mask(mask, grid, dense)
    _check_kernels(mask, (), lambda logits, positions, keys: logits, sizes, dense)


def _arrays(thing: Mask | Score) -> list[Array]:
    return [field for one in inside(thing) for field in (one.holds or {}).values() if isinstance(field, Array)]


def _rectangles(n: int, m: int, count: int = 300) -> Iterator[tuple[Span, Span]]:
    """All rows and all columns, single cells along the diagonal, and random rectangles."""
    yield Span(0, n), Span(0, m)
    yield from ((Span(i, i + 1), Span(j, j + 1)) for i in range(n) for j in range(max(0, i - 2), min(m, i + m - n + 3)))
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ends = [torch.randint(size, (2,), generator=generator).tolist() for size in (n, m)]
        rows, cols = (Span(min(pair), max(pair) + 1) for pair in ends)
        yield rows, cols


def _blocks(n: int, m: int) -> list[tuple[Span, Span]]:
    """Rectangles that begin or end within the matrix."""
    return [(Span(0, n), Span(2, m)), (Span(3, n - 1), Span(m // 3, m - 2)), (Span(n - 1, n), Span(0, m))]


def _gap(n: int, m: int) -> tuple[Span, list[int]]:
    """Keys before all queries that are dropped, and those that remain."""
    gap = Span(1, (m - n) // 2)
    return gap, [j for j in range(m) if j not in range(*gap)]


def _check_states(mask: Mask, grid: Grid, dense: Tensor) -> None:
    for rows, cols in _rectangles(grid.n, grid.m):
        state, tile = mask.state(rows, cols, grid), dense[:, :, slice(*rows), slice(*cols)]
        wrong = (state is State.EMPTY and tile.any()) or (state is State.FULL and not tile.all())
        require(not wrong, mask, f"state of queries {tuple(rows)} and keys {tuple(cols)} is {state.name}; it is not")


def _check_spans(mask: Mask, grid: Grid, dense: Tensor) -> None:
    found = mask.spans(grid)
    if found is None:
        return
    b, n = grid.b, grid.n
    shape = found.ndim == 4 and found.shape[0] in (1, b) and found.shape[1] == n and found.shape[3] == 2
    require(
        shape and found.dtype == torch.int32 and found.device.type == "cpu", mask,
        f"spans are {found.dtype} {tuple(found.shape)} on {found.device}, expected int32 [{b} or 1, {n}, K, 2] on cpu",
    )  # fmt: skip
    ranges = spans.to_dense(found, grid.m)[:, None]
    require(torch.equal(ranges.expand_as(dense), dense), mask, "spans are not the cells of allowed")
    tidy = spans.tidy(found[..., 0].clamp(0, grid.m), found[..., 1].clamp(0, grid.m))
    require(
        torch.equal(tidy, found), mask,
        "spans are not canonical: sorted, disjoint, not adjacent, within the keys, and empty ones (0, 0) at the end; "
        "masks.spans.tidy makes them so",
    )  # fmt: skip


def _check_properties(mask: Mask, grid: Grid, dense: Tensor) -> None:
    n, m = grid.n, grid.m
    require(not (mask.causal and dense.triu(m - n + 1).any()), mask, "causal, but a query sees a later key")
    differs = (dense != dense[:, :, :1]).any()
    require(not (mask.padding and differs), mask, "padding, but it hides other keys from some queries")
    if mask.whole_past:
        past = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        require((dense | ~past).all(), mask, "whole_past, but it hides an earlier key")


def _check_parts_of_mask(mask: Mask, grid: Grid, dense: Tensor) -> None:
    b, h, n, m = grid
    other = Causal().to_dense(n, m)
    both = ("&", mask & Causal(), dense & other), ("|", mask | Causal(), dense | other)
    for name, composed, expected in both:
        found = composed.to_dense(n, m, batch=b, heads=h).expand_as(dense)
        require(torch.equal(found, expected), mask, f"{name} Causal() is not that of its cells")
    one = mask.only(b - 1, h - 2, grid).to_dense(n, m)[0, 0]
    require(
        torch.equal(one, dense[b - 1, h - 2]), mask,
        f"the mask of entry {b - 1} and head {h - 2} is another one: the axes of its fields in `holds` are wrong",
    )  # fmt: skip
    for rows, cols in _blocks(n, m):
        part, small = mask.part(rows, cols, grid), grid.part(rows, cols)
        expected = dense[:, :, slice(*rows), slice(*cols)]
        found = part.allowed(torch.arange(small.n), torch.arange(small.m), small).expand(*small)
        require(torch.equal(found, expected), mask, f"the part of queries {tuple(rows)} and keys {tuple(cols)} differs")
        _check_spans(part, small, expected)
    gap, rest = _gap(n, m)
    small = Grid(b, h, n, len(rest))
    found = mask.with_gap(gap, small).to_dense(n, len(rest), batch=b, heads=h)
    require(torch.equal(found.expand(*small), dense[..., rest]), mask, f"without the keys {tuple(gap)} it differs")


@check
def check_score(score: Score, formula: Formula | None, *, sizes: tuple[int, int, int, int] = SIZES) -> None:
    """Check that a score is its formula in every kernel, in maps, in parts, and in its gradients.

    >>> import torch, headwise as hw
    >>> slopes = torch.tensor([0.5, 0.25, 0.1, 0.3, 0.7, 0.2], requires_grad=True)
    >>> def formula(logits, positions, keys):
    ...     return logits - slopes.double()[:, None, None] * (positions - keys).abs()
    >>> hw.testing.check_score(hw.ALiBi(slopes), formula)

    Args:
        formula: `formula(logits, positions, keys)` of the scaled products [b, h, n, m] in float64, the positions [n, 1]
            of the queries among the keys, and the keys [m]; it returns the scores [b, h, n, m], or those and logits [h]
            of a sink in the denominator. Differentiable in the score's own tensors, whose gradients are then compared.
        sizes: batch, heads, queries and keys that it fits.
    Raises:
        CheckFailed: naming what it does not hold.
    """
    name = type(score).__name__
    if formula is None:
        raise CheckFailed(f"{name}: no formula; give formula(logits, positions, keys), written apart from `terms`")
    grid, like = Grid(*sizes), torch.zeros((), dtype=torch.float64)
    score.check(grid, like.device)
    terms = score.terms(grid, like)
    require(score.placed or terms.relative is None, name, "placed is False, but its terms depend on the distance")
    if not score.placed:
        moved = score.terms(Grid(*sizes, 0), like)
        pairs = zip(terms.biases, moved.biases, strict=True)
        require(all(torch.equal(x, y) for x, y in pairs), name, "placed is False, but it depends on the positions")
    _check_parts_of_score(score, grid)
    _check_kernels(Causal(), (score,), formula, sizes, Causal().to_dense(*sizes[2:]).expand(*sizes))


def _check_parts_of_score(score: Score, grid: Grid) -> None:
    name, like = type(score).__name__, torch.zeros((), dtype=torch.float64)
    b, h, n, m = grid
    rule = Rule(Everything(), 1.0, grid, (score,))

    def added(rule: Rule) -> Tensor:
        total = torch.zeros(*rule.grid, dtype=torch.float64)
        return total + sum(rule.terms(like).added(Span(0, rule.grid.n), Span(0, rule.grid.m)))

    whole = added(rule)
    for rows, cols in _blocks(n, m):
        what = f"the part of queries {tuple(rows)} and keys {tuple(cols)}"
        require_close(added(rule.part(rows, cols)), whole[:, :, slice(*rows), slice(*cols)], name, what, atol=1e-12)
    for first in range(0, h, 2):
        heads = added(rule.cut({"h": Section(first, first + 2, h)}))
        what = f"heads {first} and {first + 1} alone; their fields in `holds` have an axis h"
        require_close(heads, whole[:, first : first + 2], name, what, atol=1e-12)
    entry = added(rule.cut({"b": Section(b - 1, b, b)}))
    require_close(entry, whole[b - 1 :], name, "one entry of the batch alone", atol=1e-12)
    gap, rest = _gap(n, m)
    left = Grid(b, h, n, len(rest))
    small = Rule(Everything(), 1.0, left, (score.with_gap(gap, left),))
    if any("m" in field.axes for field in _arrays(score)) or score.placed:
        require_close(added(small), whole[..., rest], name, f"without the keys {tuple(gap)}", atol=1e-12)


def _check_kernels(
    mask: Mask, score: tuple[Score, ...], formula: Formula, sizes: tuple[int, int, int, int], dense: Tensor
) -> None:
    """Outputs, maps and gradients of every kernel that supports the call; files and graphs of registered parts."""
    part = type(score[0]).__name__ if score else mask
    q, k, v = vectors(sizes)
    held = [x for one in score for x in vars(one).values() if isinstance(x, Tensor) and x.requires_grad]
    out, weights, lse = truth(q, k, v, formula, dense)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    wanted = torch.autograd.grad((out * pull).sum(), (q, k, v, *held), allow_unused=True)
    require(all(x is not None for x in wanted), part, "the formula does not use all tensors that require gradients")
    options: dict[str, Any] = {"mask": mask, "score": score}
    ran = []
    for kernel in KERNELS:
        try:
            found, amap = attend(q, k, v, **options, return_map=True, kernel=kernel)
        except KernelError:
            continue
        ran.append(kernel)
        require_close(found, out, part, f"output of kernel {kernel!r}", atol=1e-6)
        require_close(amap.lse, lse, part, f"log-sum-exp of kernel {kernel!r}", atol=1e-5)
        grads = torch.autograd.grad((found * pull).sum(), (q, k, v, *held))
        for got, expected in zip(grads, wanted, strict=True):
            size = float(expected.abs().max())
            require_close(got, expected, part, f"gradient of kernel {kernel!r}", rtol=1e-4, atol=1e-5 * (1 + size))
        if kernel == "torch_fused":
            continue
        require_close(amap[:], weights, part, f"weights read by kernel {kernel!r}", atol=2e-6)
        one = amap.head(sizes[0] - 1, 1)[0, 0]
        require_close(one, weights[-1, 1], part, f"weights of one head read by kernel {kernel!r}", atol=2e-6)
    require({"torch_blocks", "reference"} <= set(ran), part, f"only the kernels {ran} compute it")
    things: list[Mask | Score] = [mask, *score]
    for thing in things:
        missing = unregistered(thing) if thing.holds is not None else None
        require(missing is None, part, f"{type(missing).__name__} is not registered; add @register, or holds = None")
    if all(thing.holds is not None for thing in things):
        _check_saved(part, options, tuple(x.detach() for x in (q, k, v)))


def _check_saved(part: object, options: dict[str, Any], inputs: tuple[Tensor, ...]) -> None:
    """A file gives the same weights, and a traced graph the same output."""
    out, amap = attend(*inputs, **options, return_map=True)
    with tempfile.TemporaryDirectory() as folder:
        amap.save(Path(folder) / "map.safetensors")
        again = AttentionMap.load(Path(folder) / "map.safetensors")
        require(torch.equal(again[:], amap[:]), part, "a map with it is another one after save and load")
    things = [amap.mask, *amap.rule.scores], [again.mask, *again.rule.scores]
    require(same(*things), part, "its fields have other values after save and load")
    traced = make_fx(lambda q, k, v: attend(q, k, v, **options))(*inputs)
    require_close(traced(*inputs), out, part, "output of a traced graph", atol=1e-6)
