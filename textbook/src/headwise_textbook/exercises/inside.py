"""What runs in the process beside a reader's file, after it: it builds a class of the file and calls it step by step.

`reader` has the names of the file, `file` is its name. Like `child`, this file can import no other of the textbook, and
its values are numbers, texts, lists and tensors.
"""

import ast
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

reader: dict[str, Any] = globals().get("reader", {})
file: str = globals().get("file", "")
NAMES: dict[str, list[str]] = globals().get("NAMES", {})  # of arguments, as arguments.toml has them
RECORDS, NUMBERS = 200, 20_000  # tensors that are recorded in a call, and the numbers of the largest one
HIDDEN = ("print", "_shown", "__builtins__")
built: list[nn.Module] = []
arguments_given: dict[str, Any] = {}


def candidates() -> list[str]:
    """The classes of the file that are modules with a forward of their own."""
    own = [
        name for name, x in reader.items()
        if isinstance(x, type) and issubclass(x, nn.Module) and x.__module__ == "exercise" and "forward" in vars(x)
    ]  # fmt: skip
    named = [name for name in own if re.search(r"multi_?head|mha", name, re.IGNORECASE)]
    return named if len(named) == 1 else own


def build(name: str, width: int, heads: int, length: int, dropout: float, seed: int) -> list[Any]:
    """Build a class with random numbers in its parameters.

    Returns its width and heads, parameters as [name, values, kind of module], arguments of `forward` as [name,
    required], and whether it has a dropout; or the name of an argument whose meaning is not known.
    """
    kind = reader[name]
    known: dict[str, Any] = {
        **_named(width=width, heads=heads, head_width=width // heads, length=length, dropout=dropout),
        "bias": True, "qkv_bias": True,
        "batch_first": True, "causal": False, "is_causal": False, "device": None, "dtype": None,
    }  # fmt: skip
    known.update(dict.fromkeys(("config", "cfg", "args", "params"), SimpleNamespace(**known)))
    given: dict[str, Any] = {}
    for one in inspect.signature(kind).parameters.values():
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            continue
        if one.name.lower() in known:
            given[one.name] = known[one.name.lower()]
        elif one.default is one.empty:
            return [one.name]
    torch.manual_seed(seed)
    arguments_given.clear()
    arguments_given.update(given)
    module = kind(**given)
    built[:] = [module]
    arguments = [
        [one.name, one.default is one.empty] for one in inspect.signature(module.forward).parameters.values()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]  # fmt: skip
    rows = []
    with torch.no_grad():
        if any(isinstance(x, nn.parameter.UninitializedParameter) for x in module.parameters()):  # of nn.LazyLinear
            needed = [str(name) for name, required in arguments if required]
            module(**{x: None if re.search("mask|len", x.lower()) else torch.ones(2, 7, width) for x in needed})
        for path, values in module.named_parameters():
            values.normal_(0.0, 0.3)
            owner = module.get_submodule(path.rpartition(".")[0])
            linear = isinstance(owner, nn.Linear | nn.MultiheadAttention)
            rows.append([path, values.clone(), "Linear" if linear else "" if owner is module else type(owner).__name__])
    matrices = [values for _, values, _ in rows if values.ndim > 1]
    if not any(one.lower() in NAMES["width"] for one in given) and "config" not in given and matrices:
        width = matrices[0].shape[-1]
    if not any(one.lower() in NAMES["heads"] for one in given):
        kept = (getattr(module, one, None) for one in NAMES["heads"])
        heads = next((int(one) for one in kept if isinstance(one, int)), heads)
    dropouts = any(one.lower() in NAMES["dropout"] for one in given)
    return [width, heads, rows, arguments, dropouts]


def _named(**values: Any) -> dict[str, Any]:
    """The values by all names that arguments of that meaning have."""
    return {name: value for meaning, value in values.items() for name in NAMES[meaning]}


def called_with() -> str:
    """The numbers with which a class was built, as text; of a configuration those of the width and the heads."""
    given: dict[str, Any] = {}
    for name, value in arguments_given.items():
        config = isinstance(value, SimpleNamespace)
        given |= {f"{name}.{x}": getattr(value, x) for x in ("d_model", "num_heads")} if config else {name: value}
    return ", ".join(f"{name}={value}" for name, value in given.items())


def call(names: list[str], values: list[Tensor], training: bool, without_dropout: bool, seed: int) -> list[Any]:
    """Call the module. Returns its result, and each new tensor as [line, name, value, function].

    The result is the first tensor with the shape of the first input, or else the first one.
    """
    module = built[0].train(training)
    torch.manual_seed(seed)
    records: list[list[Any]] = []
    with torch.no_grad(), _recorded(records, _copied), Undropped() if without_dropout else torch.no_grad():
        found = module(**dict(zip(names, values, strict=True)))
    if isinstance(found, tuple | list):
        results = [x for x in _flat(found) if isinstance(x, Tensor)]
        found = next((x for x in results if x.shape == values[0].shape), results[0] if results else found)
    return [found, records]


def _flat(found: Any) -> Iterator[Any]:
    if isinstance(found, tuple | list):
        for one in found:
            yield from _flat(one)
    else:
        yield found


class Undropped(TorchFunctionMode):
    """No dropout, also where the code calls the function itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dropout is the identity."""
        kwargs = dict(kwargs or {})
        if func in (F.dropout, torch.dropout, torch.dropout_, F.dropout1d, F.dropout2d, F.alpha_dropout):
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs["dropout_p"] = args[:4] + args[5:], 0.0
        return func(*args, **kwargs)


def _copied(value: Tensor) -> Tensor | None:
    return value.detach().clone() if value.numel() <= NUMBERS else None


def run(source: str, pseudo: bool) -> list[Any]:
    """Run a listing in the names of those before it. pseudo: with names that a text leaves out.

    Returns the shapes of new tensors as [line, name, shape, function], what lines print or show as [line, text], and
    the error as [line, kind, message, lines of its calls], empty if there is none. Modules that the listing defines are
    called once.
    """
    records: list[list[Any]] = []
    shown: list[list[Any]] = []
    given = {**(_pseudo() if pseudo else {}), **reader}
    names = dict(given)
    names["print"] = lambda *said, **how: shown.append([sys._getframe(1).f_lineno, " ".join(map(str, said))])
    names["_shown"] = lambda line, value: shown.append([line, repr(value)]) if value is not None else None
    names["__name__"] = "exercise"
    error: list[Any] = []
    before = set(reader)
    try:
        tree = ast.parse(source)
        for line in [one for one in tree.body if isinstance(one, ast.Expr)]:
            where = ast.Constant(line.value.lineno)
            line.value = ast.Call(ast.Name("_shown", ast.Load()), [where, line.value], [])
        code = compile(ast.fix_missing_locations(tree), file, "exec")
        with _recorded(records, lambda value: list(value.shape)):
            exec(code, names)
    except Exception as raised:
        lines = [frame.lineno for frame in traceback.extract_tb(raised.__traceback__) if frame.filename == file]
        at = lines[-1] if lines else getattr(raised, "lineno", 0) or 0
        error = [at, type(raised).__name__, str(raised)[:200], lines]
    reader.update({name: x for name, x in names.items() if name not in HIDDEN and given.get(name) is not x})
    for name in [one for one in candidates() if one not in before and not records]:
        with suppress(Exception), _recorded(records, lambda value: list(value.shape)):
            width, _, _, arguments, _ = build(name, 15, 3, 32, 0.0, 0)
            if [needed for _, needed in arguments].count(True) == 1:
                built[0](torch.randn(2, 7, width))
    return [records, shown, error]


class Projection(nn.Linear):
    """What a text writes as W * X or X @ W."""

    def __mul__(self, x: Tensor) -> Tensor:
        """The projection."""
        return self(x)

    __rmul__ = __matmul__ = __rmatmul__ = __mul__


def _pseudo() -> dict[str, Any]:
    """Names that a text leaves out, with sizes that all differ."""
    sizes = {
        **dict.fromkeys(("batch_size", "batch", "B", "b", "N"), 2),
        **dict.fromkeys(("seq_len", "seq", "T", "n", "L"), 7),
        **_named(heads=3, head_width=5, width=15),
    }  # fmt: skip
    weights = {f"{w}{x}": Projection(15, 15) for w in ("W_", "W", "w_", "w") for x in "QKVOqkvo"}
    inputs = {name: torch.randn(2, 7, 15) for name in ("X", "x")}
    known = {"torch": torch, "nn": nn, "F": F, "math": math, "softmax": F.softmax, "reshape": torch.reshape,
             "sqrt": math.sqrt, "transpose": torch.transpose, "concat": torch.cat}  # fmt: skip
    return {**sizes, **weights, **inputs, **known, "self": SimpleNamespace(**sizes, **weights)}


@contextmanager
def _recorded(records: list[list[Any]], keep: Callable[[Tensor], Any]) -> Iterator[None]:
    """Note each tensor that a line of the file gives to a name, or a function returns, as `keep` has it."""
    seen: dict[int, dict[str, tuple[int, int]]] = {}

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        before = seen.setdefault(id(frame), {})
        line = before.get("", (frame.f_lineno, 0))[0]
        values = dict(frame.f_locals)
        if event == "return":
            values["return"] = arg
        for name, value in values.items():
            if isinstance(value, Tensor) and before.get(name) != (state := (id(value), value._version)):
                before[name] = state
                if event != "call" and len(records) < RECORDS and (kept := keep(value)) is not None:
                    records.append([line, name, kept, frame.f_code.co_name])
        before[""] = (frame.f_lineno, 0)
        if event == "return":
            del seen[id(frame)]
        return look

    old = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(old)
