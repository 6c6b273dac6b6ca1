"""Training learns, can be stopped at any moment, and goes on as if it had not been."""

import inspect
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from baselines import baseline_losses

from forked import Program
from headwise.base.files import taken
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.checkpoint import MODEL_FILE, load_checkpoint, read
from headwise.lm.texts import Corpus
from headwise.lm.train import (
    LOG_FILE,
    TRAINING_FILE,
    Outcome,
    Resumed,
    TrainingStep,
    heldout_loss,
    read_shares,
    share_at,
    train,
)

SMALL: dict[str, Any] = {
    "d_model": 28, "num_layers": 2, "num_heads": 7, "d_ff": 33, "context": 17, "dropout": 0.1, "batch_size": 5,
    "warmup": 3, "seed": 7, "precision": "float32",
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A text with much to learn: words from a short list, in random order."""
    words = ["the heroes ", "of the marsh ", "drank three bowls ", "and crossed the ridge.\n", "武松打虎", "林冲上山\n"]
    text = "".join(random.Random(0).choices(words, k=600))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    return tmp_path / "text.txt"


def run(file: Path, out: Path, **options: Any) -> tuple[Outcome, list[TrainingStep]]:
    seen: list[TrainingStep] = []
    outcome = train([file], out, **(SMALL | {"watch": seen.append, "steps": 12, "eval_every": 4} | options))
    return outcome, seen


def same_files(one: Path, other: Path) -> None:
    for name in (MODEL_FILE, TRAINING_FILE):
        (a, _), (b, _) = read(one / name), read(other / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    logs = [[json.loads(line) for line in (x / LOG_FILE).read_text().splitlines()] for x in (one, other)]
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in logs[0]] == [
        {k: v for k, v in line.items() if k != "seconds"} for line in logs[1]
    ]


@pytest.mark.thorough
def test_training_beats_counting(file: Path, tmp_path: Path) -> None:
    outcome, seen = run(file, tmp_path / "out", steps=250, eval_every=50, batch_size=16, lr=6e-3, warmup=20)
    assert outcome.finished
    assert outcome.step == 250
    assert [p.step for p in seen] == list(range(1, 251))
    decoder, tokenizer, info = load_checkpoint(tmp_path / "out")
    corpus = Corpus.read([file], context=17, tokenizer=tokenizer)
    windows = corpus.heldout_windows(17, most=24)
    counted = baseline_losses(corpus.train, windows, tokenizer.vocab_size)
    learnt = heldout_loss(decoder, windows)
    assert learnt[0] < 0.8 * counted["bigram"][0] < counted["unigram"][0]
    assert learnt[0] == pytest.approx(outcome.heldout["all"], rel=1e-5)
    assert info["heldout"] == outcome.heldout
    assert outcome.heldout["all"] == min(line["heldout_loss"] for line in outcome.log)


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_run(file: Path, tmp_path: Path) -> None:
    losses = [
        [p.loss for p in run(file, tmp_path / name, seed=seed)[1]] for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert losses[0] == losses[1] != losses[2]


def interrupt_at(step: int) -> Any:
    def watch(progress: TrainingStep) -> None:
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return watch


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 4, 7, 11])
def test_a_run_that_is_interrupted_and_resumed_equals_one_that_is_not(file: Path, tmp_path: Path, step: int) -> None:
    run(file, tmp_path / "whole")
    handler = signal.getsignal(signal.SIGINT)
    outcome, _ = run(file, tmp_path / "parts", watch=interrupt_at(step))
    assert signal.getsignal(signal.SIGINT) is handler
    assert not outcome.finished
    assert outcome.step == step
    outcome, seen = run(file, tmp_path / "parts")
    assert outcome.finished
    assert [p.step for p in seen] == list(range(step + 1, 13))  # nothing that was done is done again
    same_files(tmp_path / "whole", tmp_path / "parts")


class Crash(Exception):
    """As a kill: nothing is saved on the way out."""


def crash_at(step: int) -> Any:
    def watch(progress: TrainingStep) -> None:
        if progress.step == step:
            raise Crash

    return watch


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 7, 11])
def test_a_run_is_saved_by_time_between_evaluations(file: Path, tmp_path: Path, step: int) -> None:
    run(file, tmp_path / "whole")
    with pytest.raises(Crash):
        run(file, tmp_path / "parts", watch=crash_at(step), save_seconds=0.0)
    since: list[Resumed] = []
    _, seen = run(file, tmp_path / "parts", resumed=since.append)
    assert [p.step for p in seen] == list(range(step + 1, 13))
    assert [(one.step, one.steps) for one in since] == [(step, 12)]
    assert 0 <= since[0].seconds < 60
    same_files(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.thorough
def test_by_default_a_run_is_saved_within_a_minute(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("headwise.lm.train.time.monotonic", lambda: now[0])
    saved = []

    def watch(progress: TrainingStep) -> None:
        path = tmp_path / "out" / TRAINING_FILE
        saved.append(json.loads(read(path)[1]["info"])["step"] if path.exists() else 0)
        now[0] += 7.0

    run(file, tmp_path / "out", watch=watch, eval_every=100)
    assert saved == [0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 11, 12]  # after 35 s, 70 s, and the last one
    assert inspect.signature(train).parameters["save_seconds"].default <= 60


@pytest.mark.thorough
def test_a_finished_run_is_known_and_left_alone(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "out")
    before = (tmp_path / "out" / MODEL_FILE).read_bytes()
    since: list[Resumed] = []
    outcome, seen = run(file, tmp_path / "out", resumed=since.append)
    assert outcome.finished
    assert not seen
    assert since[0].step == since[0].steps == 12
    assert (tmp_path / "out" / MODEL_FILE).read_bytes() == before


@pytest.mark.thorough
def test_a_model_of_something_else_is_not_replaced(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "out")
    (tmp_path / "out" / TRAINING_FILE).unlink()
    before = (tmp_path / "out" / MODEL_FILE).read_bytes()
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors' contains a run with different settings \(lr\).*--fresh"
    ):
        run(file, tmp_path / "out", lr=1e-3)
    assert (tmp_path / "out" / MODEL_FILE).read_bytes() == before
    run(file, tmp_path / "out")  # of this run: as after a kill between its first evaluation and its first save
    assert (tmp_path / "out" / MODEL_FILE).read_bytes() == before
    run(file, tmp_path / "out", lr=1e-3, resume=False)
    assert (tmp_path / "out" / MODEL_FILE).read_bytes() != before


@pytest.mark.thorough
def test_a_run_is_not_continued_on_another_text(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "out", watch=interrupt_at(5))
    text = file.read_text("utf-8")
    at = text.index("heroes")
    file.write_text(f"{text[:at]}seroeh{text[at + 6 :]}", "utf-8")  # of the same length and characters
    with pytest.raises(CheckpointError, match=r"different settings \(sha256\)"):
        run(file, tmp_path / "out")


@pytest.mark.thorough
def test_training_leaves_the_generator_of_the_caller_alone(file: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    run(file, tmp_path / "out")
    load_checkpoint(tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.thorough
def test_one_run_at_a_time_writes_to_a_folder(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="no locks of files here")
    with (
        taken(tmp_path / "out", "out", folder=True),
        pytest.raises(ConfigError, match=rf"another run \(process {os.getpid()}\) is writing it"),
    ):
        run(file, tmp_path / "out")
    assert run(file, tmp_path / "out")[0].finished


@pytest.mark.thorough
def test_an_interrupt_at_the_last_step_is_a_finished_run(file: Path, tmp_path: Path) -> None:
    outcome, _ = run(file, tmp_path / "out", watch=interrupt_at(12))
    assert outcome.finished
    again, seen = run(file, tmp_path / "out")
    assert again.finished
    assert again.step == 12
    assert not seen


def test_fresh_starts_again(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "out", watch=interrupt_at(5))
    outcome, seen = run(file, tmp_path / "out", resume=False)
    assert seen[0].step == 1
    assert [line["step"] for line in outcome.log] == [4, 8, 12]
    assert len((tmp_path / "out" / LOG_FILE).read_text().splitlines()) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 4, 5])
def test_a_fresh_run_that_is_killed_is_not_taken_for_the_old_one(file: Path, tmp_path: Path, step: int) -> None:
    run(file, tmp_path / "out")
    whole = (tmp_path / "out" / MODEL_FILE).read_bytes()
    with pytest.raises(Crash):
        run(file, tmp_path / "out", resume=False, watch=crash_at(step))
    _, seen = run(file, tmp_path / "out")
    assert seen[0].step == (1 if step < 4 else 5)
    assert (tmp_path / "out" / MODEL_FILE).read_bytes() == whole


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"lr": 1e-3}, {"seed": 8}, {"steps": 13}, {"d_model": 14}, {"dropout": 0.2}])
def test_a_run_with_other_settings_is_not_gone_on_with(file: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    run(file, tmp_path / "out", watch=interrupt_at(5))
    with pytest.raises(CheckpointError, match="different settings"):
        run(file, tmp_path / "out", **options)


@pytest.mark.thorough
def test_a_broken_training_file_is_told(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "out")
    path = tmp_path / "out" / TRAINING_FILE
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"training\.safetensors.*truncated"):
        run(file, tmp_path / "out")


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_both_precisions_learn(file: Path, tmp_path: Path, precision: str) -> None:
    _, seen = run(file, tmp_path / "out", precision=precision, steps=60, eval_every=60, lr=5e-3)
    assert sum(p.loss for p in seen[-5:]) < 0.75 * sum(p.loss for p in seen[:5])


@pytest.mark.thorough
def test_a_loss_that_is_no_number_stops_the_run(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the loss became (nan|inf).*--lr"):
        run(file, tmp_path / "out", lr=1e30, warmup=0, steps=50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"eval_every": -1}, "eval_every=-1"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"save_seconds": -1.0}, r"save_seconds=-1\.0"),
        ({"precision": "float8"}, "precision='float8'"),
        ({"repeat_share": 1.5}, "repeat_share=1.5"),
        ({"d_model": 30}, "d_model=30 is not divisible by num_heads=7"),
    ],
)
def test_options_that_cannot_be_are_named(file: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(file, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


ENDLESS = """
import sys
from headwise.lm.train import train
train([sys.argv[1]], sys.argv[2], steps=10**6, eval_every=1, **eval(sys.argv[3]))
"""


@pytest.mark.thorough
def test_a_kill_at_any_moment_leaves_whole_files(file: Path, tmp_path: Path) -> None:
    """SIGKILL, several times over one folder: each run must go on from whole files that the last one left."""
    out, reached, script = tmp_path / "out", 0, tmp_path / "endless.py"
    script.write_text(ENDLESS)
    for delay in (0.05, 0.171, 0.01):
        program = Program((script, file, out, repr(SMALL)), tmp_path / "said")
        try:
            deadline = time.monotonic() + 120
            while not _gone_on(out, reached) and program.process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.005)
            assert program.process.is_alive(), "the run ended by itself"
            time.sleep(delay)
        finally:
            program.wait(0)
        load_checkpoint(out)
        step = json.loads(read(out / TRAINING_FILE)[1]["info"])["step"]
        assert step > reached
        reached = step


def _gone_on(out: Path, reached: int) -> bool:
    path = out / TRAINING_FILE
    return path.exists() and json.loads(read(path)[1]["info"])["step"] > reached


@pytest.mark.thorough
def test_a_run_can_start_from_another_model(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "first")
    first, tokenizer, _ = load_checkpoint(tmp_path / "first")
    other = tmp_path / "other.txt"
    other.write_text("林冲上山，武松打虎。the marsh\n" * 60, encoding="utf-8")
    options = {"steps": 1, "eval_every": 1, "lr": 1e-9, "warmup": 0, "d_ff": 99}
    outcome, _ = run(other, tmp_path / "second", init=tmp_path / "first", **options)
    second, same, info = load_checkpoint(tmp_path / "second")
    assert same.characters == tokenizer.characters
    assert second.config == first.config
    for name, weight in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], weight, rtol=0, atol=1e-6)
    assert info["settings"]["init"]["settings"]["files"] == ["text.txt"]
    assert outcome.finished


def test_shares_change_at_their_steps() -> None:
    shares = read_shares("0.1,0.5@10,0@20")
    assert [share_at(step, shares) for step in (0, 9, 10, 19, 20, 500)] == [0.1, 0.1, 0.5, 0.5, 0.0, 0.0]
    assert read_shares(0.25) == [(0, 0.25)]


@pytest.mark.parametrize("bad", ["", "x", "0.1@5", "0.1,0.2", "0.1,2@5", "0.1,0.2@9,0.3@4", "0.1,0.2@1.5"])
def test_bad_shares_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="repeat_share="):
        read_shares(bad)
