"""A convolution, whatever its kernel, dilation, padding and groups, is an attention over relative positions."""

from typing import Any

import pytest
import torch
from hypothesis import given as over, settings, strategies as st
from torch import Tensor, nn

from headwise.errors import ConfigError, ShapeError
from headwise.nn.convolution import ConvolutionAttention, from_conv1d, from_conv2d


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Using padding='same'")  # PyTorch's own copy of the input
@settings(max_examples=40, deadline=None)
@over(
    n=st.integers(1, 40), k=st.integers(1, 5), dilation=st.integers(1, 4), groups=st.sampled_from([1, 3]),
    padding=st.one_of(st.integers(0, 7), st.sampled_from(["same", "valid"])), bias=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_line_is_convolved(n: int, k: int, dilation: int, groups: int, padding: Any, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    conv = nn.Conv1d(6, 9, k, dilation=dilation, groups=groups, padding=padding, bias=bias).double()
    x = torch.randn(2, 6, n, dtype=torch.float64)
    ours = from_conv1d(conv)
    pad = 2 * padding if isinstance(padding, int) else dilation * (k - 1) if padding == "same" else 0
    if n + pad <= dilation * (k - 1):
        with pytest.raises(ShapeError, match="smaller than the kernel"):
            ours(channels_last(x))
        return
    torch.testing.assert_close(ours(channels_last(x)), channels_last(conv(x)), rtol=1e-10, atol=1e-10)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=25, deadline=None)
@over(
    sizes=st.tuples(st.integers(5, 11), st.integers(5, 13)), kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.one_of(st.tuples(st.integers(0, 2), st.integers(0, 3)), st.just("same")), seed=st.integers(0, 99),
)  # fmt: skip
def test_an_image_is_convolved(sizes: Any, kernel: Any, dilation: Any, padding: Any, seed: int) -> None:
    torch.manual_seed(seed)
    conv = nn.Conv2d(3, 5, kernel, dilation=dilation, padding=padding).double()
    x = torch.randn(2, 3, *sizes, dtype=torch.float64)
    torch.testing.assert_close(from_conv2d(conv)(channels_last(x)), channels_last(conv(x)), rtol=1e-10, atol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rounding_stays_that_of_the_dtype(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv1d(6, 9, 5, padding=2), torch.randn(1, 6, 3001)
    expected = channels_last(conv(x)).double()
    ours = from_conv1d(conv.to(dtype))(channels_last(x).to(dtype))
    assert (ours.double() - expected).norm() / expected.norm() < error


def test_gradients_of_the_kernel_are_the_convolutions() -> None:
    torch.manual_seed(0)
    conv = nn.Conv1d(6, 9, 3, padding=1).double()
    x, again = (torch.randn(2, 6, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
                for _ in range(2))  # fmt: skip
    ours = from_conv1d(conv)
    weight = torch.randn(2, 17, 9, dtype=torch.float64)
    (channels_last(conv(x)) * weight).sum().backward()
    (ours(channels_last(again)) * weight).sum().backward()
    torch.testing.assert_close(again.grad, x.grad)
    torch.testing.assert_close(ours.o_proj.weight.grad.view(9, 3, 6).transpose(1, 2), conv.weight.grad)
    torch.testing.assert_close(ours.o_proj.bias.grad, conv.bias.grad)


def test_each_head_looks_at_its_place() -> None:
    module = from_conv1d(nn.Conv1d(4, 4, 3, dilation=2, padding=2).double())
    _, amap = module(torch.randn(1, 9, 4, dtype=torch.float64), return_map=True)
    assert amap.shape == (1, 3, 9, 13)  # keys are the padded places
    for i in range(3):
        expected = torch.zeros(9, 13, dtype=torch.float64)
        expected[torch.arange(9), torch.arange(9) + 2 * i] = 1.0
        torch.testing.assert_close(amap.to_dense()[0, i], expected)


@pytest.mark.thorough
def test_blunt_heads_learn_to_be_a_convolution() -> None:
    torch.manual_seed(0)
    module = ConvolutionAttention(3, 3, sharpness=1.0).double()
    with torch.no_grad():
        module.centres.add_(torch.tensor([[0.3], [-0.2], [0.2]]))
    x = torch.randn(8, 20, 3, dtype=torch.float64)
    conv = nn.Conv1d(3, 3, 3, padding=1, bias=False).double()
    target = conv(x.mT).mT.detach()
    optimiser = torch.optim.Adam(module.parameters(), 0.03)
    losses = []
    for _ in range(200):
        optimiser.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 100


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: from_conv1d(nn.Conv1d(3, 3, 3, stride=2)), ConfigError, r"stride=\(2,\)"),
        (lambda: from_conv1d(nn.Conv1d(3, 3, 3, padding_mode="circular")), ConfigError, "padding_mode='circular'"),
        (lambda: ConvolutionAttention(3, 3, offsets=torch.zeros(2, 1)), ShapeError, r"offsets: .*\(2, 1\)"),
        (lambda: ConvolutionAttention(3, 3, padding=[(0, 0), (1, 1)]), ShapeError, "padding: expected 1 pairs"),
        (lambda: from_conv2d(nn.Conv2d(3, 3, 3))(torch.zeros(1, 9, 3)), ShapeError, "2 axes"),
        (lambda: from_conv1d(nn.Conv1d(3, 3, 3))(torch.zeros(1, 2, 3)), ShapeError, "smaller than the kernel"),
    ],
)
def test_what_is_no_such_attention_is_refused(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize(
    ("turn", "conv", "words"),
    [
        (from_conv1d, nn.ConvTranspose1d(4, 4, 3, padding=1), "Conv1d, got ConvTranspose1d"),
        (from_conv1d, nn.Conv2d(4, 4, 3), "Conv1d, got Conv2d"),
        (from_conv1d, nn.Linear(4, 4), "Conv1d, got Linear"),
        (from_conv2d, nn.ConvTranspose2d(4, 4, 3), "Conv2d, got ConvTranspose2d"),
        (from_conv2d, nn.Conv1d(4, 4, 3), "Conv2d, got Conv1d"),
        (from_conv2d, "conv", "Conv2d, got str"),
    ],
)
def test_a_module_of_another_kind_is_refused(turn: Any, conv: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"conv: expected an nn\.{words}"):
        turn(conv)
