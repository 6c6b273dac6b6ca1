"""`headwise doctor` says what runs here, and agrees with what then runs."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import headwise.kernels.cpu.library as compiled
from commands import forked
from headwise.cli.doctor import (
    NEEDS,
    Choice,
    Examination,
    Native,
    Target,
    examine,
    named,
    native_facts,
    print_examination,
    reason,
)
from headwise.kernels import AUTOMATIC, KERNELS
from headwise.kernels.cpu.passes import Timing
from headwise.map.attention import attend
from headwise.masks import Causal, Window
from headwise.wording import in_language, speaking


@pytest.fixture(scope="module")
def found() -> Examination:
    return examine()


def shown(found: Examination, width: int, capsys: pytest.CaptureFixture[str]) -> str:
    print_examination(found, Console(width=width))
    return capsys.readouterr().out


def test_every_kernel_is_named(found: Examination) -> None:
    assert found.automatic == list(AUTOMATIC)
    assert {*found.automatic, *found.named} == set(KERNELS)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("causal, float32", {"mask": Causal()}),
        ("causal, sliding window of 128", {"mask": Causal() & Window(128)}),
        ("causal, with gradients and dropout", {"mask": Causal(), "dropout_p": 0.1}),
    ],
)
def test_picks_are_what_then_runs(words: str, options: dict[str, object], found: Examination) -> None:
    q = torch.zeros(1, 12, 1024, 64, requires_grad="gradients" in words)
    _, amap = attend(q, q, q, return_map=True, **options)  # type: ignore[call-overload]
    said: Choice = next(choice for choice in found.choices if choice.call == words)
    assert amap.kernel == said.picked
    assert {name: said.refusals[name] for name in amap.refusals} == amap.refusals
    assert said.picked not in said.refusals


@pytest.mark.thorough
def test_json_tells_of_a_library_that_does_not_load_and_of_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "none.so"
    done = forked(tmp_path, "doctor", "--json", HEADWISE_NATIVE_LIBRARY=str(path))
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["versions"]["torch"] == torch.__version__
    assert said["machine"]["threads"] == torch.get_num_threads()
    assert said["native"]["path"] == str(path)
    assert "none.so is missing" in said["native"]["reason"]
    assert said["automatic"] == list(AUTOMATIC)
    assert len(said["choices"]) >= 8


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HEADWISE_TARGET", "avx513", "HEADWISE_TARGET='avx513': there is no such target"),
        ("HEADWISE_NATIVE_LIBRARY", "/none.so", "HEADWISE_NATIVE_LIBRARY='/none.so': none.so is missing"),
        ("HEADWISE_KERNEL", "fastest", "HEADWISE_KERNEL='fastest': expected 'auto' or one of"),
    ],
)
def test_environment_that_nobody_can_follow_is_one_line(name: str, value: str, words: str, tmp_path: Path) -> None:
    done = forked(tmp_path, "doctor", **{name: value})
    assert done.code == 0, done.err
    assert "Traceback" not in done.out + done.err
    assert [words in line for line in done.out.splitlines()].count(True) == 1
    assert done.out.count(words) == 1


@pytest.mark.parametrize("width", [60, 120])
def test_table_names_every_call_and_kernel(width: int, found: Examination, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(found, width, capsys)
    assert all(name in out for name in KERNELS)
    assert all(choice.call.split()[0] in out for choice in found.choices)
    assert torch.__version__ in out
    assert max(map(len, out.partition("\ncall ")[2].splitlines())) <= width
    assert "\x1b" not in out  # no colours into a pipe


def test_loaded_library_is_described(found: Examination, capsys: pytest.CaptureFixture[str]) -> None:
    native, loaded = found.native, compiled.library()
    assert native.path == str(loaded.path)
    if loaded.handle is None:
        assert native.reason == loaded.reason
        assert f"not loaded  {native.reason}" in shown(found, 200, capsys)
    else:
        assert native.target in NEEDS
        assert {target.name for target in native.targets if target.compiled} == set(loaded.targets())
        used = next(target for target in native.targets if target.name == native.target)
        assert not used.lacking  # None where the CPU's features are not to be read
        assert f"target in use  {native.target}" in shown(found, 200, capsys)


@pytest.mark.thorough
def test_measured_targets_are_those_that_run_and_the_selected_one_stays(capsys: pytest.CaptureFixture[str]) -> None:
    native = compiled.library()
    if native.handle is None:
        pytest.skip(str(native.reason))
    before = native.target()
    found = examine(measure=True)
    assert native.target() == before
    assert found.timings is not None
    assert [timing.dtype for timing in found.timings] == ["float32", "bfloat16"]
    runs = [name for name in native.targets() if native.refusal(name) is None]
    for timing in found.timings:
        assert list(timing.milliseconds) == runs
        assert timing.selected == before
    text = shown(found, 100, capsys)
    assert text.count("selected\n") == 2
    assert json.loads(json.dumps(asdict(found)))["timings"][1]["milliseconds"].keys() == set(runs)


def test_selected_target_that_is_slower_is_reported(found: Examination, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Timing("bfloat16", {"avx512bf16": 141.0, "avx512": 93.0}, "avx512bf16")
    equal = Timing("float32", {"avx512bf16": 93.0, "avx512": 91.0}, "avx512bf16")
    assert (slow.wrong, equal.wrong) == (True, False)
    text = shown(replace(found, timings=[equal, slow]), 200, capsys)
    assert "set HEADWISE_TARGET=avx512 for bfloat16" in text
    assert "for float32," not in text


@pytest.mark.parametrize(
    ("target", "forced", "words"),
    [
        (Target("avx512", True, ["avx512f"]), None, "the CPU lacks avx512f"),
        (Target("avx512", False, []), None, "not compiled"),
        (Target("avx512", True, []), "avx2", "disabled by HEADWISE_TARGET"),
        (Target("avx512", True, [], "Linux does not permit it"), None, "Linux does not permit it"),
        (Target("avx512", True, []), None, "avx2 is faster on this CPU; HEADWISE_TARGET=avx512 selects it"),
    ],
)
def test_why_nothing_faster_runs(target: Target, forced: str | None, words: str) -> None:
    native = Native("lib", None, 1, "avx2", forced, [Target("portable", True, []), Target("avx2", True, []), target])
    assert words in native_facts(native)["not avx512"]
    assert "not portable" not in native_facts(native)


def test_the_examination_is_in_chinese(found: Examination, capsys: pytest.CaptureFixture[str]) -> None:
    names = [*found.machine, *(choice.call for choice in found.choices)]
    reasons = {choice.refusals.get(name) for choice in found.choices for name in ("torch_fused", "reference")} - {None}
    assert len(reasons) > 2
    for words in (*map(named, names), *map(reason, reasons)):
        assert re.search("[一-鿿]", in_language(words, "zh")), words
    slow = Timing("bfloat16", {"avx512bf16": 141.0, "avx512": 93.0}, "avx512bf16")
    targets = [Target("avx2", True, []), Target("avx512", True, ["avx512f"]), Target("amx", False, [])]
    native = Native("lib.so", None, 1, "avx2", None, targets)
    with speaking("zh"):
        text = shown(replace(found, native=native, timings=[slow]), 200, capsys)
    for words in (
        "未用 avx512  CPU 不支持 avx512f\n",
        "未用 amx  未编译：",
        "对 bfloat16 请设置",
        "因果，滑动窗口 128",
    ):
        assert words in text
    assert re.findall(r"(?<![\w(])[A-Za-z]+ [a-z]+ [a-z]+", text) == []
    with speaking("en"):
        assert re.search("[一-鿿]", shown(replace(found, timings=[slow]), 200, capsys)) is None
