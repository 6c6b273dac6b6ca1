"""Where the numbers of each step go. A writer has a `target`, `write(summary)` and `close()`; that is all of it."""

import json
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from headwise.errors import ConfigError
from headwise.telemetry.summary import NONFINITE, Summary


class Writer(Protocol):
    """What `record.write_to` takes."""

    target: str  # what is written to, for messages

    def write(self, summary: Summary) -> None:
        """Take in a step. What it raises is told once as a warning; training goes on."""

    def close(self) -> None:
        """Write no more."""


class JSONLines:
    """One line of JSON a step, `Summary.to_dict()`, appended to a file.

    A line is there whole or not at all: it is written by one call, and what a full disk has left of it is taken away
    again, so that the file can be read at any moment and after any crash. The file is opened for each line: it may be
    moved away meanwhile.

    Args:
        path: of the file; its folder is made if it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self.target = str(self._path)

    def write(self, summary: Summary) -> None:
        """As in `Writer`."""
        line = json.dumps(summary.to_dict(), allow_nan=False).encode() + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(line):
                    written += file.write(line[written:])
            except BaseException:
                if written:
                    file.truncate(before)
                raise

    def close(self) -> None:
        """As in `Writer`."""


class TensorBoard:
    """A curve for each measure, layer and head in TensorBoard: `max_logit/blocks.0.attention/3`.

    Args:
        folder: for the events; or a `SummaryWriter` of yours, which is then not closed.
    Raises:
        ConfigError: if tensorboard is not installed.
    """

    def __init__(self, folder: Any) -> None:
        self._own = isinstance(folder, str | os.PathLike)
        if self._own:
            self.target = f"TensorBoard in {os.fspath(folder)}"
            writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter
            self._writer: Any = writer(os.fspath(folder))
        else:
            self.target, self._writer = "TensorBoard", folder

    def write(self, summary: Summary) -> None:
        """As in `Writer`."""
        for name, value in scalars(summary).items():
            self._writer.add_scalar(name, value, summary.step)
        self._writer.flush()

    def close(self) -> None:
        """As in `Writer`."""
        if self._own:
            self._writer.close()


class WeightsAndBiases:
    """A curve for each measure, layer and head in Weights & Biases, in the run that is under way or one of yours.

    The steps are a curve of their own, `headwise/step`: a run has one count of steps, which is the trainer's.

    Raises:
        ConfigError: if wandb is not installed, or no run has begun.
    """

    def __init__(self, run: Any = None) -> None:
        self._run = _library("wandb", "wandb").run if run is None else run
        if self._run is None:
            raise ConfigError("WeightsAndBiases(): no run has begun; call wandb.init(…) first, or give the run")
        self.target = f"the run {getattr(self._run, 'name', '') or ''} of Weights & Biases"

    def write(self, summary: Summary) -> None:
        """As in `Writer`."""
        self._run.log({**scalars(summary), "headwise/step": summary.step})

    def close(self) -> None:
        """As in `Writer`."""


def scalars(summary: Summary) -> dict[str, float]:
    """Every number under a name of its own, measure/layer/head; those of heads that did not run are left out, and so
    are counts of 0."""
    found = {}
    for i, (layer, head) in enumerate(summary.places):
        for name, value in zip(summary.names, summary.numbers[i].tolist(), strict=True):
            if value == value:
                found[f"{name}/{layer}/{head}"] = value
        for name, value in zip(NONFINITE, summary.nonfinite[i].tolist(), strict=True):
            if value:
                found[f"nonfinite_{name}/{layer}/{head}"] = value
    return found


class Writers:
    """The writers of a record; one that fails is told of once, and asked again at the next step."""

    def __init__(self) -> None:
        self._writers: list[Writer] = []
        self._told: set[int] = set()

    def add(self, writer: Writer) -> None:
        """One more."""
        if not callable(getattr(writer, "write", None)):
            raise ConfigError(f"write_to: expected a writer such as JSONLines(path), got {type(writer).__name__}")
        self._writers.append(writer)

    def write(self, summary: Summary) -> None:
        """Give a step to all of them."""
        for i, writer in enumerate(self._writers):
            try:
                writer.write(summary)
            except Exception as error:  # whatever it is, it is no reason to end a training run
                if i not in self._told:
                    self._told.add(i)
                    target = getattr(writer, "target", type(writer).__name__)
                    warnings.warn(
                        f"step {summary.step} could not be written to {target}: {type(error).__name__}: {error}. The "
                        f"run goes on; later failures of this writer are not told",
                        RuntimeWarning, stacklevel=2,
                    )  # fmt: skip


def _library(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"this needs {package}: pip install {package} ({error})") from None
