"""What runs a reader's function; and values as JSON, between it and `grade`. Nothing is unpickled.

Its source is given to `python -c`, as this folder does not exist where it runs. Standard input brings one JSON line for
the file and its limits, then one for each call; standard output returns one JSON line for each. What the code prints
goes to standard error.

>>> decoded(encoded((1, torch.ones(2))))
[1, tensor([1., 1.])]
"""

import base64
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILE_BYTES = 16 << 20  # of a file that the code may write
TOO_DEEP = "returned a value that is nested too deeply"
_DTYPES = {"float32", "float64", "int64", "int32", "bool", "complex64", "complex128"}


def encoded(value: Any) -> Any:
    """A value as JSON; tuples and ranges are lists. TypeError for other types."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return {type(value).__name__: str(value) if isinstance(value, int) else value.hex()}
    if isinstance(value, tuple | list | range):
        return [encoded(x) for x in value]
    if isinstance(value, np.ndarray | np.generic):
        value = torch.from_numpy(np.array(value))
    if not isinstance(value, Tensor):
        raise TypeError(f"returned a value of type {type(value).__name__}; expected numbers, lists or tensors")
    tensor = value.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous()
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        tensor = tensor.float() if tensor.is_floating_point() else tensor.long()
    array = tensor.numpy()
    return {"tensor": base64.b64encode(array.tobytes()).decode(), "dtype": str(array.dtype), "shape": [*array.shape]}


def decoded(value: Any) -> Any:
    """The value of such JSON. ValueError if it is not of that form."""
    if value is None or isinstance(value, bool | str):
        return value
    match value:
        case {"int": str(digits)}:
            return int(digits)
        case {"float": str(digits)}:
            return float.fromhex(digits)
        case {"tensor": str(code), "dtype": str(dtype), "shape": list(shape)} if dtype in _DTYPES:
            flat = np.frombuffer(base64.b64decode(code), np.dtype(dtype))
            return torch.from_numpy(flat.reshape([int(x) for x in shape]).copy())
        case list(parts):
            return [decoded(x) for x in parts]
    raise ValueError(f"{str(value)[:60]!r} is not an encoded value")


def serve() -> None:
    """Serve calls until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout, sys.stderr = (os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False),) * 2
    printed = sys.stderr
    task = json.loads(sys.stdin.readline())

    def reply(said: str) -> None:
        with suppress(OSError, ValueError):  # the code may have closed it
            printed.flush()
        replies.write(said + "\n")
        replies.flush()

    _imports()
    _limit(task["seconds"], task["memory"])
    reply(json.dumps({"apart": os.environ.get("HEADWISE_APART", "")}))
    names: dict[str, Any] = {"__name__": "exercise"}
    error = _tried(lambda: exec(compile(task["source"], task["file"], "exec"), names), task["file"])[1]
    if error is None and task["beside"]:
        reader, names = names, {"__name__": "inside", "file": task["file"]}
        names["reader"] = reader
        exec(compile(task["beside"], "inside.py", "exec"), names)
    function = names.get(task["function"])
    if error is None and not callable(function):
        defined = sorted(name for name, x in names.items() if callable(x) and not name.startswith("_"))
        reply(json.dumps({"defined": defined}))
    else:
        reply(json.dumps({"error": error}))
    for line in sys.stdin:
        name, args = decoded(json.loads(line))
        called = function if name is None else names[name]
        value, error = _tried(lambda called=called, args=args: called(*args), task["file"])  # type: ignore[misc]
        reply(json.dumps({"error": error}) if error else _returned(value))


def _returned(value: Any) -> str:
    """The reply with a value, or with why it cannot be one."""
    try:
        return json.dumps({"value": encoded(value)})
    except TypeError as unknown:
        error = str(unknown)
    except RecursionError:
        error = TOO_DEEP
    except MemoryError:
        error = "returned a value that is too large for the memory limit"
    return json.dumps({"error": error})


def _tried(call: Callable[[], Any], file: str) -> tuple[Any, str | None]:
    """What a call returns, and its error as one line with the line of the file at which it was raised."""
    try:
        return call(), None
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the reader's code are errors as others
        line = error.lineno if isinstance(error, SyntaxError) else None
        for frame in traceback.extract_tb(error.__traceback__):
            line = frame.lineno if frame.filename == file else line
        place = "" if line is None else f"line {line}: "
        message = error.msg if isinstance(error, SyntaxError) and error.msg else str(error)  # without the line again
        said = " ".join(message.split())[:400]
        return None, f"{place}{type(error).__name__}" + (f": {said}" if said else "")


def _imports() -> None:
    """What exercises use, and what these load when they are first called: it counts towards no limit."""
    from headwise import attend
    from headwise.masks import Causal
    from headwise.nn import STANDARD, build

    sys.modules["headwise_textbook"] = None  # type: ignore[assignment]  # it has the answers
    torch.set_num_threads(1)
    x = torch.ones(1, 2, 3, 4, requires_grad=True)
    torch.einsum("bhnd,bhmd->bhnm", x, x).sum().backward()
    build(STANDARD, 4, 2, {})(x[0])
    attend(x, x, x, mask=Causal(), return_map=True)


def _limit(seconds: float, memory: int) -> None:
    """CPU time and memory beyond what the process has used so far, and no further process or thread."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = {
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime + seconds) + 1, resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: 1,
    }  # fmt: skip
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        most[resource.RLIMIT_AS] = int(file.read().split()[0]) * resource.getpagesize() + memory
    for which, value in most.items():
        _, hard = resource.getrlimit(which)
        top = value + 2 * (which == resource.RLIMIT_CPU)  # SIGXCPU comes before SIGKILL
        top = top if hard == resource.RLIM_INFINITY else min(top, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(which, (min(value, top), top))


if __name__ == "__main__":
    serve()
