"""Computation of a text: layer by layer, where the heads of each layer are pooled before the next one is computed.

The first maps are thus available early, and cancelling takes no longer than a block of queries.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headwise.events import within
from headwise.lm.loading import LoadedModel
from headwise.map import AttentionMap
from headwise.reports.viewer.pyramid import head_pyramid
from headwise.reports.viewer.text import Text
from headwise.reports.viewer.tiles import Unwanted
from headwise.stats import Measure, Tokens, of_tokens, shown_in

READ, DRAW = 2, 1  # relative costs of computing and of pooling a head


class Reader:
    """Computes one text and sets its progress. Raises Unwanted if the text was cancelled."""

    def __init__(self, subject: LoadedModel, text: Text) -> None:
        self.subject, self.text = subject, text
        self._layer, self._done = 0, 0

    def read(self) -> None:
        """Compute all layers."""
        self._progress("reading", 0)
        with within(progress=self._rows), _before_modules(self.subject, self._stop):
            self.subject.maps(self.text.reading.ids, measures=self._measures(), on_map=self._computed)
        self._progress("ready", 0)

    def _measures(self) -> list[Measure]:
        """The measures of the page that can be computed with these tokens."""
        reading = self.text.reading
        tokens = Tokens(reading.ids, [reading.pieces], torch.tensor([reading.special]))
        found = (of_tokens(name, tokens) for name in shown_in("viewer"))
        return [measure for measure in found if measure is not None]

    def _computed(self, name: str, amap: AttentionMap) -> None:
        """Pool the heads of a computed layer."""
        text, layer = self.text, self.subject.layers.index(name)
        self._done += READ * text.n * amap.shape[1]
        text.add_layer(layer, amap)
        for head in range(amap.shape[1]):
            self._progress("drawing", 0)
            text.add_pyramid(
                (layer, head), head_pyramid(text.heads[layer, head], text.levels, self._drawn, text.wanted)
            )
            self._done += DRAW * text.n
        self._layer = layer + 1
        self._progress("reading", 0)

    def _rows(self, _: str, rows: int, __: int) -> None:
        self._stop()
        layer = min(self._layer, len(self.subject.heads) - 1)
        self._progress("reading", READ * self.subject.heads[layer] * self._work(rows))

    def _drawn(self, _: str, rows: int, __: int) -> None:
        self._progress("drawing", DRAW * self._work(rows))

    def _work(self, rows: int) -> int:
        """The cost of the first rows, in rows; under a causal mask they have few keys."""
        return rows * rows // max(1, self.text.n) if self.subject.causal else rows

    def _stop(self) -> None:
        if not self.text.wanted():
            raise Unwanted

    def _progress(self, what: str, more: int) -> None:
        whole = (READ + DRAW) * self.text.n * sum(self.subject.heads)
        self.text.progress(what, min(self._done + more, whole), whole, self._layer)


@contextmanager
def _before_modules(subject: LoadedModel, check: Any) -> Iterator[None]:
    """Call `check` before each module of the model; an exception that it raises ends the forward pass."""
    handles = [module.register_forward_pre_hook(lambda *_: check()) for module in subject.model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
