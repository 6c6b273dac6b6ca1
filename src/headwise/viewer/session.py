"""The one text that is being looked at: read and pooled by a thread, given up as soon as a newer one comes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headwise.errors import HeadwiseError
from headwise.subject import Subject
from headwise.viewer.limits import MAX_TOKENS, limits_of
from headwise.viewer.pyramid import BUDGET, choose_levels, head_pyramid
from headwise.viewer.text import POOLING, READY, STATISTICS, Text, statistics_of, warnings_of
from headwise.viewer.tiles import Unwanted

REMEMBERED = 16  # texts of which the state is still told


class TooLong(HeadwiseError):
    """A text of more tokens or characters than are read."""


class Session:
    """A model, and the text that it reads at the moment.

    Args:
        subject: what reads. max_tokens: the longest text. budget: bytes of all heads' pyramids.
    """

    def __init__(self, subject: Subject, *, max_tokens: int = MAX_TOKENS, budget: int = BUDGET) -> None:
        self.subject, self.budget = subject, budget
        self.limits = limits_of(subject, max_tokens)
        self.present: Text | None = None
        self._told: dict[str, Text] = {}
        self._change = threading.Condition()
        self._next: Text | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="headwise-viewer", daemon=True)
        self._thread.start()

    def open(self, text: str, title: str = "") -> Text:
        """Begin to read a text; the one before it is given up.

        Raises:
            TextError: if it is empty or no text. TooLong: with the limit and why.
        """
        limits = self.limits
        if len(text) > limits.characters:
            raise TooLong(
                f"the text has {len(text):,} characters; at most {limits.characters:,} are looked at, and "
                f"{limits.tokens:,} tokens read: {limits.why}"
            )
        reading = self.subject.read(text)
        if len(reading) > limits.tokens:
            raise TooLong(f"the text has {len(reading):,} tokens; at most {limits.tokens:,} are read: {limits.why}")
        new = Text(self.subject, reading, title)
        with self._change:
            self._give_up(self.present)
            self.present = self._next = self._told[new.id] = new
            while len(self._told) > REMEMBERED:
                del self._told[next(iter(self._told))]
            self._change.notify_all()
        return new

    def find(self, name: str) -> Text | None:
        """The text of that id, None if it is not known (any more)."""
        return self._told.get(name)

    def cancel(self, text: Text) -> None:
        """Give a text up."""
        with self._change:
            self._give_up(text)
            if self.present is text:
                self.present = None

    def close(self, patience: float = 2.0) -> bool:
        """Give up what is being read; whether the thread has ended within so many seconds."""
        with self._change:
            self._closed = True
            self._give_up(self.present)
            self._change.notify_all()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _give_up(self, text: Text | None) -> None:
        if text is not None:
            text.cancel()
            text.let_go()
            if self._next is text:
                self._next = None

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._next is not None)
                text, self._next = self._next, None
                if self._closed or text is None:
                    return
            try:
                self._read(text)
            except Unwanted:
                pass
            except Exception as error:  # the model's code may fail in any way; the server goes on
                text.fail(_told(error))
            if not text.wanted():
                text.let_go()

    def _read(self, text: Text) -> None:
        layers = len(self.subject.layers)
        text.tell("reading", 0, layers)
        with _watched(self.subject, text):
            found = self.subject.maps(text.reading.ids, measures=STATISTICS)
        maps = list(found.values())
        text.statistics, text.warnings = statistics_of(maps), warnings_of(maps)
        text.levels = choose_levels(maps, self.budget)
        text.heads = {(i, j): amap.head(0, j) for i, amap in enumerate(maps) for j in range(amap.shape[1])}
        text.advance(POOLING)
        n, of = text.n, len(text.heads)
        done = 0

        def tell(rows: int, _: int) -> None:
            text.tell("pooling", done * n + rows, of * n)

        for done, (place, head) in enumerate(text.heads.items()):  # noqa: B007 - tell reads it
            pyramid = head_pyramid(head, text.levels, tell, text.wanted)
            text.pyramids = {**text.pyramids, place: pyramid}
        text.tell("ready", of * n, of * n)
        text.advance(READY)


@contextmanager
def _watched(subject: Subject, text: Text) -> Iterator[None]:
    """Within it the model tells of each layer that is done, and stops before the next module once nobody waits."""
    done = 0

    def stop(*_: Any) -> None:
        if not text.wanted():
            raise Unwanted

    def tell(*_: Any) -> None:
        nonlocal done
        done += 1
        text.tell("reading", min(done, len(subject.layers)), len(subject.layers))

    handles = [module.register_forward_pre_hook(stop) for module in subject.model.modules()]
    names = dict.fromkeys(layer.partition("#")[0] for layer in subject.layers)
    handles += [subject.model.get_submodule(name).register_forward_hook(tell) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _told(error: Exception) -> str:
    """An error as one sentence."""
    if isinstance(error, HeadwiseError):
        return str(error)
    if isinstance(error, MemoryError) or "alloc" in str(error):
        return "there was not enough memory for this text; give a shorter one"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
