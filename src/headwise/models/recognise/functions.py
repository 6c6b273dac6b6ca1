"""PyTorch's functions by what they do to tensors that are followed, and their arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from headwise.models.recognise.followed import Step
from headwise.models.recognise.layout import Layout

VIEWS = frozenset({
    "view", "reshape", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint",
    "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "reshape_as", "flatten", "unflatten", "unbind", "chunk",
    "split", "split_with_sizes", "tensor_split", "select", "narrow", "__getitem__", "broadcast_to", "T", "mT", "H",
    "mH", "slice", "_unsafe_view",
})  # fmt: skip
REPEATS = frozenset({"repeat_interleave", "repeat", "tile"})
SAME = frozenset({
    "contiguous", "clone", "detach", "float", "double", "half", "bfloat16", "to", "type", "type_as", "cpu", "cuda",
    "data", "requires_grad_", "alias", "_to_copy",
})  # fmt: skip
DERIVED = VIEWS | SAME | {"layer_norm", "rms_norm", "dropout"}  # of the same tokens
REARRANGED = frozenset({"roll", "flip", "gather", "take_along_dim", "index_select", "sort", "fliplr", "flipud"})
OTHERS = frozenset({"sigmoid", "relu", "softplus", "elu", "gelu", "silu", "square", "pow", "gumbel_softmax"})
ARITHMETIC = {
    "mul": "mul", "multiply": "mul", "__mul__": "mul", "__rmul__": "mul", "div": "div", "divide": "div",
    "true_divide": "div", "__truediv__": "div", "add": "add", "__add__": "add", "__radd__": "add", "sub": "sub",
    "subtract": "sub", "__sub__": "sub", "__rsub__": "rsub", "rsub": "rsub", "neg": "neg",
}  # fmt: skip
LAYERS = {"linear": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}
SOFTMAX = frozenset({
    "softmax", "log_softmax", "special_softmax", "special_log_softmax", "_softmax", "_log_softmax",
})  # fmt: skip
RETURN_OTHERS = VIEWS | {"topk", "sort", "kthvalue", "__setitem__"}  # something else than one tensor
OPAQUE = frozenset({"_native_multi_head_attention", "_transformer_encoder_layer_fwd"})  # PyTorch's
IGNORED = frozenset({
    "dim", "size", "numel", "is_floating_point", "stride", "__set__", "__len__", "zeros_like", "ones_like",
    "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty",
})  # fmt: skip
REDUCTIONS = frozenset({"sum", "mean", "max", "min", "amax", "amin", "std", "var", "norm", "any", "all", "argmax"})


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


def turns_nan_into_0(kind: str, other: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether it is nan_to_num with 0 for NaN; weights have no infinity. other: its second argument."""
    nan = kwargs.get("nan", other)
    return kind == "nan_to_num" and (nan is None or (isinstance(nan, int | float) and nan == 0))


def dropout_of(before: float, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """The probability that a number was dropped, after another call of dropout."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    active = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return 1 - (1 - before) * (1 - float(p)) if active else before


def opaque(name: str) -> bool:
    """Whether the operator of this name computes a whole attention, unless it is one that is followed."""
    return ("attention" in name or "attn" in name) and name != "scaled_dot_product_attention"
