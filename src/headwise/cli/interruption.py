"""Ctrl-C: one line on standard error and exit code 130. Imports little, as it may come during the imports."""

import _thread
import signal
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headwise.errors import HeadwiseError
from headwise.wording import Bilingual, in_language, language

CODE = 130  # 128 + SIGINT, as shells have it
INTERRUPTED = Bilingual("Interrupted.", "已中断。")
_came: list[int] = []
_lost: list[int] = []  # those of which Python ignored the exception, and which come again


@contextmanager
def noted() -> Iterator[None]:
    """Within the block, Ctrl-C raises KeyboardInterrupt as usual, and `is_interruption` recognises it."""
    _came.clear()
    _lost.clear()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, _note)
    except ValueError:  # not in the main thread, which does not receive Ctrl-C
        yield
        return
    before, sys.unraisablehook = sys.unraisablehook, _unraisable(sys.unraisablehook)
    try:
        yield
    finally:
        sys.unraisablehook = before
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _came.clear()
        _lost.clear()


def is_interruption(error: BaseException) -> bool:
    """Whether an error is Ctrl-C or came of it: a library that swallows it while it is imported fails later."""
    return isinstance(error, KeyboardInterrupt) or bool(_came)


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C came and a library swallowed it, as some do while they are imported."""
    if _came:
        raise KeyboardInterrupt


def is_first(number: int) -> bool:
    """Note a signal that ends the command. Returns False for a repeated one, such as launchers send."""
    first = not _came or bool(_lost)
    _came.append(number)
    _lost.clear()
    return first


def print_interrupted() -> None:
    """Print one line to standard error."""
    try:
        lang = language()
    except HeadwiseError:  # HEADWISE_LANG is wrong
        lang = "en"
    if sys.stderr is not None:  # closed
        sys.stderr.write(f"{in_language(INTERRUPTED, lang)}\n")
        sys.stderr.flush()


def leave() -> None:
    """End the process with `CODE`. Where Ctrl-C passed through the evaluation of a string, Python would end the process
    by the signal itself, unless another one is evaluated afterwards: to make a named tuple does that."""
    namedtuple("Afterwards", ())
    sys.exit(CODE)


def _unraisable(before: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook for exceptions that Python ignores, as those of finalizers and of callbacks of the import system: Ctrl-C,
    or another signal, that came in one comes again a moment later."""

    def hook(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            before(ignored)
            return
        number = _came[-1] if _came else signal.SIGINT
        _lost.append(number)
        threading.Timer(0.02, _interrupt, [number]).start()

    return hook


def _interrupt(number: int) -> None:
    """Send a signal to the main thread, which ends its waiting where the system can do that."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


def _note(number: int, frame: Any) -> None:
    _came.append(number)
    raise KeyboardInterrupt
