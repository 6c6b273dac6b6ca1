"""A GPU kernel that computes something else than `torch_blocks` on a device is refused there, with the reason."""

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from samples import MASKS, SCORES, qkv
from torch import Tensor
from triton_here import DEVICE, mostly_slow, moved, slow

import headwise as hw
from headwise.cli.doctor import examine, print_examination
from headwise.kernels import prepare
from headwise.kernels.call import Call
from headwise.kernels.triton_gpu import TritonGPU, check, launch, problem
from headwise.kernels.triton_gpu.check import CHECKS, Kind
from headwise.masks import Grid
from headwise.rule import Rule
from headwise.wording import speaking

UNUSED = "kernel 'triton_gpu' is not used for such calls"


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has been checked, and everything is."""
    monkeypatch.delenv("HEADWISE_GPU_CHECK")
    monkeypatch.setattr(
        prepare, "_prepared", {}
    )  # calls on the CPU, as in the interpreter, that another kernel answered
    monkeypatch.setattr(prepare, "_prepared", {})
    before = dict(CHECKS)
    CHECKS.clear()
    yield
    CHECKS.clear()
    CHECKS.update(before)


def inputs(n: int = 3, d: int = 8, **options: Any) -> list[Tensor]:
    return [x.to(DEVICE) for x in qkv(1, 2, 1, n, 19, d, d, **options)]


def attend(*given: Tensor, kernel: str = "triton_gpu", **options: Any) -> tuple[Tensor, hw.AttentionMap]:
    return hw.attend(*given, mask=hw.Causal(), kernel=kernel, return_map=True, **options)


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a defect: scores are multiplied by a number that is not log₂ e."""
    monkeypatch.setattr(problem, "LOG2E", 1.40)


def planted(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    """Plants a defect: what a launch returns is changed."""
    right = getattr(launch, name)
    monkeypatch.setattr(launch, name, lambda *given, **options: change(right(*given, **options)))


def test_a_device_that_computes_right_is_checked_once(recwarn: pytest.WarningsRecorder) -> None:
    state = torch.get_rng_state()
    for seed in range(2):
        attend(*inputs(seed=seed))
    (found,) = CHECKS.values()
    assert found.reason is None
    assert found.device.startswith(DEVICE)
    assert found.milliseconds > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert not recwarn.list


def test_a_defect_is_refused_and_named_and_the_next_kernel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_scale(monkeypatch)
    given = inputs()
    with pytest.warns(UserWarning, match=UNUSED):
        out, amap = attend(*given, kernel="auto")
    torch.testing.assert_close(out, attend(*given, kernel="reference")[0], rtol=1e-5, atol=1e-6)
    assert amap.kernel != "triton_gpu"
    assert "differs from torch_blocks in the output by" in amap.refusals["triton_gpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        with pytest.raises(hw.KernelError, match=r"in the output by .* HEADWISE_GPU_CHECK=0 omits the check"):
            attend(*given)


def test_what_does_not_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any) -> Any:
        raise RuntimeError("ptxas is not found")

    monkeypatch.setattr(launch, "forward", no_compiler)
    with pytest.warns(UserWarning, match=UNUSED):
        _, amap = attend(*inputs(), kernel="auto")
    assert "RuntimeError: ptxas is not found" in amap.refusals["triton_gpu"]


def test_only_the_kind_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the queries are; and so is that read of a map."""
    planted(monkeypatch, "columns", lambda received: received * 1.001)
    _, amap = attend(*inputs())
    assert torch.isfinite(amap.measure("entropy")["entropy"]).all()
    with pytest.warns(UserWarning, match="column_mass"), pytest.raises(hw.KernelError, match="column_mass"):
        amap.received()
    expected = amap.using("reference").received()
    torch.testing.assert_close(amap.using("auto").received(), expected, rtol=1e-5, atol=1e-6)


def test_wrong_gradients_are_refused_before_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "backward", lambda found: found._replace(k=found.k * 1.01))
    q, k, v = inputs()
    assert attend(q, k, v)[1].kernel == "triton_gpu"
    q.requires_grad_()
    with pytest.warns(UserWarning, match="the gradient of k"):
        out, amap = attend(q, k, v, kernel="auto")
    assert amap.kernel != "triton_gpu"
    out.sum().backward()
    assert torch.isfinite(q.grad).all()


def test_wrong_gradients_of_statistics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls that have them, and in no others."""
    monkeypatch.setattr(launch, "of_rows", lambda *_: None)
    q, k, v = inputs()
    q.requires_grad_()
    options = {"measures": ["entropy"], "kernel": "auto"}
    assert attend(q, k, v, **options)[1].kernel == "triton_gpu"
    with pytest.warns(UserWarning, match=r"gradients of statistics.* the gradient of q"):
        _, amap = attend(q, k, v, differentiable=True, **options)
    assert amap.kernel != "triton_gpu"
    amap.measured["entropy"].sum().backward()
    assert torch.isfinite(q.grad).all()


def test_gradients_of_a_graph_are_refused_when_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "backward", lambda found: found._replace(q=found.q * 1.01))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attend(q, k, v, mask=hw.Causal(), kernel="triton_gpu").sum()

    with (
        pytest.warns(UserWarning, match=UNUSED),
        pytest.raises(hw.KernelError, match=r"these gradients: .* the gradient of q"),
    ):
        torch.func.grad(loss)(*inputs())


def test_a_backward_pass_that_drops_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = launch.backward
    other = lambda given, *rest, **options: right(replace(given, seed=given.seed + 1), *rest, **options)  # noqa: E731
    q, k, v = inputs()
    q.requires_grad_()
    attend(q, k, v, dropout_p=0.1)
    CHECKS.clear()
    monkeypatch.setattr(launch, "backward", other)
    with pytest.warns(UserWarning, match=UNUSED), pytest.raises(hw.KernelError, match="gradients with dropout"):
        attend(q, k, v, dropout_p=0.1)


def test_the_check_can_be_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_scale(monkeypatch)
    monkeypatch.setenv("HEADWISE_GPU_CHECK", "0")
    assert attend(*inputs())[1].kernel == "triton_gpu"
    assert not CHECKS
    monkeypatch.setenv("HEADWISE_GPU_CHECK", "no")
    with pytest.raises(hw.ConfigError, match="HEADWISE_GPU_CHECK='no': expected 0 or 1"):
        attend(*inputs())


def test_modes_of_the_caller_do_not_reach_the_check() -> None:
    q, k, v = inputs()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        hw.attend(q, k, v, kernel="triton_gpu")
    torch.func.vmap(lambda q: hw.attend(q, k, v, kernel="triton_gpu", mask=hw.Causal()))(torch.stack((q, q)))
    assert len(CHECKS) == 2
    assert all(found.reason is None for found in CHECKS.values())


def test_threads_check_a_kind_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Kind] = []
    monkeypatch.setattr(check, "_small", lambda kind, right=check._small: (calls.append(kind), right(kind))[1])
    q, k, v = inputs()
    call = Call(q, k, v, Rule(hw.Causal(), 0.3, Grid(1, 2, 3, 19)))
    threads = [threading.Thread(target=TritonGPU().refuse, args=[call]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == len(CHECKS) == 1


@pytest.mark.parametrize("name", mostly_slow(MASKS, "window and sinks", "padded left"))
@pytest.mark.parametrize("score", mostly_slow(["none", *SCORES], "none"))
@pytest.mark.parametrize(("n", "dtype"), [(3, torch.float32), slow(37, torch.bfloat16), slow(37, torch.float16)])
def test_right_kernels_pass(name: str, score: str, n: int, dtype: torch.dtype) -> None:
    """With every mask and score, all statistics, and gradients."""
    given = [x.to(DEVICE) for x in qkv(h=3, h_kv=1, n=n, dtype=dtype)]
    scores = () if score == "none" else moved(SCORES[score](2, 3, n, 53))
    measures = ["entropy", "max_logit", "sink_mass", "mean_distance", "received"]
    measures = [one for one in measures if one in hw.stats.MEASURES]
    for gradients in (False, True):
        given[0].requires_grad_(gradients)
        try:
            hw.attend(
                *given,
                mask=MASKS[name](2, n, 53),
                score=scores,
                kernel="triton_gpu",
                return_map=True,
                measures=measures,
            )
        except hw.KernelError as error:
            assert "would have shape" in str(error)  # noqa: PT017 - two biases that are small apart
    assert all(found.reason is None for found in CHECKS.values())


def test_doctor_lists_the_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("headwise.cli.doctor._typical_calls", lambda: ())
    attend(*inputs())
    wrong_scale(monkeypatch)
    with pytest.warns(UserWarning, match=UNUSED):
        attend(*inputs(n=1), kernel="auto")
    right, wrong = examine().checks
    assert (right.reason, right.kind) == (None, "float32, d=8, 5 × 69, decoding, shared KV heads, mask")
    assert wrong.reason is not None
    for lang, words in (("en", "passed"), ("zh", "解码")):
        with speaking(lang):
            print_examination(examine(), Console(width=200))
        said = capsys.readouterr().out
        assert words in said
        assert f"{right.milliseconds:.0f}" in said
        assert "in the output by" in said
