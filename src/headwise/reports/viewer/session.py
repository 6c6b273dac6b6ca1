"""The current text: computed by a thread, cancelled when a newer one is opened."""

import threading
from typing import Any

from headwise.errors import HeadwiseError
from headwise.lm.loading import LoadedModel
from headwise.reports.messages import message
from headwise.reports.viewer.limits import MAX_TOKENS, limits_of
from headwise.reports.viewer.pyramid import BUDGET, choose_levels
from headwise.reports.viewer.reader import Reader
from headwise.reports.viewer.text import READY, Text
from headwise.reports.viewer.tiles import Unwanted
from headwise.wording import Message

REMEMBERED = 16  # texts whose state can still be requested


class TooLong(HeadwiseError):
    """A text with more tokens or characters than the limit.

    Attributes:
        says: the message.
    """

    def __init__(self, says: Message) -> None:
        super().__init__(says)
        self.says = says


class Session:
    """A loaded model and the text that it computes.

    Args:
        subject: the loaded model. max_tokens: the longest text. budget: bytes of the pyramids of all heads.
    """

    def __init__(self, subject: LoadedModel, *, max_tokens: int = MAX_TOKENS, budget: int = BUDGET) -> None:
        self.subject, self.budget = subject, budget
        self.limits = limits_of(subject, max_tokens)
        self.present: Text | None = None
        self._texts: dict[str, Text] = {}
        self._change = threading.Condition()
        self._next: Text | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="headwise-viewer", daemon=True)
        self._thread.start()

    def open(self, text: str, title: str = "") -> Text:
        """Start to compute a text, and cancel the previous one.

        Raises:
            TextError: if it is empty or not valid text. TooLong: with the limit and its reason.
        """
        limits = self.limits
        most: dict[str, Any] = {"characters": limits.characters, "tokens": limits.tokens, "why": limits.why}
        if len(text) > limits.characters:
            raise TooLong(message("too_many_characters", n=len(text), **most))
        reading = self.subject.read(text)
        if len(reading) > limits.tokens:
            raise TooLong(message("too_many_tokens", n=len(reading), **most))
        levels = choose_levels(len(reading), sum(self.subject.heads), self.subject.causal, self.budget)
        new = Text(self.subject, reading, title, levels)
        with self._change:
            self._give_up(self.present)
            self.present = self._next = self._texts[new.id] = new
            while len(self._texts) > REMEMBERED:
                del self._texts[next(iter(self._texts))]
            self._change.notify_all()
        return new

    def find(self, name: str) -> Text | None:
        """The text of that id; None if it is not remembered."""
        return self._texts.get(name)

    def cancel(self, text: Text) -> None:
        """Cancel a text."""
        with self._change:
            self._give_up(text)
            if self.present is text:
                self.present = None

    def close(self, patience: float = 2.0) -> bool:
        """Cancel the current text; return whether the thread ended within `patience` seconds."""
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
                Reader(self.subject, text).read()
                text.advance(READY)
            except Unwanted:
                pass
            except Exception as error:  # the model's code may fail in any way; the server continues
                text.fail(_message(error))
            if not text.wanted():
                text.let_go()


def _message(error: Exception) -> Message:
    if isinstance(error, MemoryError) or (not isinstance(error, HeadwiseError) and "alloc" in str(error)):
        return message("no_memory")
    sentence = str(error)
    if not isinstance(error, HeadwiseError):
        sentence = f"{type(error).__name__}: {' '.join(sentence.split())[:300]}"
    return message("failure", sentence=sentence)
