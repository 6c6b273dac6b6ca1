"""The comparison on a GPU, as far as it can be tried without one: who fails stops nobody, and who is wrong is named."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import gpu, gpu_calls
from benchmarks.gpu_calls import BACKWARD, DECODE, FORWARD, KINDS, OURS, WITH_STATISTICS, Inputs, Size

SIZES = [Size(2, 3, 37, 16, causal) for causal in (True, False)]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    return (scores.masked_fill(~mask, -torch.inf) if causal else scores).softmax(-1).to(v.dtype) @ v


def with_statistics(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, ...]:
    eye = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    p = plain(q, k, eye, causal=causal)
    return plain(q, k, v, causal=causal), torch.special.entr(p).sum(-1), p.square().sum(-1)


def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return plain(q, k, v, causal=False) * 1.05


def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise LookupError("\n\n  no such instruction\nand much more")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours by plain PyTorch; the peers are PyTorch's flash, one that is wrong and one that raises."""
    flash = gpu_calls.attentions

    def attentions(causal: bool, peers: object) -> dict[str, gpu_calls.Attention]:
        def mine(*x: torch.Tensor) -> torch.Tensor:
            return plain(*x, causal=causal)

        return {OURS: mine, "flash": flash(causal, ["flash"])["flash"], "cudnn": wrong, "flex": broken}

    monkeypatch.setattr(gpu_calls, "attentions", attentions)
    monkeypatch.setattr(gpu_calls, "with_statistics", with_statistics)


@pytest.mark.usefixtures("stand_ins")
def test_who_fails_or_is_wrong_is_named_and_the_others_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    written = []
    rows = gpu.run(SIZES, gpu.PEERS, 2, 1e9, "cpu", lambda *report: written.append([len(x) for x in report]))
    assert [(row.size, row.what) for row in rows] == [(size, what) for size in SIZES for what in KINDS]
    assert written == [[at, 0] for at in (*range(1, 7), 6)]  # after every row
    for row in rows:
        assert set(row.milliseconds) == {OURS, "flash", "cudnn"} | ({WITH_STATISTICS} if row.what == FORWARD else set())
        assert all(x > 0 for x in row.milliseconds.values())
        assert row.failed == {"flex": "LookupError: no such instruction"}
        assert set(row.wrong) == {"cudnn"}
        assert len(row.errors[OURS]) == (3 if row.what == BACKWARD else 1)
    told_lines = capsys.readouterr().out
    assert "flex failed: LookupError: no such instruction" in told_lines
    assert "cudnn wrong: relative error" in told_lines


@pytest.mark.usefixtures("stand_ins")
def test_when_time_is_up_what_is_left_is_named() -> None:
    written = []
    assert gpu.run(SIZES, gpu.PEERS, 1, -1.0, "cpu", lambda *report: written.append(report)) == []
    assert len(written[-1][1]) == len(SIZES) * len(KINDS)


@pytest.mark.usefixtures("stand_ins")
def test_inputs_that_cannot_be_made_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(size: Size, device: str) -> Inputs:
        if size.causal:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Inputs(size, device)

    monkeypatch.setattr(gpu, "Inputs", none)
    rows = gpu.run(SIZES, gpu.PEERS, 1, 1e9, "cpu", lambda *report: None)
    assert [OURS in row.failed for row in rows] == [True] * 3 + [False] * 3
    assert all(row.failed[OURS] == "OutOfMemoryError: CUDA out of memory" for row in rows[:3])


def test_numbers_that_are_not_finite_are_errors() -> None:
    inputs = Inputs(SIZES[0], "cpu")
    out = plain(inputs.q, inputs.k, inputs.v, causal=True)
    assert inputs.errors(FORWARD, (out,))[0] < 6e-3
    out[-1, -1, 5] = torch.nan
    assert inputs.errors(FORWARD, (out,)) == [gpu_calls.BEYOND]
    assert inputs.errors(DECODE, (out[:, :, -1:],))[0] < 6e-3


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU here"):
        gpu.main([])


def test_the_whole_of_it_in_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import triton_here  # noqa: F401  # skips where there is no Triton

    code = gpu.main(["--quick", "--peer", "flash", "--json", str(tmp_path / "gpu.json")])
    report = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert code == 0, report
    assert report["left_out"] == []
    assert [(row["size"]["causal"], row["what"]) for row in report["rows"]] == [
        (causal, what) for causal in (True, False) for what in KINDS
    ]
    for row in report["rows"]:
        assert set(row["errors"]) == {OURS, "flash"} | ({WITH_STATISTICS} if row["what"] == FORWARD else set())
        assert row["wrong"] == row["failed"] == {}
    assert len(report["rows"][0]["errors"][WITH_STATISTICS]) == 3
    assert "written" in capsys.readouterr().out
