"""Errors that a user of the command line can cause, in Chinese: one line without an English sentence."""

import copy
import pickle
import re
from pathlib import Path

import pytest

from commands import Command
from headwise.cli.program import in_words
from headwise.errors import ConfigError, TextError, unknown_name

WRONG = [
    ["see", "--file", "empty.txt"], ["see", "--file", "binary.txt"], ["see", "--file", "absent.txt"],
    ["see", "--file=absent.txt"], ["see", "--file", "folder"], ["see", "武", "--file", "x"], ["see", ""],
    ["see", "武", "--model", "gpt2"], ["see", "武", "--sort", "entropi"], ["see", "武", "--view", "foo=x"],
    ["see", "武", "--view", "html"], ["see", "武", "--window", "3"], ["see", "武", "--out", "folder"],
    ["see", "武", "--out", "short.txt/x"], ["see", "--cells", "3"], ["see", "--modle", "x"], ["sea"], ["--wings"],
    ["measure", "--file", "absent.txt", "--out", "o.csv"], ["measure", "--file", "short.txt", "--out", "o.xyz"],
    ["measure", "--file", "short.txt", "--out", "o.csv", "--measures", "entropi"],
    ["measure", "--file", "short.txt", "--out", "o.csv", "--layers", "9"],
    ["measure", "--file", "short.txt", "--out", "o.csv", "--layers", "x"],
    ["measure", "--file", "short.txt", "--out", "o.csv", "--per", "x"],
    ["measure", "--file", "-", "--out", "o.csv"],
    ["train"], ["train", "short.txt", "--out", "o"], ["train", "absent.txt", "--out", "o"],
    ["train", "short.txt", "--out", "o", "--design", "gq"], ["train", "short.txt", "--out", "o", "--lr", "-1"],
    ["train", "short.txt", "--out", "o", "--dropout", "2"], ["train", "short.txt", "--out", "o", "--order", "x"],
    ["train", "short.txt", "--out", "o", "--precision", "x"], ["train", "short.txt", "--out", "o", "--steps", "0"],
    ["train", "short.txt", "--out", "o", "--set", "x"], ["train", "short.txt", "--out", "o", "--experiment", "x"],
    ["train", "short.txt", "--out", "o", "--length", "7"], ["train", "short.txt", "--out", "short.txt"],
    ["train", "short.txt", "--out", "o", "--repeat-share", "x"],
    ["write", "--prompt", ""], ["write", "--temperature", "-1"], ["write", "--top-p", "3"], ["write", "--top-k", "0"],
    ["write", "--model", "absent"], ["write", "--budget", "absent.json"], ["write", "--length", "x"],
    ["plan", "model", "lama"], ["plan", "gpt-3"], ["plan", "--config", "gpt-3"], ["plan", "layer", "mqa"],
    ["plan", "layer", "--d-model", "64", "--num-heads", "5"], ["plan", "layer", "--d-model", "64", "--num-heads", "0"],
    ["plan", "layer", "--d-model", "64", "--num-heads", "4", "--seq", "0"], ["plan", "list", "--json", "--markdown"],
    ["plan", "model", "gpt-3", "--d-model", "64"], ["plan", "trade-off"], ["plan", "trade-off", "lama"],
    ["plan", "layer", "--d-model", "8"], ["plan", "model", "bert-base", "--cache", "int8"],
    ["plan", "layer", "convolution", "--d-model", "8", "--num-heads", "2"], ["plan", "designs", "--d-model", "8"],
    ["plan", "model", "gpt-3", "--link", "1e9"], ["plan", "model", "gpt-3", "--devices", "0"],
    ["trace", "--seq", "0"], ["trace", "--seq", "1.5"], ["trace", "--num-heads", "3"], ["trace", "--design", "foo"],
    ["trace", "--set", "wings=2"], ["trace", "--set", "dropout=x"], ["trace", "--set", "x"],
    ["claims", "--only", "spliting"], ["claims", "--json", "--markdown"],
    ["claims", "--only", "splitting", "--all"], ["tour", "99.1"], ["check", "splitt"], ["check", "crossover", "absent"],
    ["check", "crossover", "empty.txt"], ["check", "crossover", "short.txt", "--seconds", "0"],
    ["check", "crossover", "short.txt", "--seed", "-1"],
    ["prune", "--file", "short.txt", "--out", "p"], ["prune", "--file", "short.txt", "--remove", "0", "--out", "p"],
    ["prune", "--file", "short.txt", "--share", "x"], ["prune", "--file", "short.txt", "--remove", "1"],
    ["prune", "--file", "short.txt", "--heads", "x", "--dry-run"],
    ["prune", "--file", "short.txt", "--remove", "1", "--by", "foo", "--dry-run"],
    ["prune", "--file", "absent.txt", "--remove", "1", "--dry-run"],
    ["prune", "--file", "-", "--remove", "1", "--out", "p"],
    ["convert", "--file", "short.txt", "--num-kv-heads", "0", "--dry-run"],
    ["convert", "--file", "short.txt", "--num-kv-heads", "1", "--method", "foo", "--dry-run"],
    ["convert", "--file", "short.txt", "--num-kv-heads", "1", "--heal", "-1", "--dry-run"],
    ["budget", "--file", "short.txt", "--threshold", "3"], ["budget", "--file", "short.txt", "--lengths", "x"],
    ["budget", "--file", "short.txt", "--window", "0"], ["view", "--port", "99999"], ["view", "--file", "absent.txt"],
    ["doctor", "--wings"], ["measures", "extra"], ["see", "武", "--model", "folder"],
    ["see", "武", "--model", "short.txt"], ["write", "--model", "short.txt"], ["see", "武", "--beside", "folder"],
    ["plan", "trade-off", "7"], ["plan", "layer", "--d-model", "8", "--sinks", "1"],
    ["measure", "--file", "folder", "--out", "o.csv"], ["measure", "--file", "*.nothing", "--out", "o.csv"],
]  # fmt: skip


@pytest.mark.thorough_except("tour 99.1", "see --file empty.txt", "see --file binary.txt", "see --file absent.txt")
@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_an_error_is_one_line_in_chinese(
    headwise: Command, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short.txt").write_text("武松打虎\n", encoding="utf-8")
    done = headwise(*args, "--lang", "zh")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch("错误： .*[一-鿿].*\n", done.err)
    # Without commands, and without what another library says about a file.
    said = re.sub(r"`[^`]*`|headwise [a-z -]* -h|hf download .*?（|\(.*?\)|pip install [\w ]*|已损坏：.*", "", done.err)
    assert re.findall(r"[A-Za-z]+ (?:[a-z]+ )+[a-z]+", said) == []
    english = headwise(*args, "--lang", "en")
    assert english.code == 2
    assert not re.search("[，。；：一-鿿]", english.err.replace("武", ""))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("No such option: --modle (Possible options: --model, --mode)", "没有选项 --modle；相近的有 --model, --mode"),
        ("No such option '--modle'. Did you mean '--model'?", "没有选项 --modle；是否要用 '--model'？"),
        (
            "No such option '--modle'. (Did you mean one of: '--model', '--mode'?)",
            "没有选项 --modle；是否要用 '--model', '--mode'？",
        ),
    ],
)
def test_an_unknown_option_in_the_words_of_each_version_of_typer_and_click(message: str, said: str):
    class Unknown(Exception):
        def format_message(self) -> str:
            return message

    assert in_words(Unknown(), [], (), "zh") == said


def test_an_error_keeps_its_chinese_and_has_the_english_text_otherwise():
    made = unknown_name("heads", 3, "12")
    for one in (made, copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert (str(one), one.zh) == ("heads=3: expected '1' or '2'", "heads=3：应为 '1'、'2' 之一")
        assert type(one) is ConfigError
    assert TextError("empty").zh == "empty"


@pytest.mark.thorough
def test_the_plan_of_a_change_names_the_model_and_units_in_chinese(headwise: Command, tmp_path: Path):
    (tmp_path / "text.txt").write_text("话说武松在路上行了几日，来到阳谷县地面。\n" * 300, encoding="utf-8")
    options = ["--file", tmp_path / "text.txt", "--windows", "1", "--context", "16", "--lang", "zh"]
    pruned = headwise("prune", *options, "--remove", "1", "--orders", "1", "--dry-run").out
    assert "内置模型" in pruned
    assert "及其重要性（损失）" in pruned
    measured = headwise(
        "measure", "--file", tmp_path / "text.txt", "--out", tmp_path / "o.csv", "--max-tokens", "40",
        "--measures", "entropy,max_logit", "--lang", "zh",
    ).out  # fmt: skip
    assert re.search(r"entropy +奈特", measured)
    assert re.search(r"max_logit +分数", measured)
