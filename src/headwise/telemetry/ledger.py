"""The numbers of a record: of the current step, of the last one, of all, and each of the latest ones."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from headwise.errors import ConfigError, check_whole
from headwise.telemetry.running import Layer, Running
from headwise.telemetry.summary import History, Summary


class Ledger:
    """Accumulates steps. Its size depends on the number of heads and on `history` alone.

    Args:
        names: of the measures. heads: those of each layer to keep; None for all. history: steps to keep one by one.
    Attributes:
        index: of the current step. steps: number of measured steps.
        clipped: the step by which `qk_clip` last changed weights.
        spoiled: whether a result of the model in the current step has NaN or +infinity, as far as that was looked at.
        latest: the summary of the last step; last, total: the states of it and of all steps.
    """

    def __init__(self, names: tuple[str, ...], heads: Sequence[int] | None, history: int) -> None:
        self._names, self._heads = names, heads
        self._past: deque[Summary] = deque(maxlen=history)
        self._order: dict[str, range] = {}
        self._current = Running()
        self.last, self.total = Running(), Running()
        self.index = self.steps = 0
        self.clipped: int | None = None
        self.spoiled = False
        self.latest = self._summary(self.last, 0, 0)

    def begin_at(self, step: int) -> None:
        """Number the current step so."""
        number = check_whole("start", "step", step, 0)
        if self.pending and number != self.index:
            raise ConfigError(
                f"start(step={number}): step {self.index} has numbers already; end it with record.step(), or discard "
                f"all steps with record.clear()"
            )
        if number < self.index:
            raise ConfigError(
                f"start(step={number}): expected at least {self.index}, the step that is next; record.clear() counts "
                f"from 0 again"
            )
        self.index = number

    def check_heads(self, name: str, layer: Layer) -> None:
        """Raise ConfigError if a layer does not have the heads that are kept of each."""
        if bad := [head for head in self._heads or () if head >= layer.of]:
            raise ConfigError(f"heads={bad[0]}: {name or 'the model'} has the heads 0 to {layer.of - 1}")

    def add(self, name: str, layer: Layer) -> None:
        """Add the states of a layer of a forward to the current step. ConfigError if it had other heads before."""
        before = self._order.setdefault(name, layer.heads)
        if layer.heads != before:
            raise ConfigError(
                f"{name or 'the model'} had {_listed(before)} when it was first watched, and has "
                f"{_listed(layer.heads)} now; record.clear() discards the numbers so far"
            )
        self._current.add(name, layer)

    def end_step(self) -> Summary | None:
        """End the current step and return its summary; None if nothing was measured."""
        step, index, spoiled = self._current, self.index, self.spoiled
        self._current, self.index, self.spoiled = Running(), index + 1, False
        if not step.layers and not spoiled:
            return None
        self.last, self.steps = step, self.steps + 1
        for name, layer in step.layers.items():
            self.total.add(name, layer.trusted())
        self.latest = replace(self._summary(step, index, 1), nonfinite_result=spoiled)
        self._past.append(self.latest)
        return self.latest

    @property
    def pending(self) -> bool:
        """Whether the current step has numbers."""
        return bool(self._current.layers)

    @property
    def totals(self) -> Summary:
        """The summary of all steps."""
        return self._summary(self.total, self.latest.step, self.steps)

    @property
    def history(self) -> History:
        """The latest steps."""
        return History(tuple(self._past))

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and states."""
        states = [x for one in (self.last, self.total) for layer in one.layers.values() for x in layer.tensors()]
        return self.history.nbytes + sum({x.data_ptr(): x.nbytes for x in states}.values())

    def summarise(self, running: Running, steps: int, whole: Running) -> Summary:
        """The summary of other states, such as those of all ranks, with the heads of `whole`."""
        order = self._order | {name: layer.heads for name, layer in whole.layers.items()}
        return self._summary(running, self.latest.step, steps, order)

    def _summary(self, running: Running, step: int, steps: int, order: dict[str, range] | None = None) -> Summary:
        found = running.summary(self._names, self._order if order is None else order, self._heads)
        return Summary(step, steps, *found)


def _listed(heads: range) -> str:
    return f"{len(heads)} heads" + (f" from {heads.start} on" if heads.start else "")
