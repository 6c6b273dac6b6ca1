"""The benchmarks run and agree; how fast things are is for their full sizes on a quiet machine to say."""

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from commands import Done

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import auto, machine, memory, plot, tables  # noqa: E402
from benchmarks.cases import CASES, FAMILIES, Goal, select  # noqa: E402
from benchmarks.checks import Disagreement, Referee, fingerprint, truth  # noqa: E402
from benchmarks.contestants import PEERS, Skip, build  # noqa: E402
from benchmarks.inputs import allowed, make  # noqa: E402
from benchmarks.machine import Machine  # noqa: E402
from benchmarks.modules import FAMILIES as MODULES  # noqa: E402
from benchmarks.questions import COUNTED  # noqa: E402
from benchmarks.results import Report, Row, best_kernel, median_of, ratio  # noqa: E402
from benchmarks.runner import _probe  # noqa: E402
from benchmarks.timing import Times, interleaved  # noqa: E402

MACHINE = Machine(
    "a CPU", 2, ("avx2",), 2, 0.1, "Linux x86_64", "3.11", "2.13", "BLAS mkl", "0.1.0",
    {"float32": 100e9, "bfloat16": 1e9}, "torch", 10e9, "torch",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def program(*arguments: object) -> Done:
    """`python -m benchmarks`, as people start it."""
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    env = {**os.environ, "PYTHONWARNINGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    return Done(done.returncode, done.stdout, done.stderr)


@cache
def this_machine() -> Machine:
    return machine.examine(0.01)


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(module, *arguments): a benchmark in this process; how quick the machine is was measured once for all."""

    def call(module: str, *arguments: object) -> Done:
        known = this_machine()
        for holder in (machine, importlib.import_module(f"benchmarks.{module}")):
            if hasattr(holder, "examine"):
                monkeypatch.setattr(holder, "examine", lambda seconds=1.0: known)
        monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
        try:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")
                code = importlib.import_module(f"benchmarks.{module}").main() or 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return Done(code, *capsys.readouterr())

    return call


def test_a_choice_that_is_slower_than_a_kernel_that_could_be_named_is_wrong() -> None:
    rows = [
        Row("x", "cpu", True, 7, median=2.0),
        Row("x", "torch_fused", True, 7, median=3.0),
        Row("x", "none", True, 7),
    ]
    good = auto.of_rows([*rows, Row("x", "auto", True, 7, median=2.19)])
    bad = auto.of_rows([*rows, Row("x", "auto", True, 7, median=3.0)])
    assert good is not None
    assert bad is not None
    assert (good.fastest, good.wrong, bad.wrong) == ("cpu", False, True)
    assert str(bad).endswith('"auto" takes 1.50 × the time of cpu: WRONG')
    assert auto.of_rows(rows) is None


@pytest.mark.thorough
def test_the_check_of_auto_goes_through_cases(run: Run) -> None:
    done = run("__main__", "--check-auto", "--quick", "--case", "tiny", "decode-16k-fp32")
    assert done.code == 0, done.err
    assert done.out.count('"auto" takes') == 3


@pytest.mark.thorough
def test_the_least_time_can_be_reported(run: Run) -> None:
    case = "--case", "tiny*fp32", "--peer", "sdpa", "--kernel", "auto"
    done = run("__main__", "--least", "--quick", "--no-memory", *case)
    assert done.code == 0, done.err
    assert "times are the least of the rounds" in done.out


@pytest.mark.thorough
def test_every_case_runs_small_and_is_told_of(run: Run, tmp_path: Path) -> None:
    done = program("--quick", "--no-memory", "--markdown", "--json", tmp_path / "all.json")
    assert done.code == 0, done.err
    data = json.loads((tmp_path / "all.json").read_text())
    assert {row["case"] for row in data["rows"]} == set(CASES)
    for row in data["rows"]:
        assert (row["median"] is None) == (row["skipped"] is not None or not CASES[row["case"]].timed), row
        assert row["skipped"] is not None or row["error"] < 1e-2  # float64 was there to compare with
    assert done.out.count("| `") == len(CASES)
    assert "these times say nothing" in done.out
    again = run("__main__", "--read", tmp_path / "all.json", "--markdown")
    assert again.out == done.out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("torch_fused", 0, 10_000_000), ("torch_blocks", 0, 100_000_000), ("eager", 1_000_000_000, 4_000_000_000)],
)
def test_memory_is_what_the_weights_take_or_far_less(name: str, least: int, most: int) -> None:
    """The weights of this case take 805 MB; eager holds scores and weights at once, headwise neither."""
    case = CASES["forward-1x12x4096x64-causal-fp32"]
    if least and memory.available() < 8_000_000_000:
        pytest.skip("less than 8 GB are free")
    assert least <= memory.peak(case, name, threads=1, patience=600) <= most


@pytest.mark.thorough
def test_memory_that_cannot_be_measured_has_a_reason() -> None:
    with pytest.raises(Skip, match="supports no mask but Causal"):
        memory.peak(CASES["memory-32768-window"].quick(), "torch_fused", threads=1)


@pytest.mark.thorough
def test_picture_is_drawn_small(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "n.png"
    done = run("__main__", "--quick", "--only-plot", "--no-memory", "--peer", "sdpa", "--plot", path)
    assert done.code == 0, done.err
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--case", "nobody"), "nobody"),
        (("--kernel", "nobody"), "torch_fused"),
        (("--peer", "nobody"), "sdpa"),
    ],
)
def test_wrong_name_is_told(run: Run, arguments: tuple[str, ...], told: str) -> None:
    done = run("__main__", *arguments)
    assert done.code == 2
    assert told in done.err


def test_cases_are_chosen_by_name_family_and_pattern() -> None:
    assert [case.name for case in select(["long-131072"])] == ["long-131072"]
    assert {case.family for case in select(["decode", "tiny"])} == {"decode", "tiny"}
    assert len(select(["*-2048-causal-bf16"])) == 5
    assert {case.family for case in select([])} == set(FAMILIES)
    with pytest.raises(KeyError, match="decade"):
        select(["decode", "decade"])


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", CASES)
def test_pairs_are_those_of_the_mask(name: str) -> None:
    case = CASES[name].quick()
    may = allowed(case)
    b, h, n, _ = case.size
    expected = n * case.kv_size[2] if may is None else int(may.sum())
    assert case.pairs == b * h * expected
    assert all(peer in PEERS for peer in case.peers)


def test_work_of_known_sizes() -> None:
    forward = CASES["forward-1x12x512x64-full-fp32"]
    assert forward.flops == 4 * 12 * 512 * 512 * 64
    assert CASES["train-2048-full-fp32"].flops == 14 * 12 * 2048 * 2048 * 64
    assert CASES["decode-16k-bf16"].read_bytes == 2 * (2 * 8 * 16_384 * 128 + 32 * 128)


@pytest.mark.parametrize("broken", ["mask", "scale", "head", "statistic"])
def test_a_wrong_result_is_found(broken: str) -> None:
    case = CASES["statistics-keys-2048-causal-fp32"].quick()
    inputs = make(case, 0)
    contestant = build("torch_blocks", case, inputs)
    named = contestant.named(contestant.call())
    assert (Referee.of(case, inputs).check("right", named) or 0) < 1e-6
    wrong = dict(named)
    if broken == "mask":
        wrong["out"] = truth(replace(case, mask="full"), inputs)["out"].float()
    elif broken == "scale":
        wrong["out"] = named["out"] * 1.001
    elif broken == "head":
        wrong["out"] = named["out"].roll(1, 1)
    else:
        wrong["entropy"] = named["entropy"] * 1.01
    with pytest.raises(Disagreement, match="entropy" if broken == "statistic" else "out of wrong"):
        Referee.of(case, inputs).check("wrong", wrong)


def test_without_a_truth_they_are_compared_with_one_another() -> None:
    case = CASES["forward-1x12x512x64-full-fp32"].quick()
    inputs = make(case, 0)
    out = build("sdpa", case, inputs).call()
    referee = Referee(case)
    assert referee.check("first", {"out": out}) is None
    assert referee.check("second", {"out": out.clone()}) == 0
    with pytest.raises(Disagreement, match="out of third differs from first"):
        referee.check("third", {"out": out.flip(2)})
    with pytest.raises(Disagreement, match="not finite"):
        referee.check("fourth", {"out": out * torch.nan})
    assert fingerprint({"out": out}) != pytest.approx(fingerprint({"out": out.flip(2)}), abs=1e-4)


def test_a_kernel_that_refuses_is_left_out_with_its_reason() -> None:
    case = CASES["memory-32768-window"].quick()
    contestant = build("torch_fused", case, make(case, 0))
    with pytest.raises(Skip, match="supports no mask but Causal"):
        contestant.call()


def test_who_is_too_slow_is_left_out_before_it_is_run() -> None:
    with pytest.raises(Skip, match="patience for it is 0 s"):
        _probe(CASES["forward-1x12x2048x64-full-fp32"], "sdpa", 0.0)


def test_rounds_take_turns_and_begin_with_another() -> None:
    log: list[str] = []

    def call(name: str) -> object:
        log.append(name)
        return name

    calls = {name: [lambda name=name, i=i: call(f"{name}{i}") for i in range(2)] for name in "abc"}
    times, last = interleaved(calls, estimates=dict.fromkeys("abc", 1.0), rounds=4, seconds=60)
    assert log == ["a0", "b0", "c0", "b1", "c1", "a1", "c0", "a0", "b0", "a1", "b1", "c1"]
    assert all(len(each.seconds) == 4 for each in times.values())
    assert last == {name: (1, f"{name}1") for name in "abc"}


def test_quick_calls_are_repeated_within_a_round() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    interleaved({"a": [call]}, estimates={"a": 1e-4}, rounds=3, seconds=60)
    assert count == 3 * 20


def test_median_and_spread() -> None:
    times = Times((5.0, 1.0, 2.0, 3.0, 4.0))
    assert times.median == 3
    assert times.spread == pytest.approx((4 - 2) / 3)
    assert Times((1.0, 2.0, 3.0)).spread is None
    assert times.reported == 3.0
    assert replace(times, by_least=True).reported == 1.0


ROWS = [
    Row("decode-16k-fp32", "sdpa", False, 1, median=8.0, spread=0.02, memory=1_000_000),
    Row("decode-16k-fp32", "sdpa_rows", False, 1, median=4.0),
    Row("decode-16k-fp32", "bmm", False, 1, median=2.0),
    Row("decode-16k-fp32", "cpu", True, 1, median=1.0, bandwidth_share=0.5, memory=20_000_000),
    Row("decode-16k-fp32", "triton_gpu", True, 1, skipped="it requires an NVIDIA GPU"),
]


def test_ratios_and_verdicts() -> None:
    best = best_kernel(ROWS)
    assert best is not None
    assert best.contestant == "cpu"
    assert median_of(ROWS, "rewrite") == 2
    assert ratio(ROWS, best) == 1 / 8
    assert ratio(ROWS, best, "rewrite") == 1 / 2
    case = replace(CASES["decode-16k-fp32"], goals=(Goal(0.2), Goal(0.4, "rewrite"), Goal(0.5, "flex")))
    assert tables.verdicts(case, ROWS) == [
        "goal ≤ 0.2 × sdpa: cpu is at 0.12, met",
        "goal ≤ 0.4 × rewrite: cpu is at 0.50, not met",
        "goal ≤ 0.5 × flex: not known",
    ]


def test_markdown_shows_ratios_shares_and_who_is_left_out() -> None:
    report = Report(MACHINE, quick=False, rows=ROWS)
    text = tables.markdown(report)
    assert "| case | SDPA ms | cpu | rewrite | share of bandwidth | memory MB | spread | goal |" in text
    assert "| `decode-16k-fp32` | 8000 | 0.12 | 0.25 | 50% | 20 · 1.0 · — | ≤ 2% | " in text
    assert "| ≤ 2% | ≤ 0.2 × sdpa; ≤ 0.45 × rewrite |" in text
    assert "- triton_gpu in all of them: it requires an NVIDIA GPU" in text
    light = Report(MACHINE, quick=False, rows=[replace(row, memory=None) for row in ROWS])
    assert "| share of bandwidth | spread | goal |" in tables.markdown(light)  # with --no-memory


def test_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = Report(MACHINE, quick=False, rows=ROWS, sweep=ROWS[:1])
    report.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == report


def test_bfloat16_is_held_to_the_faster_peak() -> None:
    assert MACHINE.best_peak("bfloat16") == 100e9


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.55, 0.5, 0.45], [0.6, 0.5, 0.4]),
        ([1.0, 0.99], [1.0, 0.9]),
        ([0.0, -0.2], [0.1, 0.0]),
    ],
)
def test_labels_stand_apart_and_near_their_lines(wanted: list[float], expected: list[float]) -> None:
    assert plot.spaced(wanted, 0.1) == pytest.approx(expected)


@pytest.mark.thorough
def test_designs_are_trained_alike_and_written_down(run: Run, tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("one.txt", "two.txt")]
    for k, text in enumerate(texts):
        text.write_text("".join("武松打虎。The tiger "[(i * i + k) % 16] for i in range(3000)), encoding="utf-8")
    sizes = {"steps": 2, "d-model": 16, "num-layers": 1, "num-heads": 4, "d-ff": 40, "context": 56, "batch-size": 2}
    some = ["mqa", "sparse_mixture, 2 of 8"]
    options = ["--pages", tmp_path, "--seeds", 2, *(f"--{name}={size}" for name, size in sizes.items())]
    for more in (["--train-only"], []):  # the second time finds the runs
        done = run("designs", *texts, "--out", tmp_path / "runs", *options, *more, "--only", *some)
        assert done.code == 0, done.err
    page = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in page.splitlines() if line.count(" | ") > 8}
    rows.pop("---")
    assert set(rows) == {"design", "multi_head", *some}
    weights = [int(rows[label][4].replace(",", "")) for label in ("multi_head", *some)]
    assert max(weights) - min(weights) <= 16  # half of what one more unit of the network would add
    assert int(rows["multi_head"][7]) == 4 * int(rows["mqa"][7]) == 2 * 16 * 4
    assert (tmp_path / "pictures" / "designs_trained.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_every_module_row_runs_small(run: Run) -> None:
    done = run("modules", "--quick", "--seconds", 0.01)
    assert done.code == 0, done.err
    assert {line.split(" | ")[0].strip("| ") for line in done.out.splitlines() if "≤" in line} == set(MODULES)


@pytest.mark.thorough
def test_every_question_is_timed_small(run: Run) -> None:
    done = run("questions", "--quick", "--rounds", 1)
    assert done.code == 0, done.err
    rows = dict(line.strip("| ").split(" | ")[:2] for line in done.out.splitlines() if line.startswith("| "))
    together = sum(float(rows[name]) for name in COUNTED)
    assert float(rows["**roles, likeness, information together**"]) == pytest.approx(together, abs=0.03)


@pytest.mark.thorough
def test_watching_is_measured_small(run: Run) -> None:
    done = run("watch", "--quick", "--seconds", 0.01)
    assert done.code == 0, done.err
    rows = [line.strip("| ").split(" | ") for line in done.out.splitlines() if line.startswith("| ")]
    times = {(row[0], row[1]): row for row in rows if len(row) == 7}
    told = {(name, n) for name in ("inference", "training step") for n in ("33",)}
    assert told | {("GPT-2 of transformers, inference", n) for n in ("33", "66")} <= set(times)
    peaks = {row[0]: [float(cell) for cell in row[1:3]] for row in rows if len(row) == 4 and row[3].endswith("%")}
    assert peaks["training step"][0] > peaks["inference"][0] > 0


@pytest.mark.thorough
def test_a_measured_corpus_is_timed_small(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20, encoding="utf-8")
    done = run("corpus", tmp_path / "a.txt", "--quick", "--seconds", 0.01)
    assert done.code == 0, done.err
    assert "8 measures of 32 heads" in done.out
    row = done.out.splitlines()[-3].strip("| ").split(" | ")
    assert row[:2] == ["32", "8"]
    assert float(row[4]) > 0


@pytest.mark.thorough
def test_tiles_are_timed_small(run: Run) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    done = run("zoom", "--quick")
    assert done.code == 0, done.err
    rows = [line.strip("| ").split(" | ") for line in done.out.splitlines() if line.startswith("| ")][2:]
    assert [row[:2] for row in rows] == [["1", "q, k, lse"], ["4", "q, k, lse"], ["8", "the pyramid"]]
    for row in rows:
        asked = [float(number) for number in row[4:]]
        assert 0 < asked[0] <= asked[1]
    assert "these times say nothing" in done.out
