"""Writers of the numbers of each step: JSON lines, TensorBoard, Weights & Biases."""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from headwise.errors import ConfigError, warn
from headwise.telemetry.ledger import NONFINITE, Summary


class Writer(Protocol):
    """The interface of writers, for `record.write_to`."""

    target: str  # where it writes, for messages

    def write(self, summary: Summary) -> None:
        """Write a step. The first exception is reported as a warning; training continues."""

    def close(self) -> None:
        """Release resources."""


class JSONLines:
    """Append one line of JSON per step, `Summary.to_dict()`, to a file.

    A line is written whole or not at all: by one call, and a partial line on a full disk is removed again, so that the
    file can be read at any time and after any crash. The file is opened for each line, and may be moved in between.

    Args:
        path: of the file; its folder is created if it is missing.
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
        folder: for the events; or a `SummaryWriter`, which is then not closed.
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
    """A curve for each measure, layer and head in Weights & Biases, in the current run or the given one.

    Steps are a curve of their own, `headwise/step`, since the step count of a run belongs to the trainer.

    Raises:
        ConfigError: if wandb is not installed, or there is no run.
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
    """measure/layer/head → number, without heads that did not run and without counts of 0."""
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
    """The writers of a record. A failure is reported once per writer; it is called again at the next step."""

    def __init__(self) -> None:
        self._writers: list[Writer] = []
        self._reported: set[int] = set()

    def add(self, writer: Writer) -> None:
        """Add a writer."""
        if not callable(getattr(writer, "write", None)):
            raise ConfigError(f"write_to: expected a writer such as JSONLines(path), got {type(writer).__name__}")
        self._writers.append(writer)

    def write(self, summary: Summary) -> None:
        """Write a step to all of them."""
        for i, writer in enumerate(self._writers):
            try:
                writer.write(summary)
            except Exception as error:  # no failure of a writer may end a training run
                if i not in self._reported:
                    self._reported.add(i)
                    target = getattr(writer, "target", type(writer).__name__)
                    warn(
                        f"step {summary.step} could not be written to {target}: {type(error).__name__}: {error}. The "
                        f"run continues; later failures of this writer are not reported",
                        RuntimeWarning,
                    )


def _library(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"this needs {package}: pip install {package} ({error})") from None
