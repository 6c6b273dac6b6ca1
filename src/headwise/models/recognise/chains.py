"""What views, functions of each number, and softmax, also where it is written out, do to a tensor that is followed."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headwise.models.frames import user_line
from headwise.models.recognise.axes import COMPLEX, indexed, keep_origin, put_together, replaced
from headwise.models.recognise.functions import scaled_dot_product_attention
from headwise.models.recognise.multiplied import multiplied, summed
from headwise.models.recognise.products import (
    NAMES as PRODUCTS,
    Layout,
    contiguous,
    interleaved,
    is_outer,
    merged,
    tiled,
    views,
    whole,
)
from headwise.models.recognise.tracked import (
    ARITHMETIC,
    DERIVED,
    INPUT,
    LAYERS,
    OTHERS,
    REARRANGED,
    REDUCTIONS,
    REPEATS,
    SAME,
    SOFTMAX,
    VIEWS,
    Followed,
    Step,
    Tracked,
)

NEGLIGIBLE = 1e-5  # added to a sum of 1 or more against a division by 0


def changed_total(x: Followed, kind: str, first: Tensor, other: Any) -> Followed | None:
    """What is known of the sum of exponentials `first`, x, after a function of it: log, or an addition of the
    exponential of a sink's logit, such as 1; None after another."""
    if kind == "log":
        return x.but(stage="lse")
    if kind != "add" or x.sink is not None or first.ndim != len(x.layout.dims) or first.shape[-1] != 1:
        return None
    shift = None  # what was added to the scores of each query, such as minus the largest; None if nothing was
    for step in x.steps:
        if step.kind == "mul" and shift is not None:
            shift = shift * step.value
        elif step.kind == "add" and isinstance(step.value, Tensor) and step.value.ndim and step.value.shape[-1] == 1:
            added = step.value.detach().double() * step.coef
            shift = added if shift is None else shift + added
    if shift is not None and isinstance(other, int | float) and abs(other) < NEGLIGIBLE:
        return x
    added = other.detach().double() if isinstance(other, Tensor) else torch.tensor(float(other), dtype=torch.double)
    if not bool((added >= 0).all()):
        return None
    column = added.log() if shift is None else added.log() - shift
    return x.but(sink=(column.expand(first.shape), x.layout))


def log_of(seen: Tracked, x: Followed, y: Followed, first: Tensor, lse: Tensor, out: Tensor) -> Followed:
    """scores − log-sum-exp, the logarithm of a softmax."""
    record = seen.record(out, x.lost or y.lost)
    if lse.ndim == first.ndim and x.product is y.product and x.steps is y.steps:
        dims = [i for i, (one, two) in enumerate(zip(first.shape, lse.shape, strict=True)) if one != two]
        factors = [factor for i in dims for factor in x.layout.dims[i]]
        record.keys, record.single = merged(sorted(factors, key=lambda one: -one[1])), not dims
    elif not record.reason:
        record.reason = "the log-sum-exp of other scores is subtracted"
    return x.but(stage="log", softmax=record, lost=y.lost, note="", sink=y.sink)


def viewed(
    seen: Tracked, func: Any, x: Followed, first: Tensor, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> None:
    """A view of x, or several."""
    outs = [out] if isinstance(out, Tensor) else list(out)
    if x.stage in ("total", "lse"):
        for tensor in outs:  # whose shape is that of sums; the result shows whether they are added where they belong
            seen.remember(tensor, x)
        return
    if x.extended:
        if (
            x.stage == "weights"
            and x.sink is not None
            and len(outs) == 1
            and outs[0].shape == (*first.shape[:-1], first.shape[-1] - 1)
            and drops(x.extended, args)
        ):
            seen.remember(outs[0], x.but(layout=x.sink[1], extended=""))
        else:
            seen.lose(x, f"the column that was joined to the scores is rearranged at {user_line()}", out)
        return
    kwargs.pop("input", None)
    found = views(func, first, args, kwargs)
    for tensor, view in zip(outs, found if len(found) == len(outs) else [None] * len(outs), strict=True):
        layout = None if view is None else x.layout.through(view)
        if layout is not None:
            seen.remember(tensor, x.but(layout=layout, outer=None))
        elif isinstance(tensor, Tensor) and x.stage == "input":
            index = [one for arg in args for one in (arg if isinstance(arg, tuple) else (arg,))]
            if not any(isinstance(one, Tensor | list) for one in index) or indexed(x, "__getitem__", args, kwargs):
                keep_origin(seen, x, tensor)
        elif isinstance(tensor, Tensor):
            seen.lose(x, f"{getattr(func, '__name__', 'a view')} at {user_line()}", tensor)


def repeated(seen: Tracked, name: str, x: Followed, first: Tensor, args: Sequence[Any], kwargs: Any, out: Any) -> None:
    """Heads of keys or values that are repeated for groups of query heads."""
    if x.stage != "input":
        pointwise(seen, name, x, first, args[0] if args else None, kwargs, out)
        return
    names = ("repeats", "dim") if name == "repeat_interleave" else ("repeats",) if name == "repeat" else ("dims",)
    given: list[Any] = [*args, *(kwargs[one] for one in names[len(args) :] if one in kwargs)]
    if name != "repeat_interleave":
        given = list(given[0]) if given and isinstance(given[0], Sequence) else given
        given = [1] * (first.ndim - len(given)) + given
    elif len(given) != 2:
        return
    if any(type(one) is not int for one in given):
        return
    (view,) = views(interleaved if name == "repeat_interleave" else tiled, first, given, {})
    layout = None if view is None else x.layout.through(view)
    layout = None if layout is None else layout.through(contiguous(tuple(out.shape)))
    if layout is None:
        keep_origin(seen, x, out)
    else:
        seen.remember(out, x.but(layout=layout, outer=None))


def pointwise(
    seen: Tracked, name: str, x: Followed, first: Tensor, other: Any, kwargs: dict[str, Any], out: Any, *,
    swapped: bool = False, args: Sequence[Any] = (),
) -> None:  # fmt: skip
    """A function of each number of x; `other` is the second argument, or the first if `swapped`."""
    if not isinstance(out, Tensor):
        seen.lose(x, f"its result goes through {name} at {user_line()}")
        return
    if x.outer is not None and name == "sum":
        dim, keepdim = (*args[1:], *(kwargs[one] for one in ("dim",) if one in kwargs), None, False)[:2]
        if dim is not None and summed(seen, x, dim, bool(kwargs.get("keepdim", keepdim)), out):
            return
    kind = kind_of(name)
    if x.stage == "input" and kind not in ("mul", "div"):
        if (x.origin is None or x.lost) and (y := seen.known(other)) is not None and y.stage == "input" and not y.lost:
            x = y  # rotated halves, to which the other part of rotary positions is added
        if name in REARRANGED and not (name == "index_select" and indexed(x, name, args[1:], kwargs)):
            return  # keys in another order, or other keys, than their tokens
        if out.shape == first.shape and name != "index_select":
            seen.remember(out, x if x.factor == 1 and x.outer is None else x.but(factor=1.0, outer=None))
        else:
            keep_origin(seen, x, out, None if name not in COMPLEX else COMPLEX[name](x))
        return
    if x.stage == "exp" and kind == "sum" and (out.numel() < first.numel() or first.shape[-1] == 1):
        seen.remember(out, x.but(stage="total"))
        return
    if x.stage == "scores" and kind == "logsumexp":
        seen.remember(out, x.but(stage="lse"))
        return
    if x.stage == "total" and (changed := changed_total(x, kind, first, other)) is not None:
        seen.remember(out, changed)
        return
    larger = out.shape != first.shape
    if (x.stage == "input" or (x.stage == "weights" and larger)) and is_outer(kind, first, other, out):
        if x.stage == "weights":
            seen.lose(x, f"its result goes through {name} at {user_line()}")
        like = INPUT.but(layout=whole(tuple(out.shape))) if larger else x.but(factor=1.0)
        if larger and x.stage == "input" and x.origin is not None:
            like = replaced(x, out, None)
        seen.remember(out, like.but(outer=(other, first) if swapped else (first, other)))
        return
    if out.shape != first.shape:
        if x.stage in ("scores", "exp") and kind in ARITHMETIC.values() and out.numel() > first.numel():
            seen.lose(x, f"scores are broadcast by {name} at {user_line()}", out)
        elif x.softmax is not None and kind not in REDUCTIONS:
            seen.lose(x, f"its result goes through {name} at {user_line()}")
        return
    if x.stage == "input":
        factor = _factor(x.factor, kind, other, swapped)
        seen.remember(out, x.but(factor=factor, outer=None))
        return
    step = None if x.stage != "scores" else steps_of(kind, x.layout, other, kwargs, args, swapped)
    if step is not None:
        changed = x.but(steps=(*x.steps, *step), factor=_factor(x.factor, kind, other, swapped))
    elif x.stage == "scores" and kind == "exp":
        changed = x.but(stage="exp")
    elif x.stage == "scores" and kind == "sub" and not swapped and (y := seen.known(other)) and y.stage == "lse":
        changed = log_of(seen, x, y, first, other, out)
    elif x.stage == "log" and kind == "exp":
        changed = x.but(stage="weights")
    elif x.stage == "exp" and kind == "div" and (y := seen.known(other)) is not None and y.stage == "total":
        changed = x.but(softmax=seen.record(out, y.lost), lost=y.lost, note="", sink=y.sink)
    elif x.stage == "scores" and kind in OTHERS:
        changed = x.but(stage="other", note=kind)
    elif x.stage in ("weights", "exp") and kind in ("dropout", "feature_dropout"):
        changed = x.but(dropout_p=dropout_of(x.dropout_p, args, kwargs))
    elif x.stage == "weights" and kind == "nan_to_num" and kwargs.get("nan", other) in (None, 0):
        changed = x  # of fully masked queries, whose weights are 0; weights have no infinity
    elif x.stage in ("weights", "exp", "log"):
        changed = x.but(note=x.note or f"{name} at {user_line()}")
    elif x.stage == "other":
        changed = x
    elif x.stage == "total":
        changed = x.but(lost=x.lost or f"{name} of the sum of the exponentials at {user_line()}")
    elif kind in ("dropout", "feature_dropout"):
        active = dropout_of(0.0, args, kwargs) > 0
        changed = x.but(lost=x.lost or f"dropout of scores at {user_line()}") if active else x
    else:
        changed = x.but(lost=x.lost or f"{name} of scores at {user_line()}")
    seen.remember(out, changed)


@lru_cache(maxsize=1024)
def kind_of(name: str) -> str:
    """The name of a function without what says that it changes its argument; one of `ARITHMETIC` by its kind."""
    plain = name.rstrip("_") if not name.startswith("__") else name
    if name.startswith("__i"):
        plain = "__" + name[3:]
    return ARITHMETIC.get(plain, plain)


def _factor(before: float, kind: str, other: Any, swapped: bool) -> float:
    """The number by which a tensor was multiplied, after another function; 1 after any but a multiplication."""
    if kind not in ("mul", "div") or swapped:
        return 1.0
    if isinstance(other, Tensor) and other.ndim == 0 and other.device.type == "cpu":
        other = float(other)
    if not isinstance(other, int | float) or not other:
        return 1.0
    return before * (other if kind == "mul" else 1 / other)


def chosen(seen: Tracked, args: Sequence[Any], out: Any) -> None:
    """torch.where(condition, scores, value) or (condition, value, scores)."""
    condition, one, two = args
    if isinstance(one, Tensor) and seen.known(condition) is not None:  # Tensor.where(condition, other)
        condition, one = one, condition
    for x, tensor, value, flip in ((seen.known(one), one, two, True), (seen.known(two), two, one, False)):
        if x is None or not isinstance(out, Tensor):
            continue
        if out.shape != tensor.shape:
            seen.lose(x, f"scores are broadcast by where at {user_line()}", out)
        elif x.stage == "input":
            seen.remember(out, x.but(factor=1.0, outer=None))
        elif x.stage == "scores" and (number := one_number(value)) is not None:
            hidden = ~condition.bool() if flip else condition.bool()
            seen.remember(out, x.but(steps=(*x.steps, Step("fill", hidden, x.layout, number))))
        elif x.stage == "scores":
            seen.remember(out, x.but(lost=x.lost or f"where at {user_line()}"))
        else:
            seen.remember(out, x.but(note=x.note or f"where at {user_line()}"))
        return


def written(seen: Tracked, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """first[index] = value."""
    first, index, value = args
    x = seen.known(first)
    if x is None or (x.stage == "input" and x.lost):
        if (y := seen.known(value)) is not None and y.stage == "input":
            keep_origin(seen, y, first)  # keys are written into a cache
        return
    number = one_number(value)
    if x.stage == "input":
        changed = x.but(factor=1.0, outer=None)
    elif x.stage == "scores" and number is not None:
        hidden = torch.zeros(first.shape, dtype=torch.bool, device=first.device)
        hidden[index] = True
        changed = x.but(steps=(*x.steps, Step("fill", hidden, x.layout, number)))
    elif x.stage == "scores":
        changed = x.but(lost=x.lost or f"numbers are written into the scores at {user_line()}")
    else:
        changed = x.but(note=x.note or f"an assignment at {user_line()}")
    seen.remember(first, changed)


def one_number(value: Any) -> float | None:
    """The number that a value is, or that all numbers of a tensor are."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() == 1:
        return float(value)
    least, most = value.detach().aminmax()
    return float(least) if bool(least == most) else None


def joined(seen: Tracked, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> None:
    """A column joined to the scores at either end, as learned sinks are; or parts of inputs."""
    tensors = args[0] if args else kwargs.get("tensors", ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    put_together(seen, name == "stack", tensors, dim, out)
    if name == "stack":
        return
    for i, tensor in enumerate(tensors):
        x = seen.known(tensor)
        if x is not None and x.stage == "scores" and dim in (-1, out.ndim - 1):
            column = tensors[1 - i] if len(tensors) == 2 else None
            if column is not None and column.shape[-1] == 1 and seen.known(column) is not x and x.sink is None:
                place = "last" if i == 0 else "first"
                seen.remember(out, x.but(sink=(column.clone(), x.layout), extended=place))
            else:
                seen.remember(out, x.but(lost=x.lost or f"scores are joined with others at {user_line()}"))
            return


def softmaxed(
    seen: Tracked, name: str, x: Followed | None, first: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor
) -> None:
    """softmax or log_softmax; x is None for an input that is not followed."""
    stage: Any = "log" if "log" in name else "weights"
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if x is None or x.stage != "scores" or x.product is None:
        if x is not None and x.stage == "input" and x.origin is not None and not x.lost:
            what = f"softmax of the output of a layer ({x.origin.made_by}), as in a classifier, router or gate"
        else:
            what = "softmax of what is not a product of queries and keys, as in additive attention"
            if isinstance(dim, int) and out.shape[dim] == 1:
                what = "softmax of single numbers, which is always 1"
        record = seen.record(out, what)
        seen.remember(out, INPUT.but(stage=stage, layout=whole(tuple(out.shape)), softmax=record, lost=what))
        return
    record = seen.record(out, like=x.product.modules)
    if x.lost:
        record.reason = x.lost
    elif not isinstance(dim, int):
        record.reason = "softmax without dim"
    elif x.extended and dim not in (-1, out.ndim - 1):
        record.reason = "softmax along another dimension than that of the joined column"
    else:
        factors = x.layout.dims[dim]
        record.keys = merged(sorted(factors, key=lambda factor: -factor[1]))
        record.single = out.shape[dim] == 1
    seen.remember(out, x.but(stage=stage, softmax=record, note=""))


def steps_of(
    kind: str, here: Layout, other: Any, kwargs: dict[str, Any], args: Sequence[Any], swapped: bool
) -> tuple[Step, ...] | None:  # fmt: skip
    """What a function does to scores, as steps; None if it is none that is known."""
    number, tensor = isinstance(other, int | float), isinstance(other, Tensor)
    if kind == "tanh":
        return (Step("tanh", None, here),)
    if kind == "neg":
        return (Step("mul", -1.0, here),)
    if kind == "masked_fill":
        value = args[2] if len(args) > 2 else kwargs.get("value")
        return (Step("fill", other, here, float(value)),) if tensor and value is not None else None
    if kind in ("mul", "div") and (number or tensor):
        if number:
            return (Step("mul", float(other if kind == "mul" else 1 / other), here),) if other else None
        if kind == "div" and swapped:
            return None
        if kind == "div":
            # By a root, as a tensor of another dtype than the scores: its reciprocal would be rounded in it.
            other = (other if other.ndim or other.requires_grad else other.double()).reciprocal()
        return (Step("times", other, here),)
    if kind in ("add", "sub", "rsub") and (number or tensor):
        alpha = float(kwargs.get("alpha", 1.0)) * (1.0 if kind == "add" else -1.0)
        if (kind == "sub" and swapped) or (kind == "rsub" and not swapped):
            return Step("mul", -1.0, here), Step("add", other, here)
        return (Step("add", other, here, alpha),) if tensor else ()
    return None


def drops(place: str, args: Sequence[Any]) -> bool:
    """Whether an index that leaves out one of the last axis is all but the "first" or the "last"."""
    if len(args) > 2 and all(isinstance(x, int) for x in args[:3]):  # aten.slice(x, dim, start, end)
        return bool(args[1] == (place == "first"))
    index = args[0] if args else None
    last = index[-1] if isinstance(index, tuple) else index
    if not isinstance(last, slice) or last.step not in (None, 1):
        return False
    return last.start == 1 and last.stop is None if place == "first" else last.start in (None, 0) and last.stop == -1


def dropout_of(before: float, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """The probability that a number was dropped, after another call of dropout."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    active = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return 1 - (1 - before) * (1 - float(p)) if active else before


def see(seen: Tracked, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Take note of one call."""
    take = _OF_SEVERAL.get(name)
    if take is not None:
        take(seen, name, args, kwargs, out)
        return
    first: Any = args[0] if args else kwargs.get("input")
    kind = kind_of(name)
    if kind not in _ASKING and seen.passed_on(first, out):
        return
    x = seen.known(first)
    if name == "where" and len(args) == 3:
        chosen(seen, args, out)
    elif x is None:
        if name in DERIVED:
            seen.derive(first, out)
            return
        if len(args) > 1 and kind not in _ASKING and seen.passed_on(args[1], out):
            return
        if len(args) > 1 and (y := seen.known(args[1])) is not None and isinstance(out, Tensor):
            pointwise(seen, name, y, args[1], first, kwargs, out, swapped=True)
        elif name in SOFTMAX and out.ndim > 1:
            softmaxed(seen, name, None, first, args, kwargs, out)
        elif ARITHMETIC.get(name) == "mul" and len(args) > 1 and is_outer("mul", first, args[1], out):
            seen.remember(out, INPUT.but(layout=whole(tuple(out.shape)), outer=(first, args[1])))
    elif name in VIEWS:
        viewed(seen, func, x, first, args[1:], kwargs, out)
    elif name in REPEATS:
        repeated(seen, name, x, first, args[1:], kwargs, out)
    elif name in SAME:
        seen.remember(out, x)
    elif name in SOFTMAX:
        softmaxed(seen, name, x, first, args, kwargs, out)
    else:
        other = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("mask"))
        pointwise(seen, name, x, first, other, kwargs, out, args=args)


# Those that do more with an input than a function of each number.
_ASKING = VIEWS | REPEATS | SOFTMAX | {"mul", "div", "where"}
# What takes note of functions of more than one tensor that is followed.
_OF_SEVERAL: dict[str, Callable[[Tracked, str, Sequence[Any], dict[str, Any], Any], None]] = {
    **dict.fromkeys(PRODUCTS, multiplied),
    **dict.fromkeys(LAYERS, lambda seen, name, args, kwargs, out: seen.remember_layer(name, (*args, None)[0], out)),
    "scaled_dot_product_attention": lambda seen, name, *call: scaled_dot_product_attention(seen, *call),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), joined),
    "__setitem__": written,
}
