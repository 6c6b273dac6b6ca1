"""What takes long says how long, before it is done; what is quick says nothing."""

import pytest

from commands import Command
from headwise.cli.options import Estimate
from headwise_textbook.claims import choose
from headwise_textbook.claims.claim import expected_seconds


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_long_part_is_estimated_once(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    estimate = Estimate(clock)
    for done in range(7):
        estimate("scoring", done, 53)
        clock.now += 2.0
    assert capsys.readouterr() == ("", "scoring: about 1 min 42 s left\n")


def test_every_part_is_estimated_by_its_own_speed(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    estimate = Estimate(clock)
    for what, of, seconds in (("scoring", 5, 1.0), ("comparing", 11, 7.0)):
        for done in range(of + 1):
            estimate(what, done, of)
            clock.now += seconds
    assert capsys.readouterr().err == "comparing: about 1 min 10 s left\n"


def test_work_that_was_done_before_is_not_part_of_the_speed(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    estimate = Estimate(clock)
    for done in (90, 91):
        estimate("training", done, 101)
        clock.now += 5.0
    assert capsys.readouterr().err == "training: about 50.0 s left\n"


@pytest.mark.thorough
def test_claims_say_how_long_they_take(headwise: Command) -> None:
    assert 5 < expected_seconds(choose()) < 60 < expected_seconds(choose(slow=True)) < 600
    assert headwise("claims", "--only", "four-d-squared").err == ""


def test_all_claims_are_estimated_before_the_first(headwise: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise_textbook.claims.run", stopped)
    done = headwise("claims", "--all")
    assert done.code == 130
    assert done.err.startswith(f"{len(choose(slow=True))} claims take about ")
