"""A budget of caches as a JSON file: which heads keep all tokens, and which only the first and the last."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headwise.errors import CheckpointError, HeadwiseError
from headwise.files import atomic_path
from headwise.surgery.budgets import Budget

FORMAT = "headwise-budget-1"


def save_budget(found: Budget, path: str | os.PathLike[str], more: Mapping[str, Any] | None = None) -> None:
    """Write a budget, whole or not at all; `read_budget` reads it. more: what else the file is to hold, for JSON."""
    layers = [
        {"windows": list(windows), "kept": [float(x) for x in kept], "key_width": widths[0], "value_width": widths[1]}
        for windows, kept, widths in zip(found.windows, found.kept, found.widths, strict=True)
    ]
    content = {
        "format": FORMAT, "window": found.window, "sinks": found.sinks, "threshold": found.threshold,
        "tokens": found.tokens, "layers": layers, **(more or {}),
    }  # fmt: skip
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_budget(path: str | os.PathLike[str]) -> Budget:
    """A budget that `save_budget` or `headwise budget` wrote: its `caches()` go into a model.

    CheckpointError if the file is missing or is something else.
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"budget {str(file)!r} does not exist; `headwise budget --file TEXT` makes one")
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, expected {FORMAT!r}")
        layers = content["layers"]
        found = Budget(
            tuple(tuple(None if w is None else int(w) for w in layer["windows"]) for layer in layers),
            tuple(torch.tensor(layer["kept"], dtype=torch.float64) for layer in layers),
            int(content["window"]), int(content["sinks"]), float(content["threshold"]),
            tuple((int(layer["key_width"]), int(layer["value_width"])) for layer in layers), int(content["tokens"]),
        )  # fmt: skip
        found.caches()  # says what is out of range
    except HeadwiseError as error:
        raise CheckpointError(f"budget {str(file)!r} is out of range: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"budget {str(file)!r} cannot be read: {type(error).__name__}: {error}") from None
    return found
