"""The one text that is being looked at: read and pooled by a thread, given up as soon as a newer one comes."""

import threading

from headwise.errors import HeadwiseError
from headwise.lm.loading import Subject
from headwise.lm.loading.remarks import Remark
from headwise.reports.viewer.limits import MAX_TOKENS, limits_of
from headwise.reports.viewer.pyramid import BUDGET, choose_levels
from headwise.reports.viewer.reader import Reader
from headwise.reports.viewer.text import READY, Text
from headwise.reports.viewer.tiles import Unwanted

REMEMBERED = 16  # texts of which the state is still told


class TooLong(HeadwiseError):
    """A text of more tokens or characters than are read.

    Attributes:
        says: the sentence.
    """

    def __init__(self, says: Remark) -> None:
        super().__init__(says)
        self.says = says


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
            sentence = (
                "the text has {n:,} characters; at most {characters:,} are looked at, and {tokens:,} tokens read: {why}"
            )
            known: dict[str, int | str] = {"characters": limits.characters, "tokens": limits.tokens, "why": limits.why}
            raise TooLong(Remark("too_many_characters", sentence, n=len(text), **known))
        reading = self.subject.read(text)
        if len(reading) > limits.tokens:
            sentence = "the text has {n:,} tokens; at most {tokens:,} are read: {why}"
            raise TooLong(Remark("too_many_tokens", sentence, n=len(reading), tokens=limits.tokens, why=limits.why))
        levels = choose_levels(len(reading), sum(self.subject.heads), self.subject.causal, self.budget)
        new = Text(self.subject, reading, title, levels)
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
                Reader(self.subject, text).read()
                text.advance(READY)
            except Unwanted:
                pass
            except Exception as error:  # the model's code may fail in any way; the server goes on
                text.fail(_told(error))
            if not text.wanted():
                text.let_go()


def _told(error: Exception) -> Remark:
    """An error as one sentence."""
    if isinstance(error, MemoryError) or (not isinstance(error, HeadwiseError) and "alloc" in str(error)):
        return Remark("no_memory", "not enough memory for this text; use a shorter one")
    sentence = str(error)
    if not isinstance(error, HeadwiseError):
        sentence = f"{type(error).__name__}: {' '.join(sentence.split())[:300]}"
    return Remark("failure", "{sentence}", sentence=sentence)
