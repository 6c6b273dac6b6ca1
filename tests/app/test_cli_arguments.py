"""Arguments are checked before a model or a text is opened: with both absent, the error is about the argument."""

from pathlib import Path

import pytest

from commands import Command
from headwise.lm.loading import LoadedModel

CHANGE = ["--file", "absent.txt", "--model", "absent", "--dry-run"]
PRUNE = ["prune", *CHANGE, "--remove", "1"]
CONVERT = ["convert", *CHANGE, "--num-kv-heads", "2"]
BUDGET = ["budget", *CHANGE]
SEE = ["see", "武", "--model", "absent"]
MEASURE = ["measure", "--file", "text.txt", "--out", "new.csv", "--model", "absent"]
TRAIN = ["train", "absent.txt", "--out", "new"]
WRITE = ["write", "--model", "absent"]


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([*SEE, "--sort", "entropi"], ["sort='entropi'", "did you mean 'entropy'", "expected one of 'entropy', "]),
        ([*SEE, "--lang", "xx"], ["lang='xx'", "'en' or 'zh'"]),
        ([*SEE, "--view", "htlm=x"], ["view='htlm'", "html"]),
        (["view", "--model", "absent", "--port", "65537"], ["--port 65537", "0 to 65535"]),
        (["view", "--model", "absent", "--lang", "xx"], ["lang='xx'"]),
        ([*MEASURE, "--measures", "entropi"], ["'entropi'", "did you mean 'entropy'"]),
        ([*MEASURE, "--sort", "entropi"], ["sort='entropi'", "did you mean 'entropy'"]),
        ([*MEASURE, "--device", "abacus"], ["device='abacus'"]),
        ([*MEASURE, "--dtype", "float31"], ["dtype='float31'", "'float32'"]),
        ([*MEASURE, "--per", "page"], ["per='page'", "'file'"]),
        ([*MEASURE, "--window", "0"], ["window=0"]),
        ([*PRUNE, "--by", "ablatoin"], ["--by 'ablatoin'", "did you mean 'ablation'", "gradient"]),
        ([*PRUNE, "--orders", "0"], ["--orders 0"]),
        ([*PRUNE, "--penalty", "-1"], ["--penalty -1"]),
        ([*PRUNE, "--gate-steps", "0"], ["--gate-steps 0"]),
        ([*PRUNE, "--lr", "0"], ["--lr 0"]),
        ([*PRUNE, "--heal", "-1"], ["--heal -1"]),
        ([*PRUNE, "--windows", "0"], ["--windows 0"]),
        ([*PRUNE, "--context", "1"], ["--context 1"]),
        (["prune", *CHANGE, "--heads", "x"], ["--heads 'x'", "LAYER.HEAD"]),
        (["prune", *CHANGE, "--heads", "0.1", "--uniform"], ["--heads cannot be combined with", "--uniform"]),
        ([*CONVERT, "--method", "svdd"], ["--method 'svdd'", "did you mean 'svd'", "cluster"]),
        (["convert", *CHANGE, "--num-kv-heads", "0"], ["--num-kv-heads 0"]),
        ([*CONVERT, "--lr", "nan"], ["--lr nan"]),
        ([*BUDGET, "--window", "0"], ["--window 0"]),
        ([*BUDGET, "--threshold", "3"], ["--threshold 3"]),
        ([*BUDGET, "--lengths", "0"], ["--lengths"]),
        ([*WRITE, "--temperature", "-1"], ["temperature=-1"]),
        ([*WRITE, "--length", "-1"], ["length=-1"]),
        ([*WRITE, "--top-p", "3"], ["top_p=3"]),
        ([*WRITE, "--top-k", "0"], ["top_k=0"]),
        ([*WRITE, "--budget", "absent.json"], ["absent.json"]),
        ([*TRAIN, "--design", "gq"], ["design='gq'", "did you mean 'gqa'"]),
        ([*TRAIN, "--order", "mid"], ["order='mid'", "'pre'"]),
        ([*TRAIN, "--dropout", "3"], ["dropout=3"]),
        ([*TRAIN, "--num-heads", "7"], ["d_model=256", "num_heads=7"]),
        ([*TRAIN, "--set", "wings=2"], ["'wings'"]),
        ([*TRAIN, "--precision", "int8"], ["precision='int8'"]),
        (["claims", "--only", "complexty"], ["'complexty'", "did you mean 'complexity'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_argument_is_reported_before_any_work(
    headwise: Command, args: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("武松打虎", encoding="utf-8")
    done = headwise(*args)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    for word in words:
        assert word in done.err, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_statistic_that_this_model_does_not_have_is_reported_before_it_runs(
    headwise: Command, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(LoadedModel, "look", look)
    done = headwise("see", "武松打虎", "--model", model_folder, "--out", tmp_path / "r.html", "--sort", "next_mass")
    assert (done.code, done.out) == (2, "")
    assert "sort='next_mass': " in done.err
    assert "entropy" in done.err
