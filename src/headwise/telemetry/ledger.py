"""The numbers of a record: those of the step under way, of the last one, of all, and the latest ones each by itself."""

from collections import deque
from collections.abc import Sequence

from headwise.errors import ConfigError
from headwise.telemetry.running import Layer, Running
from headwise.telemetry.summary import History, Summary


class Ledger:
    """Its size depends on the number of heads and on `history`, not on how much has been seen.

    Args:
        names: of the measures. heads: which of each layer; None for all. history: how many steps are kept.
    Attributes:
        index: of the step under way. steps: how many have been measured.
        clipped: the step by which `qk_clip` last changed weights.
        latest: the summary of the last one; last and total: what was added up in it and in all of them.
    """

    def __init__(self, names: tuple[str, ...], heads: Sequence[int] | None, history: int) -> None:
        self._names, self._heads = names, heads
        self._past: deque[Summary] = deque(maxlen=history)
        self._order: dict[str, range] = {}
        self._under_way = Running()
        self.last, self.total = Running(), Running()
        self.index = self.steps = 0
        self.clipped: int | None = None
        self.latest = self._summary(self.last, 0, 0)

    def add(self, running: Running) -> None:
        """Take what a forward gave into the step under way."""
        for name, layer in running.layers.items():
            self._order.setdefault(name, layer.heads)
            self._check(name, layer)
            self._under_way.add(name, layer)

    def end_step(self) -> Summary | None:
        """The summary of the step under way, and the next one begins; None if nothing was measured."""
        step, index = self._under_way, self.index
        self._under_way, self.index = Running(), index + 1
        if not step.layers:
            return None
        self.last, self.steps = step, self.steps + 1
        for name, layer in step.layers.items():
            self.total.add(name, layer.trusted())
        self.latest = self._summary(step, index, 1)
        self._past.append(self.latest)
        return self.latest

    @property
    def pending(self) -> bool:
        """Whether the step under way has numbers."""
        return bool(self._under_way.layers)

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
        """The numbers of something else that was added up, such as that of all ranks, with the heads of `whole`."""
        order = self._order | {name: layer.heads for name, layer in whole.layers.items()}
        return self._summary(running, self.latest.step, steps, order)

    def _summary(self, running: Running, step: int, steps: int, order: dict[str, range] | None = None) -> Summary:
        found = running.summary(self._names, self._order if order is None else order, self._heads)
        return Summary(step, steps, *found)

    def _check(self, name: str, layer: Layer) -> None:
        if bad := [head for head in self._heads or () if head >= layer.of]:
            raise ConfigError(f"heads={bad[0]}: {name or 'the model'} has the heads 0 to {layer.of - 1}")
        if layer.heads != self._order[name]:
            raise ConfigError(
                f"{name or 'the model'} had {_told(self._order[name])} when it was first watched, and has "
                f"{_told(layer.heads)} now; record.clear() begins anew"
            )


def _told(heads: range) -> str:
    return f"{len(heads)} heads" + (f" from {heads.start} on" if heads.start else "")
