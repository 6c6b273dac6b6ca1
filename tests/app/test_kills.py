"""SIGKILL at any time: the same command then exits with 0, and leaves the bits of a run that was never killed."""

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kills import kill_when, run, survive

from headwise.lm.checkpoint import MODEL_FILE, read, save_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer
from headwise.lm.train import LOG_FILE, TRAINING_FILE

pytestmark = pytest.mark.skipif(os.name != "posix", reason="no SIGKILL here")
WORDS = ["话说", "武松", "打虎。", "The tiger", " sleeps!", "又来", "再来？\n"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that drops out, and a text."""
    folder, draw = tmp_path_factory.mktemp("given"), random.Random(5)
    text = "".join(draw.choice(WORDS) for _ in range(30_000))
    (folder / "tale.txt").write_text(text, encoding="utf-8")
    (folder / "short.txt").write_text(text[:9000], encoding="utf-8")
    torch.manual_seed(3)
    tokenizer = CharTokenizer.from_text(text)
    config = DecoderConfig(
        tokenizer.vocab_size, d_model=20, num_layers=2, num_heads=5, d_ff=31, context=24, dropout=0.2
    )
    save_model(folder / "model" / MODEL_FILE, Decoder(config), tokenizer, {"step": 0})
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[], Path]:
    """A new folder at each call."""
    numbers = itertools.count()
    return lambda: tmp_path / f"{next(numbers)}"


def one_file(name: str) -> Callable[[Path], bytes]:
    return lambda folder: (folder / name).read_bytes()


def trained(folder: Path) -> Any:
    """Weights, optimiser and log, without the seconds that they took."""
    tensors, header = read(folder / "out" / TRAINING_FILE)
    state = {name: (x.dtype, tuple(x.shape), x.numpy().tobytes()) for name, x in tensors.items()}
    info = json.loads(header["info"])
    lines = [json.loads(line) for line in (folder / "out" / LOG_FILE).read_text("utf-8").splitlines()]
    for timed in (info, *info["log"], *lines):
        timed.pop("seconds")
    return state, info, lines, (folder / "out" / MODEL_FILE).read_bytes()


CASES: dict[str, tuple[list[str], str, Callable[[Path], Any]]] = {
    "train": (
        ["train", "GIVEN/short.txt", "--out", "out", "--d-model", "28", "--num-layers", "2", "--num-heads", "7",
         "--d-ff", "33", "--context", "17", "--batch-size", "5", "--steps", "54", "--eval-every", "18",
         "--save-seconds", "0.1", "--warmup", "5", "--dropout", "0.1"],
        f"out/{TRAINING_FILE}", trained,
    ),
    "measure": (
        ["measure", "--file", "GIVEN/tale.txt", "--model", "GIVEN/model", "--out", "stats.csv", "--measures",
         "entropy,max_logit", "--max-tokens", "20000", "--batch", "64"],
        "stats.csv.about.json", one_file("stats.csv"),
    ),
    "prune": (
        ["prune", "--file", "GIVEN/short.txt", "--model", "GIVEN/model", "--remove", "3", "--orders", "1",
         "--windows", "4", "--out", "out", "--yes"],
        f"out/{MODEL_FILE}", one_file(f"out/{MODEL_FILE}"),
    ),
    "prune and heal": (
        ["prune", "--file", "GIVEN/short.txt", "--model", "GIVEN/model", "--heads", "0.1,1.4", "--orders", "1",
         "--windows", "4", "--heal", "40", "--lr", "0.01", "--out", "out", "--yes"],
        f"out/{MODEL_FILE}", one_file(f"out/{MODEL_FILE}"),
    ),
    "convert and heal": (
        ["convert", "--file", "GIVEN/short.txt", "--model", "GIVEN/model", "--num-kv-heads", "1", "--windows", "4",
         "--heal", "40", "--lr", "0.01", "--out", "out", "--yes"],
        f"out/{MODEL_FILE}", one_file(f"out/{MODEL_FILE}"),
    ),
    "budget": (
        ["budget", "--file", "GIVEN/short.txt", "--model", "GIVEN/model", "--window", "5", "--sinks", "2",
         "--threshold", "0.3", "--windows", "4", "--out", "short.json", "--yes"],
        "short.json", one_file("short.json"),
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["train", "measure", "prune and heal"])
def test_a_killed_command_ends_as_one_that_was_not(name: str, given: Path, folders: Callable[[], Path]) -> None:
    args, result, same = CASES[name]
    survive(with_given(args, given), folders, result, same, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_twenty_kills_of_each_command(name: str, given: Path, folders: Callable[[], Path]) -> None:
    args, result, same = CASES[name]
    late = survive(with_given(args, given), folders, result, same, kills=20, seed=2)
    assert late >= 2  # the very end was met too


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["prune", "budget", "measure"])
def test_a_command_knows_its_own_finished_result(name: str, given: Path, folders: Callable[[], Path]) -> None:
    args, result, same = CASES[name]
    args, folder = with_given(args, given), folders()
    run(args, folder)
    before, time = same(folder), (folder / result).stat().st_mtime_ns
    again = run(args, folder)
    assert again.code == 0, again.said
    assert "finished" in again.said
    assert (same(folder), (folder / result).stat().st_mtime_ns) == (before, time)
    other = [{"3": "2", "5": "6", "20000": "15000"}.get(word, word) for word in args]
    refused = run(other, folder)
    assert refused.code == 2
    assert "--restart" in refused.said or "--force" in refused.said
    assert same(folder) == before


@pytest.mark.thorough
def test_what_a_finished_command_did_not_write_yet_is_written(given: Path, folders: Callable[[], Path]) -> None:
    """As after a kill between the model and the JSON file, the last one."""
    args, result, same = CASES["prune and heal"]
    args, folder = [*with_given(args, given), "--json", "told.json"], folders()
    kill_when(folder / result, 0.0, args, folder)
    before, time = same(folder), (folder / result).stat().st_mtime_ns
    assert run(args, folder).code == 0
    told = json.loads((folder / "told.json").read_text("utf-8"))
    assert list(told["judged"]) == ["before", "pruned", "healed"]
    assert (same(folder), (folder / result).stat().st_mtime_ns) == (before, time)
    changed = {**told, "made_by": {}}  # of another run
    (folder / "told.json").write_text(json.dumps(changed), "utf-8")
    assert run(args, folder).code == 0
    again = json.loads((folder / "told.json").read_text("utf-8"))
    assert again["made_by"] == told["made_by"]


def with_given(args: list[str], given: Path) -> list[str]:
    return [word.replace("GIVEN", str(given)) for word in args]
