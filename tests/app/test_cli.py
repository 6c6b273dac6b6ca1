"""Commands as people type them; what they can mend comes as one line and exit code 2."""

import json
import re
from pathlib import Path

import pytest

from commands import Command, forked, program
from headwise_textbook import demonstration
from processes import files_no_larger_than


@pytest.mark.thorough
def test_see_prints_every_head_and_writes_the_page_and_pictures(model_folder: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "r.html", tmp_path / "png"
    done = forked(tmp_path, "see", "武松打虎😀。", "--model", model_folder, "--out", out, "--png", png, "--all")
    assert done.code == 0, done.err
    assert str(png) in done.out.splitlines()[-1]
    heads = re.findall(r"^ *(\d) +(\d) ", done.out, re.MULTILINE)
    assert heads == [(str(layer), str(head)) for layer in range(2) for head in range(5)]
    assert "武松打虎" in out.read_text(encoding="utf-8")
    assert len(list(png.glob("*.png"))) == 11


SORTED = "--all", "--sort", "entropy"


@pytest.mark.thorough
def test_see_reads_a_file_and_sorts(headwise: Command, model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "in.txt"
    text.write_text("武松打虎。\r\nThe tiger!", encoding="utf-8")
    done = headwise("see", "--file", text, "--model", model_folder, "--out", tmp_path / "r.html", *SORTED)
    assert done.code == 0, done.err
    entropies = [float(x) for x in re.findall(r"^ *\d +\d +([\d.]+)", done.out, re.MULTILINE)]
    assert entropies == sorted(entropies, reverse=True)
    assert len(entropies) == 10


def test_train_then_see_and_write_with_the_result(headwise: Command, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("武松打虎，林冲夜奔。" * 60, encoding="utf-8")
    out = tmp_path / "run"
    sizes = ("--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--d-ff", "20", "--context", "12")
    done = headwise("train", text, "--out", out, "--steps", "6", "--eval-every", "3", "--batch-size", "4", *sizes)
    assert done.code == 0, done.err
    assert "held-out loss, all" in done.out
    assert [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()] == [3, 6]
    written = [headwise("write", "--model", out, "--prompt", "武", "--length", "9", "--seed", "1") for _ in range(2)]
    assert written[0].code == 0, written[0].err
    assert written[0].out == written[1].out
    assert len(written[0].out.rstrip("\n")) == 10
    assert headwise("see", "武松", "--model", out, "--out", tmp_path / "r.html").code == 0


@pytest.mark.thorough
def test_train_another_design_then_see_and_write_with_it(headwise: Command, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("武松打虎，林冲夜奔。" * 60, encoding="utf-8")
    sizes = ("--d-model", "16", "--num-layers", "1", "--num-heads", "4", "--d-ff", "20", "--context", "12")
    design = ("--design", "sparse_mixture", "--num-kv-heads", "2", "--set", "top-k=2", "--order", "post")
    done = headwise("train", text, "--out", out, "--steps", "4", "--batch-size", "4", *sizes, *design)
    assert done.code == 0, done.err
    written = headwise("write", "--model", out, "--prompt", "武", "--length", "9", "--seed", "1")
    assert len(written.out.rstrip("\n")) == 10, written.err
    seen = headwise("see", "武松", "--model", out, "--out", tmp_path / "r.html")
    assert seen.code == 0, seen.err
    assert "1 layers × 4 heads (sparse_mixture, 2 KV)" in seen.out
    assert "did not select the head" in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_reconstruct_writes_its_report(headwise: Command, tmp_path: Path) -> None:
    text = tmp_path / "s.txt"
    text.write_text("武松打虎\n林冲\n", encoding="utf-8")
    options = "--out", tmp_path / "out", "--png", tmp_path / "png", "--lang", "zh"
    done = headwise("reconstruct", text, *options)
    assert done.code == 0, done.err
    assert "填充上的权重" in done.out
    assert "dropout" in done.out
    assert 'lang="zh"' in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    pictures = {path.name for path in (tmp_path / "png").iterdir()}
    assert pictures == {f"sentence-{s}-head-{h}.png" for s in (1, 2) for h in range(4)}


@pytest.mark.thorough
def test_train_demonstration_draws_twelve_pictures_and_says_what_is_bright(
    headwise: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With short passages; those of the novel take most of a minute."""
    monkeypatch.setattr(demonstration.demonstrate, "__defaults__", (("宋仁宗天子", "迷鳳閣，", "進道"),))
    folder = tmp_path / "out"
    done = headwise("train", "demonstration", "--out", folder, "--lang", "zh")
    assert done.code == 0, done.err
    pictures = [f"sentence-{s}-head-{h}.png" for s in (1, 2, 3) for h in range(4)]
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", *pictures]
    for line in ("字本身", "宋 → 天", "子 → 天", "閣 → 鳳"):
        assert len(re.findall(rf"^{line} +(?:[\d.]+ [亮暗] *){{4}}$", done.out, re.MULTILINE)) == 1, line
    assert "教程的头 1 是这里的第 0 头" in done.out
    assert "headwise train demonstration [OPTIONS]" in headwise("train", "demonstration", "--help").out
    assert "--watch-heads" in headwise("train", "--help").out
    assert headwise("train-demonstration").code == 2


@pytest.mark.thorough
def test_trace_and_measures_print(headwise: Command) -> None:
    done = headwise("trace", "--seq", "3", "--causal", "--lang", "zh")
    assert "加权和" in done.out
    latent = headwise("trace", "--design", "latent", "--set", "latent-dim=3", "--num-heads", "4").out
    assert "W_DKV" in latent
    assert "[1 × 4 × 3]" in latent
    from headwise.stats import GIVEN, MEASURES

    listed = headwise("measures").out
    assert all(name in listed for name in [*MEASURES, *GIVEN])


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["see", ""], ["the text is empty"]),
        (["see", "武", "--file", "x.txt"], ["not both"]),
        (["see", "--file", "missing.txt"], ["missing.txt"]),
        (["see", "--file", "latin.txt"], ["latin.txt", "not UTF-8", "0xe9", "offset 3"]),
        (["see", "--file", "empty.txt"], ["empty.txt", "is empty"]),
        (["see", "武", "--sort", "beauty"], ["sort='beauty'", "entropy"]),
        (["see", "武", "--lang", "fr", "--model", "nowhere"], ["lang='fr'", "'en' or 'zh'"]),  # before any work
        (["see", "武", "--model", "nowhere"], ["nowhere", "does not exist"]),
        (["see", "武", "--model", "cut.safetensors"], ["cut.safetensors", "truncated"]),
        (["write", "--prompt", ""], ["prompt", "empty"]),
        (["write", "--temperature", "-1"], ["temperature=-1.0"]),
        (["train", "latin.txt", "--out", "o"], ["latin.txt", "not UTF-8"]),
        (["train", "short.txt", "--out", "o"], ["short.txt", "40 characters", "context"]),
        (["train", "short.txt", "--out", "o", "--experiment", "reconstruct"], ["headwise reconstruct FILE --out DIR"]),
        (["train", "long.txt", "--out", "o", "--d-model", "510"], ["d_model=510 is not divisible by num_heads=8"]),
        (["train", "long.txt", "--out", "o", "--design", "wings"], ["design='wings'", "expected one of"]),
        (["train", "long.txt", "--out", "o", "--design", "convolution"], ["design='convolution'", "causal mask"]),
        (["train", "long.txt", "--out", "o", "--design", "gqa"], ["num_kv_heads", "gqa requires it"]),
        (["train", "long.txt", "--out", "o", "--set", "top_k=2"], ["'top_k' is not an option of multi_head"]),
        (["train", "long.txt", "--out", "o", "--set", "top_k"], ["--set 'top_k'", "NAME=VALUE"]),
        (["trace", "--design", "convolution", "--causal"], ["mask", "ConvolutionAttention does not support `mask`"]),
        (["trace", "--d-model", "7", "--num-heads", "2"], ["d_model=7 is not divisible by num_heads=2"]),
    ],
)
def test_bad_input_is_one_clear_line(
    headwise: Command, args: list[str], words: list[str], model_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_text("武松" * 20, encoding="utf-8")
    (tmp_path / "long.txt").write_text("武松打虎" * 2000, encoding="utf-8")
    whole = (model_folder / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    if args[0] in ("see", "write") and "--model" not in args:
        args = [*args, "--model", str(model_folder)]
    done = headwise(*args)
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1
    for word in words:
        assert word in done.err, done.err


@pytest.mark.thorough
def test_a_program_that_was_given_bad_input_ends_with_one_clear_line(tmp_path: Path) -> None:
    done = program("see", "--file", tmp_path / "missing.txt", "--out", tmp_path / "r.html")
    assert (done.code, done.out) == (2, "")
    assert "missing.txt" in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_full_disk_leaves_no_half_report(headwise: Command, model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    out.write_text("the old report", encoding="utf-8")
    with files_no_larger_than(8192):
        done = headwise("see", "武松", "--model", model_folder, "--out", out)
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.err
    assert out.read_text(encoding="utf-8") == "the old report"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
