"""The roles of every head over a training: a record of looks that can be written, read and printed.

history = HeadHistory.read("runs/1/heads.jsonl")      # written by `headwise train … --watch-heads`
print(history)                                        # for each head, its final role and since which step
history.passage("broad")                              # entropies, [looks, layers, heads]
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from headwise.analysis.checks import head_name
from headwise.analysis.head_roles.score import DEFINITIONS
from headwise.base.files import write_text
from headwise.base.read import Entry, each, number, parsed, reading, text_of, word
from headwise.errors import CheckpointError, ConfigError
from headwise.table import HeadTable
from headwise.table.show import Printed

FORMAT = "headwise-heads-1"
DIGITS = 5  # of the numbers in a file
NO_ROLE = "none"
Read = TypeVar("Read")


@dataclass(frozen=True)
class Alike:
    """How similar the heads were by one measure, over all pairs of different heads of all layers."""

    mean: float  # over all pairs
    within: float  # over the pairs inside a layer (NaN where each layer has one head)
    nearest: tuple[tuple[str, float], ...]  # of each head, layer by layer, the most similar other one, the similarity


@dataclass(frozen=True)
class HeadLook:
    """All heads at one step; arrays are [layers, heads]."""

    step: int
    seconds: float  # the duration of the look
    passage: dict[str, np.ndarray]  # role → its score on a fixed held-out passage, as in `Roles`
    repeats: dict[str, np.ndarray]  # "previous", "induction", "duplicate" → weight; {} if no tokens
    labels: list[list[list[str]]]  # [layers][heads] names of the roles that each head played, the clearest first
    alike: dict[str, Alike] = field(default_factory=dict)  # measure → of outputs; {} without

    @property
    def shape(self) -> tuple[int, int]:
        """(layers, heads)"""
        return len(self.labels), len(self.labels[0]) if self.labels else 0

    def to_json(self) -> str:
        """One line."""
        content = {
            "step": self.step, "seconds": round(self.seconds, 3),
            "passage": {name: _plain(x) for name, x in self.passage.items()},
            "repeats": {name: _plain(x) for name, x in self.repeats.items()}, "labels": self.labels,
            "alike": {
                name: {
                    "mean": _plain(x.mean), "within": _plain(x.within),
                    "nearest": [[head, _plain(value)] for head, value in x.nearest],
                }
                for name, x in self.alike.items()
            },
        }  # fmt: skip
        return json.dumps(content, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "HeadLook":
        """Parse a line of `to_json`. CheckpointError if it is not one."""
        found = Entry(parsed(line))
        alike = {}
        for name in (measures := found.entry("alike")):
            one = measures.entry(name)
            nearest = tuple(one.each("nearest", _neighbour))
            alike[name] = Alike(_number(one.raw("mean"), "mean"), _number(one.raw("within"), "within"), nearest)
        labels = found.each("labels", lambda rows, at: each(rows, at, lambda names, at: each(names, at, word)))
        if len({len(row) for row in labels}) > 1:
            raise CheckpointError("labels: expected as many heads in each layer")
        shape = (len(labels), len(labels[0]) if labels else 0)
        passage, repeats = (found.named(part, lambda x, at: _numbers(x, at, shape)) for part in ("passage", "repeats"))
        return cls(found.whole("step", least=0), found.number("seconds"), passage, repeats, labels, alike)


class HeadHistory(Printed):
    """The recorded looks at the heads of one run, in order of steps. Prints itself as a table of the step since which
    each head has its role.

    Attributes:
        about: the run, as plain values; looks: `HeadLook`s; shape: (layers, heads).
    """

    def __init__(self, about: dict[str, Any], looks: Sequence[HeadLook]) -> None:
        self.about, self.looks = dict(about), list(looks)
        steps = [look.step for look in self.looks]
        if steps != sorted(set(steps)):
            raise ConfigError(f"looks: expected ascending steps, got {steps}")

    @property
    def shape(self) -> tuple[int, int]:
        """(layers, heads); (0, 0) before the first look."""
        return self.looks[0].shape if self.looks else (0, 0)

    @property
    def steps(self) -> np.ndarray:
        """[looks]"""
        return np.array([look.step for look in self.looks], np.int64)

    def passage(self, role: str) -> np.ndarray:
        """Scores on the held-out passage, [looks, layers, heads]; NaN where there are none."""
        return self._stacked("passage", role)

    def repeats(self, role: str) -> np.ndarray:
        """Scores on repeated random tokens, [looks, layers, heads]; NaN where there are none."""
        return self._stacked("repeats", role)

    def alike(self, measure: str, within: bool = False) -> np.ndarray:
        """Mean similarity over pairs of heads (within: of one layer), [looks]; NaN where it was not measured."""
        found = [look.alike.get(measure) for look in self.looks]
        return np.array([np.nan if x is None else x.within if within else x.mean for x in found])

    def role(self, layer: int, head: int, look: int = -1) -> str:
        """The clearest role of a head at a look, the last by default; "none" if it plays none."""
        labels = self.looks[look].labels[layer][head]
        return labels[0] if labels else NO_ROLE

    def since(self, layer: int, head: int) -> int | None:
        """The step since which the head has played its final role at every look; None if it plays none at the end."""
        role = self.role(layer, head)
        if role == NO_ROLE:
            return None
        first = None
        for look in reversed(self.looks):
            if role not in look.labels[layer][head]:
                break
            first = look.step
        return first

    def until(self, step: int) -> "HeadHistory":
        """The looks up to this step."""
        return HeadHistory(self.about, [look for look in self.looks if look.step <= step])

    def table(self, look: int = -1) -> HeadTable:
        """The scores of all heads at a look, the last by default."""
        at = self.looks[look]
        parts = {"passage": at.passage, "repeats": at.repeats}
        columns = {f"{part} {role}": x for part, scores in parts.items() for role, x in scores.items()}
        return HeadTable(columns, title=f"Heads at step {at.step:,}", about=self.about)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text, one row a head: heads with a role first, by the step since which they play it."""
        layers, heads = self.shape
        every = [(layer, head) for layer in range(layers) for head in range(heads)]
        body = []
        for at in sorted(every, key=lambda at: (self.since(*at) is None, self.since(*at) or 0, at)):
            since, role = self.since(*at), self.role(*at)
            last = self.looks[-1]
            numbers = [
                x.get(name, np.full(self.shape, np.nan))[at]
                for x, name in (
                    (last.repeats, "previous"), (last.repeats, "induction"), (last.passage, "broad"),
                )
            ]  # fmt: skip
            body.append([
                head_name(*at), DEFINITIONS[role].word if role in DEFINITIONS else "·",
                "—" if since is None else f"{since:,}", *("—" if np.isnan(x) else f"{x:.2f}" for x in numbers),
            ])  # fmt: skip
        return ["head", "role at the end", "since step", "previous", "induction", "entropy"], body

    @property
    def title(self) -> str:
        """One line: the number of looks and their duration."""
        if not self.looks:
            return "no looks yet"
        seconds = np.median([look.seconds for look in self.looks])
        layers, heads = self.shape
        return (
            f"{layers} × {heads} heads, {len(self.looks)} looks from step {self.steps[0]:,} to {self.steps[-1]:,}, "
            f"{seconds:.2g} s each (median)"
        )

    def __repr__(self) -> str:
        return super().__repr__() if self.looks else self.title

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file with one line about the run and one a look, whole or not at all."""
        lines = [json.dumps({"format": FORMAT, **self.about}, ensure_ascii=False)]
        write_text(path, "\n".join([*lines, *(x.to_json() for x in self.looks)]) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "HeadHistory":
        """Read a file that `write` wrote. CheckpointError, naming the line, if it is missing or damaged."""
        missing = "`headwise train … --watch-heads` writes it"
        with reading(path, "record of heads", missing=missing, way_out="move the file away"):
            first, *looks = text_of(path).removesuffix("\n").split("\n")  # JSON may contain other line ends
            about = _at_line(1, lambda: Entry(parsed(first)).plain())
            if about.pop("format", None) != FORMAT:
                raise CheckpointError(f"it is not of the format {FORMAT}: its first line has another one")
            read = [_at_line(i, partial(HeadLook.from_json, line)) for i, line in enumerate(looks, 2)]
            if len({look.shape for look in read}) > 1:
                raise CheckpointError("its looks have different numbers of layers and heads")
            return cls(about, read)

    def _stacked(self, part: str, role: str) -> np.ndarray:
        return np.array([getattr(x, part).get(role, np.full(self.shape, np.nan)) for x in self.looks])


def _at_line(number: int, read: Callable[[], Read]) -> Read:
    """Call `read`; an error names the line."""
    try:
        return read()
    except CheckpointError as error:
        raise CheckpointError(f"line {number}: {error}") from None


def _plain(x: Any) -> Any:
    """Rounded values for JSON; None for NaN."""
    if isinstance(x, np.ndarray):
        return [_plain(row) for row in x]
    return None if not np.isfinite(x) else round(float(x), DIGITS)


def _number(x: Any, at: str) -> float:
    """The number; NaN for None."""
    return float("nan") if x is None else number(x, at)


def _numbers(x: Any, at: str, shape: tuple[int, int]) -> np.ndarray:
    """[layers, heads]"""
    rows = each(x, at, lambda row, at: each(row, at, _number))
    if [len(row) for row in rows] != [shape[1]] * shape[0]:
        raise CheckpointError(f"{at}: expected {shape[0]} × {shape[1]} numbers, as there are labels")
    return np.array(rows, np.float64).reshape(shape)


def _neighbour(x: Any, at: str) -> tuple[str, float]:
    pair = each(x, at, lambda value, at: value)
    if len(pair) != 2:
        raise CheckpointError(f"{at}: expected a head and a number")
    return word(pair[0], at), _number(pair[1], at)
