import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from watched_models import mixed, x

import headwise as hw
from forked import run_together

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What both ranks say of every job: one start of processes for all."""
    folder = tmp_path_factory.mktemp("ranks")
    programs = [(HERE / "rank_jobs.py", rank, folder) for rank in (0, 1)]
    assert run_together(programs, folder, seconds=300) == ""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_ranks_of_ddp_together_are_one_batch(answers):
    one, two = (answer["ddp"] for answer in answers)
    with hw.watch(mixed().train()) as whole:
        whole.model(x(b=5))
    for answer in (one, two):
        assert_close(torch.tensor(answer["latest"]), whole.latest.numbers, rtol=1e-5, atol=1e-6)
        assert_close(torch.tensor(answer["totals"]), whole.latest.numbers, rtol=1e-5, atol=1e-6)  # the same twice
    largest = torch.maximum(torch.tensor(one["own"]), torch.tensor(two["own"]))
    assert one["own"] != two["own"]
    assert torch.equal(largest, whole.latest["max_logit"].nan_to_num(0.0))
    assert one["clipped"] == two["clipped"] > 0
    assert one["weight"] == two["weight"]


def test_losses_on_attention_train_ranks_of_ddp_as_one_batch(answers):
    one, two = (answer["losses"] for answer in answers)
    assert one["ddp"] == two["ddp"]
    for mine, whole in zip(one["ddp"], one["own, eager"], strict=True):
        assert_close(torch.tensor(mine), torch.tensor(whole), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["own", "recognised"])
def test_losses_on_attention_train_compiled_models(answers, kind):
    found = answers[0]["losses"]
    for mine, eager in zip(found[kind], found[f"{kind}, eager"], strict=True):
        assert_close(torch.tensor(mine), torch.tensor(eager), rtol=1e-4, atol=1e-6)


def test_sharded_weights_are_watched_and_clipped(answers):
    one, two = (answer["fsdp"] for answer in answers)
    assert one == two
    before, after = torch.tensor(one["before"]), torch.tensor(one["after"])
    assert_close(after, before.clamp_max(one["tau"]), rtol=1e-5, atol=1e-6)
    torch.manual_seed(5)
    layer = hw.MultiHeadAttention(24, 4, num_kv_heads=2, bias=True)
    with hw.watch(layer) as record:
        layer(x())
    assert_close(before, record.latest["max_logit"][0], rtol=1e-5, atol=1e-6)


def test_ranks_that_measured_different_layers_are_told_on_each(answers):
    for answer in answers:
        assert "the ranks have not measured the same layers" in answer["apart"]["error"]


def test_one_process_alone_is_told():
    with pytest.raises(hw.ConfigError, match=r"torch\.distributed is not initialised"):
        hw.watch(mixed()).reduce()
