"""What is told of each step: alarms, reported once when they begin, and writers of the numbers."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from math import inf, isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, HeadwiseError, warn
from headwise.kernels.graph import has_no_numbers, plain
from headwise.models.recognise.tracked import UNEXPECTED
from headwise.nn.owned import local
from headwise.telemetry.ledger import NONFINITE, Summary

Then = Literal["warn", "raise"] | Callable[["Finding"], Any]


class AttentionWarning(UserWarning):
    """Issued by an alarm with then="warn"."""


class AttentionAlarm(HeadwiseError):
    """Raised by an alarm with then="raise", through the model's forward or `Record.step`."""


@dataclass(frozen=True)
class Finding:
    """The heads for which an alarm has begun in one step.

    Attributes:
        alarm: the alarm. summary: all numbers of the step.
        heads: (layer, head) of each; () if the alarm has begun for the result of the model alone.
        message: the same in words, with the numbers.
        origin: of a `NonFiniteAlarm`, the qualified names of the parameters of the model that are NaN or infinite, then
            of such buffers, in the order of registration.
    """

    alarm: "Alarm"
    summary: Summary
    heads: tuple[tuple[str, int], ...]
    message: str
    origin: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.message


class Alarm(ABC):
    """A condition that is checked in every measured step.

    A head is reported when the alarm goes off for it, and again only after it has recovered by a margin: a value that
    fluctuates around the threshold gives one message.

    Args:
        then: "warn" (an `AttentionWarning`), "raise" (an `AttentionAlarm`), or a function of the `Finding`.
    Attributes:
        needs: the measures that it reads; `watch` adds those that are missing.
        results: whether it goes off for NaN in the result of the model too (`Summary.nonfinite_result`).
    """

    needs: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[bool] = False

    def __init__(self, then: Then = "warn") -> None:
        if then not in ("warn", "raise") and not callable(then):
            raise ConfigError(f"{type(self).__name__}(then={then!r}): expected 'warn', 'raise' or a function")
        self.then = then

    @abstractmethod
    def off(self, summary: Summary) -> Tensor:
        """Whether the alarm goes off for each row of the summary, boolean [rows]."""

    @abstractmethod
    def well(self, summary: Summary) -> Tensor:
        """Whether each row has recovered by the margin, boolean [rows]."""

    @abstractmethod
    def says(self, summary: Summary, row: int) -> str:
        """The message for the head of that row."""

    def cause(self, summary: Summary, model: nn.Module) -> tuple[tuple[str, ...], str]:
        """`Finding.origin`, and the beginning of the message, ""  if there is none; called when the alarm begins."""
        return (), ""


class _Limited(Alarm):
    """A measure of a head is beyond a limit, or under it; it has recovered within it by the margin."""

    by: ClassVar[str]  # the attribute with the limit
    over: ClassVar[bool] = True
    words: ClassVar[str]  # the message, with the value and the limit
    margin: float

    def off(self, summary: Summary) -> Tensor:
        value, limit = summary.column(self.needs[0]), getattr(self, self.by)
        return value > limit if self.over else value < limit

    def well(self, summary: Summary) -> Tensor:
        value, limit = summary.column(self.needs[0]), getattr(self, self.by)
        return value < self.margin * limit if self.over else value > limit / self.margin

    def says(self, summary: Summary, row: int) -> str:
        return self.words.format(value=summary.column(self.needs[0])[row], limit=getattr(self, self.by))


class MaxLogitAlarm(_Limited):
    """The largest logit of a head is over `limit`: training may become unstable (Kimi K2, 2507.20534, clips at 100).

    It has recovered under `margin · limit`.
    """

    needs, by = ("max_logit",), "limit"
    words = "max logit {value:.4g}, over {limit:g}"

    def __init__(self, limit: float = 100.0, *, margin: float = 0.9, then: Then = "warn") -> None:
        super().__init__(then)
        self.limit, self.margin = _positive(self, "limit", limit), _share(self, "margin", margin)


class EntropyAlarm(_Limited):
    """The mean entropy of a head's rows is under `floor` nats: entropy collapse (Zhai et al. 2023, 2303.06296).

    It has recovered over `floor / margin`.
    """

    needs, by, over = ("entropy",), "floor", False
    words = "entropy {value:.4g} nats, under {limit:g}"

    def __init__(self, floor: float = 0.1, *, margin: float = 0.9, then: Then = "warn") -> None:
        super().__init__(then)
        self.floor, self.margin = _positive(self, "floor", floor), _share(self, "margin", margin)


class SinkAlarm(_Limited):
    """The first key has more than `share` of a head's weight: the head has collapsed onto the attention sink."""

    needs, by = ("sink_mass",), "share"
    words = "{value:.1%} of its weight on the first key, over {limit:.1%}"

    def __init__(self, share: float = 0.95, *, margin: float = 0.9, then: Then = "warn") -> None:
        super().__init__(then)
        self.share, self.margin = _share(self, "share", share), _share(self, "margin", margin)


class DeadHeadAlarm(Alarm):
    """A head without information: its rows are uniform over the visible keys (entropy over `constant` of its maximum),
    or have no mass, more than `taken` of it being in a learned sink."""

    needs = ("normalized_entropy", "learned_sink_mass")

    def __init__(
        self, constant: float = 0.9999, *, taken: float = 0.99, margin: float = 0.99, then: Then = "warn"
    ) -> None:
        super().__init__(then)
        self.constant, self.taken = _share(self, "constant", constant), _share(self, "taken", taken)
        self.margin = _share(self, "margin", margin)

    def off(self, summary: Summary) -> Tensor:
        constant, taken = self._values(summary)
        return (constant > self.constant) | (taken > self.taken)

    def well(self, summary: Summary) -> Tensor:
        constant, taken = self._values(summary)
        return (constant < self.margin * self.constant) & (taken < self.margin * self.taken)

    def says(self, summary: Summary, row: int) -> str:
        constant, taken = (float(values[row]) for values in self._values(summary))
        if taken > self.taken:
            return f"no mass: {taken:.1%} of it in the learned sink"
        return f"constant: entropy at {constant:.2%} of its maximum"

    def _values(self, summary: Summary) -> tuple[Tensor, Tensor]:
        return summary.column("normalized_entropy"), summary.column("learned_sink_mass")


class NonFiniteAlarm(Alarm):
    """NaN or infinity in the scores, queries, keys or values of a head, or NaN or +infinity in the result of the model.

    The message begins with what has made them: parameters and buffers that are NaN or infinite themselves, whose
    modules need not be those in which it shows. They are searched when the alarm begins.
    """

    results = True

    def off(self, summary: Summary) -> Tensor:
        return summary.nonfinite.sum(-1) > 0

    def well(self, summary: Summary) -> Tensor:
        ran = ~summary.numbers.isnan().all(-1)
        return (summary.nonfinite.sum(-1) == 0) & ran

    def says(self, summary: Summary, row: int) -> str:
        rows, *entries = summary.nonfinite[row].long().tolist()
        found = [f"{name} ({count})" for name, count in zip(NONFINITE[1:], entries, strict=True) if count]
        return f"NaN or infinity in {' and '.join(found) if found else f'the scores of {rows} queries'}"

    @torch.no_grad()
    def cause(self, summary: Summary, model: nn.Module) -> tuple[tuple[str, ...], str]:
        learned = [name for name, x in model.named_parameters() if _has_nonfinite(x, masks=False)]
        origin = (*learned, *(name for name, x in model.named_buffers() if _has_nonfinite(x, masks=True)))
        more = f" and {len(origin) - MOST} more" if len(origin) > MOST else ""
        found = [f"NaN or infinity in {', '.join(origin[:MOST])}{more}"] if origin else []
        if not learned and (begun := _begun(summary)):  # a buffer may have received them, as that of a batch norm
            found.append(f"{'they' if origin else 'NaN or infinity'} began {begun}")
            found += [] if origin else ["no parameter or buffer was found that has any"]
        return origin, "; ".join(found)


MOST = 4  # heads, and parameters, that a message names
RESULT = ("the result of the model", -1)  # a place beside those of heads


class Alarms:
    """Alarms, and the heads that each has reported."""

    def __init__(self, alarms: Iterable[Alarm]) -> None:
        self._alarms: list[tuple[Alarm, set[tuple[str, int]]]] = []
        self.add(alarms)

    def add(self, alarms: Iterable[Alarm]) -> None:
        """Add alarms."""
        self._alarms += [(alarm, set()) for alarm in alarms]

    @property
    def of_results(self) -> bool:
        """Whether one of them is also about the results of the model."""
        return any(alarm.results for alarm, _ in self._alarms)

    def check(self, summary: Summary, model: nn.Module) -> None:
        """Check all alarms, and report the heads for which one has begun; then raise the first error."""
        raised = None
        for alarm, reported in self._alarms:
            spoiled = alarm.results and summary.nonfinite_result
            reported -= {summary.places[i] for i in _rows(alarm.well(summary))} | ({RESULT} if not spoiled else set())
            new = [i for i in _rows(alarm.off(summary)) if summary.places[i] not in reported]
            if not new and (not spoiled or RESULT in reported):
                continue
            reported |= {summary.places[i] for i in new} | ({RESULT} if spoiled else set())
            heads = tuple(summary.places[i] for i in new)
            origin, cause = alarm.cause(summary, model)
            messages = [cause] if cause else []
            for row, (layer, head) in zip(new[:MOST], heads, strict=False):
                messages.append(f"{layer or 'the model'} head {head}: {alarm.says(summary, row)}")
            if len(new) > MOST:
                messages.append(f"and {len(new) - MOST} more heads")
            if spoiled:
                messages.append("NaN or infinity in the result of the model")
            finding = Finding(alarm, summary, heads, f"step {summary.step}: {'; '.join(messages)}", origin)
            if alarm.then == "warn":
                warn(finding.message, AttentionWarning)
            elif alarm.then == "raise":
                raised = raised or AttentionAlarm(finding.message)
            else:
                alarm.then(finding)
        if raised is not None:
            raise raised


def _rows(which: Tensor) -> list[int]:
    return which.nonzero().flatten().tolist()


def _begun(summary: Summary) -> str:
    """Where NaN and infinity began, as far as the attention of the layers shows it; "" if in the scores of one."""
    layers, bad = summary.layers, _rows(summary.nonfinite.sum(-1) > 0)
    if bad:
        first = summary.places[bad[0]][0]
        here = [i for i in bad if summary.places[i][0] == first]
        if not bool(summary.nonfinite[here, 1:].any()):
            return ""
        layers = layers[: layers.index(first)]
    ran = {summary.places[i][0] for i in _rows(~summary.numbers.isnan().all(-1))}
    before = [layer for layer in layers if layer in ran]
    return f"after the finite attention of {before[-1] or 'the model'}" if before else "before the first attention"


def _has_nonfinite(x: Tensor, masks: bool) -> bool:
    x = local(x).detach()
    x = torch.view_as_real(x) if x.is_complex() else x
    if not x.is_floating_point() or has_no_numbers(x):
        return False
    x = x.float() if x.itemsize == 1 else x
    try:
        if isfinite(float(x.sum())):
            return False
        return not bool(((x < inf) if masks else x.isfinite()).all())
    except UNEXPECTED:  # a tensor of another kind, such as a quantized one
        return False


def spoiled(result: Any) -> bool:
    """Whether a result, a tensor or a collection of some, has NaN or +∞; −∞ is taken for a mask."""
    if isinstance(result, Mapping):
        return any(map(spoiled, result.values()))
    if isinstance(result, tuple | list):
        return any(map(spoiled, result))
    if is_dataclass(result):
        return spoiled(vars(result))
    return type(result) is Tensor and not has_no_numbers(result) and _has_nonfinite(plain(result), masks=True)


def _positive(alarm: Alarm, name: str, value: float) -> float:
    if not value > 0:
        raise ConfigError(f"{type(alarm).__name__}({name}={value!r}): expected a number above 0")
    return float(value)


def _share(alarm: Alarm, name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ConfigError(f"{type(alarm).__name__}({name}={value!r}): expected a share above 0, at most 1")
    return float(value)


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
