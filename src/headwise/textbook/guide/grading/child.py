"""The process that runs a reader's function: python -m headwise.textbook.guide.grading.child

Standard input brings one JSON line for the file and its limits, then one for each call; standard output returns one
JSON line for each. What the code prints goes to standard error.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwise.textbook.guide.grading import guards


def main() -> None:
    """Serve calls until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout, sys.stderr = (os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False),) * 2

    printed = sys.stderr
    task = json.loads(sys.stdin.readline())

    def reply(**said: Any) -> None:
        replies.write(json.dumps(said) + "\n")
        replies.flush()

    def mark() -> None:
        with suppress(OSError, ValueError):  # the code may have closed it
            printed.flush()
            os.write(2, task["mark"].encode())

    folder = Path(task["folder"])
    force = guards.isolate(folder)
    _imports()
    from headwise.textbook.guide.grading.wire import UnknownValue, decoded, encoded

    os.chdir(folder)
    force += guards.limit(task["seconds"], task["memory"])
    guards.audit(folder)
    reply(force=force)

    names: dict[str, Any] = {"__name__": "exercise"}
    error = _tried(lambda: exec(compile(task["source"], task["file"], "exec"), names), task["file"])[1]
    function = names.get(task["function"])
    mark()
    if error is None and not callable(function):
        defined = sorted(name for name, x in names.items() if callable(x) and not name.startswith("_"))
        reply(missing=task["function"], defined=defined)
    else:
        reply(error=error)
    for line in sys.stdin:
        args = decoded(json.loads(line))
        value, error = _tried(lambda args=args: function(*args), task["file"])  # type: ignore[misc]
        try:
            said = {"error": error} if error else {"value": encoded(value)}
        except UnknownValue as unknown:
            said = {"error": f"returned a value of type {unknown}; expected numbers, lists or tensors"}
        except MemoryError:
            said = {"error": "returned a value that is too large for the memory limit"}
        mark()
        reply(**said)


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
    """What exercises use, and what these load when they are first called: afterwards nothing is loaded by ctypes."""
    import torch

    from headwise.attention import attend
    from headwise.masks import Causal
    from headwise.nn.named import build
    from headwise.nn.registry import STANDARD

    torch.set_num_threads(1)
    x = torch.ones(1, 2, 3, 4)
    torch.einsum("bhnd,bhmd->bhnm", x, x)
    build(STANDARD, 4, 2, {})(x[0])
    attend(x, x, x, mask=Causal(), return_map=True)


if __name__ == "__main__":
    main()
