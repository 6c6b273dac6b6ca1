"""A budget of caches as a JSON file: heads that cache all tokens, and heads that cache only the first and last ones."""

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from headwise.contents import Entry, number, parsed, reading, text_of, whole
from headwise.edit.budgets import Budget
from headwise.errors import CheckpointError
from headwise.files import write_text
from headwise.wording import Bilingual

FORMAT = "headwise-budget-1"
WHAT = Bilingual("budget", "预算")
MAKES_ONE = Bilingual("`headwise budget --file TEXT` makes one", "`headwise budget --file 文本` 可制作一个")


def save_budget(found: Budget, path: str | os.PathLike[str], more: Mapping[str, Any] | None = None) -> None:
    """Write a budget atomically; `read_budget` reads it. more: further entries of the file, as JSON values."""
    layers = [
        {"windows": list(windows), "kept": [float(x) for x in kept], "key_width": widths[0], "value_width": widths[1]}
        for windows, kept, widths in zip(found.windows, found.kept, found.widths, strict=True)
    ]
    content = {
        "format": FORMAT, "window": found.window, "sinks": found.sinks, "threshold": found.threshold,
        "tokens": found.tokens, "layers": layers, **(more or {}),
    }  # fmt: skip
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_budget(path: str | os.PathLike[str]) -> Budget:
    """Read a budget written by `save_budget` or `headwise budget`; pass its `caches()` to a model.

    CheckpointError if the file is missing or is not a budget.
    """
    with reading(path, WHAT, missing=MAKES_ONE):
        content = Entry(parsed(text_of(path)))
        if content.word("format") != FORMAT:
            raise CheckpointError(
                f"expected the format {FORMAT}, got {content.word('format')!r}",
                f"格式应为 {FORMAT}，实际是 {content.word('format')!r}",
            )
        layers = content.entries("layers")
        found = Budget(
            tuple(tuple(layer.each("windows", _window)) for layer in layers),
            tuple(torch.tensor(layer.each("kept", number), dtype=torch.float64) for layer in layers),
            content.whole("window", least=1), content.whole("sinks", least=0), content.number("threshold"),
            tuple((layer.whole("key_width", least=1), layer.whole("value_width", least=1)) for layer in layers),
            content.whole("tokens", least=0),
        )  # fmt: skip
        for i, (windows, kept) in enumerate(zip(found.windows, found.kept, strict=True)):
            if not windows or len(kept) == 0 or len(kept) % len(windows):
                raise CheckpointError(f"layers[{i}]: {len(kept)} heads are not a multiple of {len(windows)} KV heads")
        found.caches()  # reports other values out of range
        return found


def _window(value: Any, at: str) -> int | None:
    return None if value is None else whole(value, at, least=1)
