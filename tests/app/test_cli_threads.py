"""Commands use no more threads than there are free cores, unless the environment says otherwise."""

import sys
from pathlib import Path

import pytest

from headwise.cli import interruption
from headwise.cli.interruption import others, quota, settle, threads_for


@pytest.mark.parametrize(
    ("usable", "cores", "busy", "allowed", "expected"),
    [
        (2, 2, 0.0, None, 2),
        (2, 2, 1.0, None, 1),
        (2, 2, 7.0, None, 1),
        (13, 13, 3.25, None, 10),
        (2, 64, 50.0, None, 2),  # the load is elsewhere
        (16, 16, 0.0, 3.5, 3),
        (16, 16, 0.0, 0.5, 1),
        (5, 5, None, None, 5),
    ],
)
def test_threads_are_the_free_cores(usable, cores, busy, allowed, expected):
    assert threads_for(usable, cores, busy, allowed) == expected


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cores, two of them used by others; PyTorch has not been imported."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(interruption, "others", lambda: 2.0)
    monkeypatch.setattr(interruption, "quota", lambda: None)


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("see", {}, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}),
        ("see", {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}),
        ("see", {"MKL_NUM_THREADS": "2"}, {"MKL_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}),
        ("see", {"OMP_WAIT_POLICY": "active"}, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "active"}),
        ("train", {}, {"OMP_WAIT_POLICY": "passive"}),  # resumed with the same bits
        ("measure", {}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_the_environment_is_set_where_the_user_has_not(command, environment, expected):
    settle(command, environment)
    assert environment == expected


def test_nothing_is_set_where_it_would_be_too_late():
    environment: dict[str, str] = {}
    settle("see", environment)
    assert environment == {}


def test_the_load_is_read_from_the_kernel(tmp_path: Path):
    (tmp_path / "loadavg").write_text("0.10 0.20 0.30 6/512 4711\n")
    assert others(tmp_path / "loadavg") == 5
    assert others(tmp_path / "absent") is not None  # the average of the last minute


def test_the_quota_of_a_container(tmp_path: Path):
    for text, cores in (("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert quota(tmp_path / "cpu.max") == cores
    assert quota(tmp_path / "absent") is None
