"""What the processes of a sweep say to one another, over a store in one process."""

import pytest
import torch.distributed as dist

from headwise.corpus.work import Ranks, Stopped
from headwise.errors import ConfigError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")


@pytest.fixture
def both():
    store = dist.HashStore()
    return [Ranks(rank, 2, store) for rank in (0, 1)]


def test_each_unit_is_taken_once(both):
    assert [both[i % 2].take() for i in range(5)] == [0, 1, 2, 3, 4]
    assert both[0].count("units", 4) == 4
    assert both[1].count("units", 1) == 5
    assert [Ranks().take(), Ranks().first] == [0, True]


def test_what_one_says_the_other_hears(both):
    both[0].publish("plan", {"left": [1, 2]})
    assert both[1].wait_for("plan") == {"left": [1, 2]}


@pytest.mark.thorough
def test_the_first_to_fail_is_beats(both):
    both[1].fail("no more paper")
    both[0].fail("no more ink")
    for one in both:
        with pytest.raises(Stopped, match=r"^process 1 of 2: no more paper$"):
            one.check()
    with pytest.raises(Stopped):
        both[0].wait_for("plan")


def test_half_an_environment_is_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"could not connect.*RANK"):
        Ranks.joined()
