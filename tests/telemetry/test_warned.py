"""Warnings name the line of the caller's code, not one of headwise or PyTorch."""

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import headwise as hw
from by_hand import ByHand
from headwise.interventions import Forbid


class Full:
    """A writer whose disk is full."""

    target = "full"

    def write(self, summary: object) -> None:
        raise OSError("no space left")

    def close(self) -> None:
        pass


def model() -> nn.Module:
    return nn.Sequential(hw.MultiHeadAttention(6, 2))


X = torch.ones(1, 5, 6)


def alarmed() -> None:
    with hw.watch(model(), alarms=[hw.telemetry.EntropyAlarm(99.0)]) as record:
        record.model(X)


def alarmed_by_a_step() -> None:
    with hw.watch(model(), alarms=[hw.telemetry.EntropyAlarm(99.0)], steps="manual") as record:
        record.model(X)
        record.step()


def not_written() -> None:
    with hw.watch(model()) as record:
        record.write_to(Full())
        record.model(X)


def nothing_edited() -> None:
    watched = model()
    with hw.intervene(watched, Forbid(9, 0), unused="warn"):
        watched(X)


def compiled() -> None:
    made = torch.compile(nn.Sequential(ByHand()), backend="eager")
    with hw.watch(made):
        made(X)


@pytest.mark.parametrize("code", [alarmed, alarmed_by_a_step, not_written, nothing_edited, compiled])
def test_the_line_is_the_callers(code: Callable[[], None]) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        code()
    lines, first = inspect.getsourcelines(code)
    ours = [one for one in found if any(word in str(one.message) for word in ("step", "watch(model)", "Forbid"))]
    assert ours
    for one in ours:
        assert one.filename == __file__
        assert first < one.lineno < first + len(lines)
