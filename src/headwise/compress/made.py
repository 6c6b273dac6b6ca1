"""The inputs of a result, stored with it, so that a repeated command recognises its finished result."""

import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from headwise.compress.source import Source
from headwise.errors import CheckpointError
from headwise.files import sha256_of
from headwise.lm.checkpoint import MODEL_FILE, read, unpack

KEY = "made_by"  # in the info of a checkpoint, and in a budget and the JSON of a plan
Made = Mapping[str, Any]


def made_by(command: str, source: Source, text: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the result of a command depends on, except the machine: plain values, as JSON returns them."""
    found: dict[str, Any] = json.loads(
        json.dumps({
            "command": command, "model": source.sha256, "text": sha256_of(text), "options": dict(options),
            "versions": {name: metadata.version(name) for name in ("headwise", "torch")},
        })
    )  # fmt: skip
    return found


def is_made(out: Path, made: Made) -> bool:
    """Whether a file, or the checkpoint in a folder, is the result of these inputs."""
    return _made_checkpoint(out / MODEL_FILE, made) if out.is_dir() else made_json(out, made)


def made_json(file: Path, made: Made) -> bool:
    """Whether a JSON file belongs to that result."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get(KEY) == made


def _made_checkpoint(file: Path, made: Made) -> bool:
    try:
        return file.is_file() and bool(unpack(read(file)[1], file)[2].get(KEY) == made)
    except CheckpointError:  # not a checkpoint
        return False
