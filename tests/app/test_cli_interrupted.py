"""Ctrl-C at any time: one line on standard error and exit code 130, as each command imports what it needs too."""

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import pytest

from commands import Command
from headwise.cli import main
from headwise.cli.interruption import is_interruption, noted
from headwise.cli.learn import _signals, _Terminated
from headwise.errors import ConfigError

SOURCE = Path(__file__).parents[2] / "src"
# Ctrl-C as the module of that name is imported, where a library may change it into another error, or swallow it.
BEGUN = """
import builtins, os, signal, sys
real, name, swallowed = builtins.__import__, sys.argv.pop(1), sys.argv.pop(1) == "swallowed"

def importing(module, *args, **options):
    if module == name and importing.left:
        importing.left = False
        try:
            eval("os.kill(os.getpid(), signal.SIGINT)")
        except KeyboardInterrupt:
            if not swallowed:
                raise
            raise AttributeError("a half imported library") from None
    return real(module, *args, **options)

importing.left, builtins.__import__ = True, importing
from headwise.cli import main
main()
"""


def ended(*args: str, begun: str, how: str = "raised") -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BEGUN, begun, how, *args], env=environment, capture_output=True, encoding="utf-8",
        timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("begun", ["typer", "headwise.lm.train", "torch"])
def test_a_command_that_is_interrupted_while_it_is_imported_prints_one_line(begun: str, tmp_path: Path) -> None:
    args = "train", "text.txt", "--out", str(tmp_path / "out")
    assert ended(*args, begun=begun) == (130, "", "Interrupted.\n")
    assert ended(*args, "--lang", "zh", begun=begun) == (130, "", "已中断。\n")


@pytest.mark.thorough
def test_a_library_that_changes_the_interruption_into_another_error_is_no_failure(tmp_path: Path) -> None:
    args = "see", "hello", "--out", str(tmp_path / "report.html")
    assert ended(*args, begun="headwise.reports.figure", how="swallowed") == (130, "", "Interrupted.\n")


@pytest.mark.parametrize(
    ("block", "sent"), [(nullcontext, signal.SIGINT), (_signals, signal.SIGINT), (_signals, signal.SIGTERM)]
)
def test_an_interruption_that_python_ignores_comes_again(
    block: Callable[[], AbstractContextManager[None]], sent: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        with noted(), block():
            things.clear()
            time.sleep(5)

    before, things = sys.unraisablehook, {type("Thing", (), {})()}
    references = [weakref.ref(thing, lambda _: signal.raise_signal(sent)) for thing in things]
    began, handler = time.monotonic(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as raised:
        command()
    signal.signal(signal.SIGTERM, handler)
    assert isinstance(raised.value, _Terminated) == (sent == signal.SIGTERM)
    assert references[0]() is None
    assert time.monotonic() - began < 4
    assert sys.unraisablehook is before
    assert capsys.readouterr() == ("", "")


def test_repeated_signals_do_not_interrupt_the_end_of_a_measurement() -> None:
    def command() -> None:
        with noted(), _signals():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGTERM)  # of a launcher that ends its processes
                ended.append(True)

    ended: list[bool] = []
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        command()
    assert (ended, signal.signal(signal.SIGTERM, handler)) == ([True], signal.SIG_IGN)


def test_an_interruption_that_a_library_swallows_ends_the_command(
    headwise: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallowing(*args: object, **options: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def broken(*args: object, **options: object) -> None:
        swallowing()
        raise ConfigError("a library that is half imported")

    monkeypatch.setattr("headwise.cli.learn._measure", broken)
    stopped = "Stopped before anything was measured.\n"
    assert headwise("measure", "--file", "text.txt", "--out", "out.csv") == (130, "", stopped)
    monkeypatch.setattr("headwise.cli.program.command_line", lambda: broken)
    assert headwise("measures") == (130, "", "Interrupted.\n")
    monkeypatch.setattr("headwise.cli.program.load", swallowing)
    monkeypatch.setattr("headwise.cli.program.command_line", lambda: pytest.fail)
    assert headwise("measures") == (130, "", "Interrupted.\n")


def test_other_errors_are_raised_and_the_handler_of_signals_is_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise AttributeError("a defect")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["headwise", "measures"])
    monkeypatch.setattr("headwise.cli.program.command_line", lambda: broken)
    with pytest.raises(AttributeError, match="a defect") as raised:
        main()
    assert not is_interruption(raised.value)
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr() == ("", "")


def test_a_training_that_is_interrupted_before_its_first_step_prints_how_to_resume(
    headwise: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.lm.train.train", interrupted)
    code, out, err = headwise("train", "text.txt", "--out", "out")
    assert (code, out) == (130, "")
    assert err == "Interrupted; the same command without --fresh resumes after the last save.\n"
    monkeypatch.setattr("headwise.plan.listing", interrupted)
    assert headwise("plan", "list") == (130, "", "Interrupted.\n")
