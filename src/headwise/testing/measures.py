"""The check of measures."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from headwise.kernels import run
from headwise.kernels.call import Call
from headwise.map.attention import attend
from headwise.masks import Causal, Everything, Grid, Span, Window
from headwise.parallel.layout import Rows, Way
from headwise.rule import KEY_BLOCK, Rule
from headwise.stats import Measure
from headwise.stats.base import side_by_side, with_tensors
from headwise.testing.failed import check, require, require_close
from headwise.testing.truth import HEAD_DIM, KV_HEADS, SIZES, Formula, truth, vectors


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
    _check_words(first)
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


def _check_words(measure: Measure) -> None:
    kind = type(measure)
    require(bool((kind.__doc__ or "").strip()), measure.name, "no docstring, which reports show as its description")
    for lang in ("en", "zh"):
        words = measure.words(lang)
        require(all((words.label, words.about, words.summary)), measure.name, f"no label or description in {lang!r}")


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
