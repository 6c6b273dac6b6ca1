"""The GPU kernel's gradients are those that autograd takes of the plain formula in float64."""

import pytest
import torch
from formula import error, output, rule, weights
from samples import MASKS, SCORES, qkv
from torch import Tensor
from triton_here import DEVICE, mostly_slow, moved, same, slow

from headwise.kernels.call import Call
from headwise.kernels.gradients import run_kernel
from headwise.kernels.triton_gpu import TritonGPU
from headwise.kernels.triton_gpu.launch import backward, forward
from headwise.kernels.triton_gpu.problem import Problem, Wanted
from headwise.masks import Causal, Everything, Lengths, Mask
from headwise.rule.lowering import Lowered, lower
from headwise.scores import ALiBi, Bias, RelativeBias, Score, SinkLogits


def parameters(score: tuple[Score, ...]) -> list[Tensor]:
    """The leaves that the scores hold."""
    found = [
        x for part in score for x in vars(part).values()
        if isinstance(x, Tensor) and isinstance(part, ALiBi | Bias | RelativeBias | SinkLogits)
    ]  # fmt: skip
    return [x for x in found if x.requires_grad]


def gradients(inputs: list[Tensor], mask: Mask, score: tuple[Score, ...] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Of q, k, v and the scores' parameters: the kernel's and the formula's, for one random output gradient."""
    q, k, v = (x.to(DEVICE).detach().requires_grad_() for x in inputs)
    there = moved(score)
    call = Call(q, k, v, rule(q, k, mask, there))
    if reason := TritonGPU().refuse(call):
        assert "would have shape" in reason  # two biases that are small apart and large as one
        pytest.skip(reason)
    out = run_kernel(TritonGPU(), call).out
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    got = torch.autograd.grad(out, [q, k, v, *parameters(there)], grad.to(out), allow_unused=True)
    exact = [x.double().requires_grad_() for x in inputs]
    p, _ = weights(exact[0], exact[1], mask, score)
    grad = grad.to(out.dtype).double()
    expected = torch.autograd.grad(output(p, exact[2]), [*exact, *parameters(score)], grad, allow_unused=True)
    return [x.cpu() for x in got if x is not None], [x for x in expected if x is not None]


def agree(inputs: list[Tensor], mask: Mask, score: tuple[Score, ...], limit: float) -> None:
    got, expected = gradients(inputs, mask, score)
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.isfinite(ours).all()
        # Under a softmax the gradient of what a whole row shares is exactly 0: rounding of some millionths is left.
        assert float((ours.double() - theirs).norm()) <= limit * max(float(theirs.norm()), 1e-1 * theirs.numel() ** 0.5)


@pytest.mark.parametrize(
    "name", mostly_slow(MASKS, "causal", "window and sinks", "documents", "nothing for some", "dense")
)
def test_gradients_under_every_mask(name: str) -> None:
    agree(list(qkv(h=3, h_kv=1)), MASKS[name](2, 37, 53), (), 5e-6)


@pytest.mark.parametrize("name", mostly_slow(SCORES, "soft cap", "relative", "bias", "sinks", "all"))
@pytest.mark.parametrize("mask", mostly_slow(["everything", "padded left", "dense"], "padded left"))
def test_gradients_of_every_score(name: str, mask: str) -> None:
    agree(list(qkv(h=3, h_kv=1)), MASKS[mask](2, 37, 53), SCORES[name](2, 3, 37, 53), 2e-5)


@pytest.mark.parametrize(
    "shape", [(2, 3, 1, 1), (1, 1, 37, 1), (1, 3, 1, 53), slow((1, 1, 1, 1)), slow((2, 1, 37, 53))]
)
def test_gradients_of_biases_are_summed_where_they_are_shared(shape: tuple[int, ...]) -> None:
    """With a learned sink, so that a constant added to a row has a gradient too."""
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    score = (Bias(values), *SCORES["sinks"](2, 3, 37, 53))
    # Thousands of numbers that nearly cancel: what is left of their rounding differs between processors.
    agree(list(qkv(h=3, h_kv=1)), Causal(), score, 2e-5)


@pytest.mark.parametrize(("n", "m"), [(1, 37), (5, 5), slow(33, 33), slow(70, 131)])
def test_gradients_of_a_table_at_any_size(n: int, m: int) -> None:
    values = torch.randn(2, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    agree(list(qkv(1, 2, 1, n, m)), Causal(), (RelativeBias(values, -15),), 2e-5)


@pytest.mark.parametrize(("d", "e"), [slow(3, 2), slow(64, 16), (16, 65)])
def test_gradients_at_head_sizes(d: int, e: int) -> None:
    agree(list(qkv(1, 3, 1, 45, 61, d, e)), Causal(), (), 5e-6)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_gradients_in_half_precision(dtype: torch.dtype, limit: float) -> None:
    agree(list(qkv(1, 2, 1, 67, 75, 16, 16, dtype=dtype)), Causal(), (), limit)


def test_rows_that_see_nothing_have_no_gradient() -> None:
    q, k, v = (x.to(DEVICE).requires_grad_() for x in qkv(h=3, h_kv=1))
    mask = Lengths([0, 53], [37, 11])
    run_kernel(TritonGPU(), Call(q, k, v, rule(q, k, mask, SCORES["sinks"](2, 3, 37, 53)))).out.sum().backward()
    assert (q.grad[0] == 0).all()
    assert (q.grad[1, :, 11:] == 0).all()
    assert (k.grad[0] == 0).all()
    assert (v.grad[0] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("where", ["k", "v"])
def test_what_a_row_does_not_see_does_not_reach_its_gradient(where: str) -> None:
    q, k, v = qkv(1, 3, 1, 41, 41)
    (k if where == "k" else v)[0, 0, 29, 3] = torch.nan
    q, k, v = (x.to(DEVICE).requires_grad_() for x in (q, k, v))
    run_kernel(TritonGPU(), Call(q, k, v, rule(q, k, Causal()))).out[:, :, :29].sum().backward()
    assert torch.isfinite(q.grad[:, :, :29]).all()


def test_gradients_with_dropout_are_those_of_the_weights_that_were_kept() -> None:
    """The pattern is read off the forward pass, with unit vectors as values."""
    q, k, _ = qkv(1, 4, 2, 23, 31)
    call = {"dropout_p": 0.3, "seed": (1 << 33) + 7}
    unit = torch.eye(31).expand(1, 2, 31, 31)
    kept = (
        run_kernel(TritonGPU(), Call(*(x.to(DEVICE) for x in (q, k, unit)), rule(q, k, Causal()), **call)).out.cpu() > 0
    )
    _, _, v = qkv(1, 4, 2, 23, 31, e=7)
    found = []
    for exact in (False, True):
        leaves = [(x.double() if exact else x.to(DEVICE)).detach().requires_grad_() for x in (q, k, v)]
        if exact:
            p, _ = weights(leaves[0], leaves[1], Causal())
            out = output(p * kept / 0.7, leaves[2])
        else:
            out = run_kernel(TritonGPU(), Call(*leaves, rule(q, k, Causal()), **call)).out
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        found.append([x.cpu() for x in torch.autograd.grad(out, leaves, grad.to(out))])
    for got, expected in zip(*found, strict=True):
        assert error(got, expected) <= 5e-6


def test_gradients_repeat_to_the_bit_and_delta_is_told() -> None:
    q, k, v = (x.to(DEVICE) for x in qkv(h=3, h_kv=1, n=45))
    lowered = lower(rule(q, k, Causal()), DEVICE)
    assert isinstance(lowered, Lowered)
    problem = Problem(q, k, v, 8**-0.5, lowered.spans)
    out, planes = forward(problem, Wanted())
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    first, second = (backward(problem, out, planes[0], grad, score_gradients=(False, False, False)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None)
    torch.testing.assert_close(first.delta, (grad * out).sum(-1), rtol=1e-5, atol=1e-6)


def test_strides_of_the_output_gradient() -> None:
    inputs = list(qkv(h=3, h_kv=1, n=39, e=8))
    found = []
    for strange in (False, True):
        q, k, v = (x.to(DEVICE).detach().requires_grad_() for x in inputs)
        out = run_kernel(TritonGPU(), Call(q, k, v, rule(q, k, Everything()))).out
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        if strange:
            grad = grad.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
        found.append(torch.autograd.grad(out, (q, k, v), grad))
    assert all(same(a, b) for a, b in zip(*found, strict=True))
