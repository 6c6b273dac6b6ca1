"""How a text is read: layer after layer, and the heads of each are drawn before the next one is read.

So the first maps are there after a part of the time, and for a text to be given up nobody waits longer than a block of
queries takes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headwise.kernels.pauses import pausing
from headwise.lm.loading import LoadedModel
from headwise.map import AttentionMap
from headwise.reports.viewer.pyramid import head_pyramid
from headwise.reports.viewer.text import Text
from headwise.reports.viewer.tiles import Unwanted
from headwise.stats import Measure, Tokens, of_tokens, shown_in

READ, DRAW = 2, 1  # what reading a head and drawing it take, in a measure of their own


class Reader:
    """Reads one text, and tells it how far it is. Raises Unwanted once the text is not wanted any more."""

    def __init__(self, subject: LoadedModel, text: Text) -> None:
        self.subject, self.text = subject, text
        self._layer, self._done = 0, 0

    def read(self) -> None:
        """All of it."""
        self._tell("reading", 0)
        with pausing(self._rows), _before_modules(self.subject, self._stop):
            self.subject.maps(self.text.reading.ids, measures=self._measures(), on_map=self._seen)
        self._tell("ready", 0)

    def _measures(self) -> list[Measure]:
        """Those that the page shows, as far as the tokens say what they require."""
        reading = self.text.reading
        tokens = Tokens(reading.ids, [reading.pieces], torch.tensor([reading.special]))
        found = (of_tokens(name, tokens) for name in shown_in("viewer"))
        return [measure for measure in found if measure is not None]

    def _seen(self, name: str, amap: AttentionMap) -> None:
        """A layer has been read."""
        text, layer = self.text, self.subject.layers.index(name)
        self._done += READ * text.n * amap.shape[1]
        text.add_layer(layer, amap)
        for head in range(amap.shape[1]):
            self._tell("drawing", 0)
            text.add_pyramid(
                (layer, head), head_pyramid(text.heads[layer, head], text.levels, self._drawn, text.wanted)
            )
            self._done += DRAW * text.n
        self._layer = layer + 1
        self._tell("reading", 0)

    def _rows(self, _: str, rows: int, __: int) -> None:
        self._stop()
        layer = min(self._layer, len(self.subject.heads) - 1)
        self._tell("reading", READ * self.subject.heads[layer] * self._work(rows))

    def _drawn(self, _: str, rows: int, __: int) -> None:
        self._tell("drawing", DRAW * self._work(rows))

    def _work(self, rows: int) -> int:
        """What the first rows take of all, in rows; under a causal mask they see few keys."""
        return rows * rows // max(1, self.text.n) if self.subject.causal else rows

    def _stop(self) -> None:
        if not self.text.wanted():
            raise Unwanted

    def _tell(self, what: str, more: int) -> None:
        whole = (READ + DRAW) * self.text.n * sum(self.subject.heads)
        self.text.tell(what, min(self._done + more, whole), whole, self._layer)


@contextmanager
def _before_modules(subject: LoadedModel, look: Any) -> Iterator[None]:
    """Within it `look` is called before each module of the model, and what it raises ends the pass."""
    handles = [module.register_forward_pre_hook(lambda *_: look()) for module in subject.model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
