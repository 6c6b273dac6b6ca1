"""Tensors without numbers, on "meta" or in `FakeTensorMode`: outputs of the right shape, dtype and device."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from design_samples import ONCE, design, given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import headwise as hw
from headwise.masks import Grid, Mask, Span, State
from headwise.nn.registry import DESIGNS


class EveryOther(Mask):
    holds = {}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return ((rows[:, None] + cols) % 2 == 0)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.MIXED


@pytest.fixture(params=["meta", "fake"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors have no numbers."""
    with FakeTensorMode() if request.param == "fake" else nullcontext():
        yield "meta" if request.param == "meta" else "cpu"


def qkv(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (2, 6, 7, 8), (2, 3, 11, 8), (2, 3, 11, 5)
    return [torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


RULES: dict[str, Callable[[str], dict[str, Any]]] = {
    "nothing": lambda device: {},
    "causal": lambda device: {"mask": hw.Causal()},
    "lengths": lambda device: {"mask": hw.Lengths([3, 4])},
    "documents": lambda device: {"mask": hw.Documents(torch.zeros(2, 11, dtype=torch.long, device=device))},
    "dense": lambda device: {"mask": hw.Dense(torch.ones(7, 11, dtype=torch.bool, device=device)) & hw.Causal()},
    "own": lambda device: {"mask": EveryOther()},
    "scores": lambda device: {"score": (hw.SoftCap(3.0), hw.ALiBi.standard(6))},
    "dropout": lambda device: {"dropout_p": 0.5},
    "kernel": lambda device: {"kernel": "torch_blocks"},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_calls_have_shapes_and_gradients(device: str, name: str, dtype: torch.dtype) -> None:
    leaves = qkv(device, dtype)
    out = hw.attend(*leaves, **RULES[name](device))
    assert (out.shape, out.dtype, out.device.type) == ((2, 6, 7, 5), dtype, device)
    found = torch.autograd.grad(out.sum(), leaves)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in leaves]


def test_maps_have_shapes_and_nothing_to_read(device: str) -> None:
    _, amap = hw.attend(*qkv(device, torch.bfloat16), mask=hw.Causal(), return_map=True)
    assert amap.shape == (2, 6, 7, 11)
    assert (amap.lse.shape, amap.lse.dtype, amap.lse.device.type) == ((2, 6, 7), torch.float32, device)
    for read in (lambda: amap[0], lambda: amap.measure("entropy"), lambda: amap.pool(4), lambda: amap.topk(2)):
        with pytest.raises(hw.KernelError, match="no data to read"):
            read()
    with pytest.raises(hw.ConfigError, match=r"measures=.*data"):
        hw.attend(*qkv(device), return_map=True, measures=["entropy"])


def test_wrong_shapes_are_named(device: str) -> None:
    q, k, v = qkv(device)
    with pytest.raises(hw.ShapeError, match="k: shape"):
        hw.attend(q, k[..., :5], v)
    with pytest.raises(hw.ShapeError, match="Dense"):
        hw.attend(q, k, v, mask=hw.Dense(torch.ones(7, 12, dtype=torch.bool, device=device)))


@pytest.mark.thorough_except("meta-False")
@pytest.mark.parametrize("rotary", [False, True])
def test_modules_have_shapes_and_gradients_as_pytorchs_own(device: str, rotary: bool) -> None:
    with torch.device(device):
        ours = hw.MultiHeadAttention(d_model=24, num_heads=6, num_kv_heads=3, rotary=rotary)
        theirs = torch.nn.MultiheadAttention(24, 6, batch_first=True)
        x = torch.empty(2, 7, 24)
    y = ours(x, mask=hw.Causal())
    expected, _ = theirs(x, x, x, need_weights=False)
    assert (y.shape, y.dtype, y.device) == (expected.shape, expected.dtype, expected.device)
    y.sum().backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    assert ours(x, return_map=True)[1].shape == (2, 6, 7, 7)
    assert ours(x, mask=hw.Causal(), cache=hw.KVCache()).shape == (2, 7, 24)


@pytest.mark.thorough_except("meta")
def test_the_talking_heads_have_shapes(device: str) -> None:
    with torch.device(device):
        layer, x = hw.nn.TalkingHeadsAttention(24, 6), torch.empty(2, 7, 24)
    assert layer(x).shape == (2, 7, 24)


@pytest.fixture
def real(name: str, options: dict[str, Any]) -> tuple[Tensor, Any, Tensor]:
    """What a design returns for x with data."""
    return design(name, options, dtype=torch.float32)(given(dtype=torch.float32), return_map=True, return_concat=True)


@pytest.mark.thorough_except(
    "meta-multi_head-options13",
    "meta-contraction-options15",
    "meta-single_head-options17",
    "meta-head_mixing-options24",
    "meta-latent-options28",
    "meta-convolution-options30",
)
@pytest.mark.parametrize(("name", "options"), ONCE)
def test_every_design_has_shapes_and_gradients(
    real: tuple[Tensor, Any, Tensor], device: str, name: str, options: dict[str, Any]
) -> None:
    expected = real
    with torch.device(device):
        module, x = DESIGNS[name].build(12, 6, **options), torch.empty(2, 13, 12, requires_grad=True)
    y, amap, concat = module(x, return_map=True, return_concat=True)
    assert (y.shape, amap.shape, amap.lse.shape, concat.shape) == (
        expected[0].shape, expected[1].shape, expected[1].lse.shape, expected[2].shape
    )  # fmt: skip
    assert y.device.type == amap.lse.device.type == concat.device.type == device
    found = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    assert [one.shape for one in found] == [one.shape for one in (x, *module.parameters())]
    if module.takes_mask:
        assert module(x, mask=hw.Causal()).shape == y.shape
    with pytest.raises((hw.ConfigError, hw.KernelError), match=r"measures=.*data|no data to read"):
        module(x, return_map=True, measures=["entropy"])


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize(("name", "options"), ONCE)
def test_every_design_from_the_meta_device_is_the_loaded_one(name: str, options: dict[str, Any]) -> None:
    original, x = design(name, options, dtype=torch.float32), given(dtype=torch.float32)
    with torch.device("meta"):
        layers = [DESIGNS[name].build(12, 6, **options).eval() for _ in range(2)]
    layers[0].to_empty(device="cpu").load_state_dict(original.state_dict(), strict=True)
    layers[1].load_state_dict(original.state_dict(), strict=True, assign=True)
    for layer in layers:
        assert torch.equal(layer(x), original(x))


@pytest.mark.thorough_except("meta")
def test_mixtures_have_caches_but_for_one_whose_size_is_data(device: str) -> None:
    with torch.device(device):
        every, chosen = (hw.nn.SparseHeadMixture(12, 6, top_k=2, rotary=True, keys=keys) for keys in ("all", "chosen"))
        x = torch.empty(2, 5, 12)
    cache = every.new_cache()
    assert [every(x, mask=hw.Causal(), cache=cache).shape for _ in range(2)] == [(2, 5, 12)] * 2
    assert cache.seen == 10
    cache = chosen.new_cache()
    with pytest.raises(hw.ConfigError, match=r"cache: x has no data.*ChosenCache.*SparseHeadMixture selects"):
        chosen(x, cache=cache)
    assert cache.seen == 0


def test_offsets_without_data_are_named() -> None:
    with pytest.raises(hw.ConfigError, match="offsets: on meta without data"):
        hw.nn.ConvolutionAttention(12, 3, offsets=torch.empty(3, 1, device="meta"))
    with torch.device("meta"):  # the convolution's offsets have data, as its sizes follow from them
        module = hw.nn.ConvolutionAttention(12, 2, offsets=torch.tensor([[-4], [1]], device="cpu"))
    assert (module.padding, module.centres.is_meta) == ([(4, 1)], True)
