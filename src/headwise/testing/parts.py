"""Checks of masks, scores, kernels and measures."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from headwise.errors import KernelError
from headwise.fields import Array, Section, inside, same, unregistered
from headwise.kernels import KERNELS, run
from headwise.kernels.call import Call
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Everything, Grid, Lengths, Mask, Span, State, Window, spans
from headwise.parallel.layout import Rows, Way
from headwise.rule import KEY_BLOCK, Rule
from headwise.scores import ALiBi, Bias, Score, SinkLogits, SoftCap
from headwise.stats import Measure
from headwise.stats.base import side_by_side, with_tensors
from headwise.testing.truth import (
    HEAD_DIM,
    KV_HEADS,
    SIZES,
    VALUE_DIM,
    CheckFailed,
    Formula,
    check,
    require,
    require_close,
    truth,
    vectors,
)  # fmt: skip


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


def _blocks(n: int, m: int) -> list[tuple[Span, Span]]:
    """Rectangles that begin or end within the matrix."""
    return [(Span(0, n), Span(2, m)), (Span(3, n - 1), Span(m // 3, m - 2)), (Span(n - 1, n), Span(0, m))]


def _gap(n: int, m: int) -> tuple[Span, list[int]]:
    """Keys before all queries that are dropped, and those that remain."""
    gap = Span(1, (m - n) // 2)
    return gap, [j for j in range(m) if j not in range(*gap)]


def _check_states(mask: Mask, grid: Grid, dense: Tensor) -> None:
    """The state of the whole, of single cells along the diagonal, and of random rectangles."""
    n, m = grid.n, grid.m
    every = [(Span(0, n), Span(0, m))]
    every += [(Span(i, i + 1), Span(j, j + 1)) for i in range(n) for j in range(max(0, i - 2), min(m, i + m - n + 3))]
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        ends = [sorted(torch.randint(size, (2,), generator=generator).tolist()) for size in (n, m)]
        every.append((Span(ends[0][0], ends[0][1] + 1), Span(ends[1][0], ends[1][1] + 1)))
    for rows, cols in every:
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


@check
def check_kernel(name: str) -> None:
    """Check that a registered kernel computes what the formula says, or refuses.

    Outputs, log-sum-exps, gradients, statistics and reads of maps are compared with a softmax in float64, under masks
    and scores of every kind, in float32, bfloat16 and float64, with fully masked queries and large logits.

    Raises:
        CheckFailed: naming what it does not hold, or if it refuses every call.
    """
    masks = {
        "no mask": (Everything(), 29), "causal": (Causal(), 29), "fewer queries, causal": (Causal(), 17),
        "window": (Window(5, 2), 17), "lengths": (Lengths([0, 23], [17, 9]), 17),
    }  # fmt: skip
    scores: dict[str, tuple[tuple[Score, ...], Formula]] = {
        "": ((), lambda s, i, j: s),
        "soft cap": ((SoftCap(0.8),), lambda s, i, j: 0.8 * (s / 0.8).tanh()),
        "ALiBi": ((ALiBi(SLOPES),), lambda s, i, j: s - SLOPES.double()[:, None, None] * (i - j).abs()),
        "bias": ((Bias(BIAS),), lambda s, i, j: s + BIAS.double()),
        "sinks": ((SinkLogits(SLOPES),), lambda s, i, j: (s, SLOPES)),
    }
    limits = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float64: 5e-6}
    ran = 0
    for (of_mask, (mask, n)), (of_score, (score, formula)), (dtype, limit), factor in product(
        masks.items(), scores.items(), limits.items(), (1.0, 30.0)
    ):
        made = vectors((2, 6, n, 29), HEAD_DIM if n == 29 else VALUE_DIM)
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in made)
        q = (q.detach() * factor).requires_grad_()
        what = f"{of_mask}, {of_score or 'no score'}, {dtype}, logits × {factor:g}"
        try:
            out, amap = attend(q, k, v, mask=mask, score=score, kernel=name, return_map=True)
        except KernelError:
            continue
        ran += 1
        require(amap.kernel == name, name, f"{what}: kernel {amap.kernel!r} ran instead")
        dense = mask.to_dense(n, 29, batch=2, heads=6).expand(2, 6, n, 29)
        exact = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
        expected, weights, lse = truth(exact[0], exact[1], exact[2], formula, dense)
        require(out.dtype == dtype, name, f"{what}: the output is {out.dtype}")
        near = limit * max(1.0, factor / 5)
        require_close(out, expected, name, f"output, {what}", rtol=near, atol=near)
        require_close(amap.lse, lse, name, f"log-sum-exp, {what}", rtol=1e-5, atol=near)
        pull = torch.ones_like(expected) / 3
        grads = torch.autograd.grad((out * pull.to(dtype)).sum(), (q, k, v))
        for got, right in zip(grads, torch.autograd.grad((expected * pull).sum(), exact), strict=True):
            size = 1 + float(right.abs().max())
            require_close(got, right, name, f"gradient, {what}", rtol=10 * near, atol=10 * near * size)
        _check_reads(name, amap, weights.detach(), what, near)
    require(ran > 0, name, "refuses every call that was tried")
    q, k, v = (x.detach() for x in vectors(SIZES))
    with suppress(KernelError):
        empty = attend(q[:, :, :0], k, v, kernel=name)
        require(empty.shape == (2, 6, 0, VALUE_DIM), name, f"no queries: output of shape {tuple(empty.shape)}")


SLOPES = torch.linspace(0.1, 1.1, 6)
BIAS = torch.randn(1, 6, 1, 29, generator=torch.Generator().manual_seed(5))


def _check_reads(name: str, amap: AttentionMap, weights: Tensor, what: str, near: float) -> None:
    """What it reads of a map is the weights; what it does not support raises."""
    x = torch.randn(*weights.shape[:2], weights.shape[3], 2, generator=torch.Generator().manual_seed(6))
    reads: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "weights": (lambda: amap[:], weights),
        "product": (lambda: amap @ x, weights @ x.double()),
        "received": (amap.received, weights.sum(-2)),
        "entropy": (lambda: amap.measure("entropy", rows=True).rows["entropy"], torch.special.entr(weights).sum(-1)),
    }
    for read, (compute, expected) in reads.items():
        try:
            found = compute()
        except KernelError:
            continue
        require_close(found, expected, name, f"{read} of its map, {what}", rtol=1e-4, atol=10 * near)


@check
def check_measure(measure: Measure | Callable[[int, int], Measure], formula: Formula) -> None:
    """Check that a measure is its formula, however the weights are cut into tiles and inputs into batches.

    >>> import torch, headwise as hw
    >>> even = hw.stats.row_measure("even", lambda tile: tile.weights[..., tile.keys % 2 == 0].sum(-1))
    >>> hw.testing.check_measure(even, lambda weights, allowed, scores: weights[..., ::2].sum(-1).mean(-1))

    Args:
        measure: the measure, or `make(batch, keys)` for one that is made of the tokens of its keys.
        formula: `formula(weights, allowed, scores)` of a dense matrix [b, h, n, m] in float64 and the boolean cells of
            its mask; it returns [b, h]. No row is fully masked.
    Raises:
        CheckFailed: naming what it does not hold.
    """
    make = measure if callable(measure) and not isinstance(measure, Measure) else lambda batch, keys: measure
    first = make(2, 29)
    described = bool((type(first).__doc__ or "").strip())
    require(described, first.name, "no docstring, which reports show as its description")
    for lang in ("en", "zh"):
        words = first.words(lang)
        require(all((words.label, words.about, words.summary)), first.name, f"no label or description in {lang!r}")
    masks = Causal(), Causal() & Window(9), Everything()
    for (b, h, n, m), mask in zip(((2, 6, 17, 29), (2, 6, 29, 29), (1, 3, 70, 2 * KEY_BLOCK + 37)), masks, strict=True):
        q, k, v = vectors((b, h, n, m))
        dense = mask.to_dense(n, m).expand(b, h, n, m)
        _, weights, _ = truth(q, k, v, lambda logits, *_: logits, dense)
        scores = q.double() @ k.double().repeat_interleave(h // KV_HEADS, 1).mT / HEAD_DIM**0.5
        expected = formula(weights.detach(), dense, scores.detach())
        for kernel in ("auto", "torch_blocks", "reference"):
            one = make(b, m)
            _, amap = attend(q, k, v, mask=mask, return_map=True, measures=[one], kernel=kernel)
            given: Mapping[str, Tensor] = amap.measured or {}
            for got in (given, amap.measure(one)):
                what = f"kernel {kernel!r}, {n} queries and {m} keys in tiles of {KEY_BLOCK}"
                require_close(got[one.name], expected, first.name, what, atol=1e-5)
    if first.ahead:
        q, k, v = vectors((2, 6, 29, 29))
        ahead = attend(q, k, v, mask=Causal(), return_map=True)[1].measure(make(2, 29))[first.name]
        require(not ahead.any(), first.name, "ahead, but it is not 0 under a causal mask")
    _check_batches(make)
    _check_statistics(make)


def _check_batches(make: Callable[[int, int], Measure]) -> None:
    """States merge in any order, as one batch does; those of some heads each lie side by side."""
    q, k, v = (x.detach() for x in vectors((3, 6, 17, 29)))
    mask, one = Causal() & Window(13), make(1, 29)
    name = one.name

    def state(entries: slice, heads: slice = slice(None)) -> Any:
        kv = slice(*(end and end // 2 for end in (heads.start, heads.stop)))
        _, amap = attend(q[entries, heads], k[entries, kv], v[entries, kv], mask=mask, return_map=True)
        return amap.measure(one).states[name]

    a, b, c = (state(slice(i, i + 1)) for i in range(3))
    left, right = one.merge(one.merge(a, b), c), one.merge(a, one.merge(b, c))
    require_close(one.finish(left), one.finish(right), name, "merge depends on the order", atol=1e-6)
    if make(3, 29) is one:
        batch = state(slice(None))
        pooled = one.finish(one.merge(batch, with_tensors(batch, lambda x: x[:0])))
        require_close(one.finish(left), pooled, name, "three entries merged, against a batch of three", atol=1e-6)
    heads = side_by_side(one, [state(slice(0, 1), part) for part in (slice(0, 2), slice(2, 6))], (2, 4))
    require_close(one.finish(heads), one.finish(a), name, "heads in two parts, side by side", atol=1e-6)


def _check_statistics(make: Callable[[int, int], Measure]) -> None:
    """The statistics that it needs are joined over sets of keys as they declare."""
    b, _, n, m = SIZES
    q, k, v = (x.detach() for x in vectors(SIZES))
    rule, measure = Rule(Causal(), HEAD_DIM**-0.5, Grid(*SIZES)), make(b, m)
    for statistic in measure.needs(rule) or ():
        if statistic.joins is None or statistic.per == "key":
            continue
        result, _, _ = run(Call(q, k, v, rule, statistics=(statistic,)))
        found = Rows(q, Span(0, n), Way(rule, statistics=(statistic,)), v.shape[-1])
        for cols in (Span(19, m), Span(0, 3), Span(3, 19)):
            found.meet(k[:, :, slice(*cols)], v[:, :, slice(*cols)], cols)
        found.finish(None)
        if statistic in result.statistics and statistic in found.found:
            what = f"statistic {statistic.name!r} joined over three sets of keys by its `joins`, against one pass"
            require_close(found.found[statistic], result.statistics[statistic], measure.name, what, atol=1e-5)
