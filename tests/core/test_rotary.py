"""Rotary positions are those of the formula, whatever became of the module: other dtypes, no data, copies, graphs."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from design_samples import CASES, design, given
from torch import Tensor, nn

import headwise as hw
from headwise.lm import Decoder, DecoderConfig
from headwise.nn import Rotary
from headwise.nn.registry import DESIGNS

ROTARY = [(name, options) for name, options in CASES if options.get("rotary") or options.get("rope_dim")]
# The largest rounding of a number, relative, and what sums of a few of them may add to it.
ROUNDED = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6, torch.float64: 1e-15}


def turned(x: Tensor, start: int = 0, base: float = 10_000.0) -> Tensor:
    """The pairs of x as complex numbers times e^{i·angle}, in float64."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    positions = torch.arange(start, start + x.shape[-2], dtype=torch.float64)
    angle = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    found = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((found.real, found.imag), -1)


def far(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture
def nan_where_empty() -> Iterator[None]:
    """Memory that nothing was written to is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CASTS: dict[str, tuple[torch.dtype, Callable[[nn.Module], Any]]] = {
    "half": (torch.float16, lambda module: module.half()),
    "bfloat16": (torch.bfloat16, lambda module: module.bfloat16()),
    "to": (torch.bfloat16, lambda module: module.to(torch.bfloat16)),
    "to a tensor": (torch.float16, lambda module: module.to(torch.ones(1, dtype=torch.float16))),
    "there and back": (torch.float32, lambda module: module.bfloat16().float()),
    "double": (torch.float64, lambda module: module.double()),
}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("start", [0, 5000, 100_000])
def test_a_cast_module_is_as_exact_as_its_dtype(name: str, start: int) -> None:
    dtype, cast = CASTS[name]
    rotary = Rotary(64, base=500_000.0)
    cast(nn.ModuleList([rotary]))
    x = torch.randn(2, 3, 7, 64).to(dtype)
    y = rotary(x, start)
    angles = 6e-8 * start if dtype != torch.float64 else 2e-16 * start  # the rounding of position · frequency
    assert y.dtype == dtype
    assert far(y, turned(x, start, 500_000.0)) < ROUNDED[dtype] + angles


def test_a_buffer_that_others_cast_or_left_elsewhere_is_not_used() -> None:
    x = torch.randn(2, 3, 7, 64)
    for spoiled in (torch.bfloat16, "meta"):
        rotary = Rotary(64)
        rotary.frequency = rotary.frequency.to(spoiled)
        torch.testing.assert_close(rotary(x, 5000), Rotary(64)(x, 5000), rtol=0, atol=0)


def test_the_buffer_is_made_again_only_where_it_changed() -> None:
    rotary = Rotary(6)
    before = rotary.frequency
    nn.ModuleList([rotary]).to("cpu").to(torch.float32).float()
    assert rotary.frequency is before
    assert not rotary.state_dict()


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize(("name", "options"), ROTARY)
def test_float64_layers_pass_gradcheck(name: str, options: dict[str, Any]) -> None:
    module, x = design(name, options), given(5).requires_grad_()
    assert torch.autograd.gradcheck(module, (x,), fast_mode=True)


@pytest.mark.parametrize(("name", "options"), ROTARY)
def test_positions_of_layers_in_bfloat16_are_as_exact_as_bfloat16(name: str, options: dict[str, Any]) -> None:
    rotary = design(name, options).bfloat16().rotary
    x = torch.randn(2, 6, 3, rotary.head_dim).bfloat16()
    assert far(rotary(x, 700), turned(x, 700)) < ROUNDED[torch.bfloat16]


def without_data(made: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return made().eval()


def decoder() -> Decoder:
    return Decoder(DecoderConfig(vocab_size=31, d_model=24, num_layers=2, num_heads=4)).eval()


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@pytest.mark.parametrize(("name", "options"), ROTARY)
def test_a_layer_from_the_meta_device_is_the_loaded_one(
    name: str, options: dict[str, Any], assign: bool, nan_where_empty: None
) -> None:
    original, x = design(name, options, dtype=torch.float32), given(dtype=torch.float32)
    layer = without_data(lambda: DESIGNS[name].build(12, 6, **options))
    if not assign:
        layer.to_empty(device="cpu")
    layer.load_state_dict(original.state_dict(), strict=True, assign=assign)
    assert torch.equal(layer(x), original(x))
    assert torch.equal(copy.deepcopy(layer).bfloat16()(x.bfloat16()), original.bfloat16()(x.bfloat16()))


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
def test_a_decoder_from_the_meta_device_is_the_loaded_one(assign: bool, nan_where_empty: None) -> None:
    original, made, ids = decoder(), without_data(decoder), torch.randint(31, (2, 17))
    if not assign:
        made.to_empty(device="cpu")
    made.load_state_dict(original.state_dict(), assign=assign)
    for model in (made, made.cpu()):
        assert torch.equal(model(ids), original(ids))


@pytest.fixture
def alone() -> Iterator[Any]:
    """A mesh of this process only."""
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.thorough_except("parallelize_heads")
@pytest.mark.parametrize("way", ["fully_shard", "parallelize_heads"])
def test_a_spread_decoder_from_the_meta_device_is_the_loaded_one(way: str, alone: Any, nan_where_empty: None) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    original, made, ids = decoder(), without_data(decoder), torch.randint(31, (2, 17))
    if way == "parallelize_heads":
        hw.parallel.parallelize_heads(made, alone)
    else:
        for block in [*made.blocks, made]:
            fully_shard(block, mesh=alone)
    assert made.blocks[0].attention.rotary.frequency.is_meta
    made.to_empty(device="cpu")
    set_model_state_dict(made, original.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert torch.equal(made(ids), original(ids))


def test_copies_threads_and_inference_change_nothing() -> None:
    rotary, x = Rotary(8), torch.randn(2, 3, 7, 8)
    expected = rotary(x, 3)
    file = io.BytesIO()
    torch.save(rotary, file)
    file.seek(0)
    copies = [copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary)), torch.load(file, weights_only=False)]
    assert all(torch.equal(one(x, 3), expected) for one in copies)
    with torch.inference_mode():
        fresh = Rotary(8)
        assert torch.equal(fresh(x, 3), expected)
    for one in (rotary, fresh):  # made and first used without gradients, then trained
        leaf = x.clone().requires_grad_()
        one(leaf, 3).square().sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * x)  # a rotation keeps the norm
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda dtype: far(rotary(x.to(dtype), 3), turned(x.to(dtype), 3)), [*ROUNDED] * 8))
    assert all(error < bound * 2 for error, bound in zip(found, [*ROUNDED.values()] * 8, strict=True))
    assert torch.equal(torch.func.vmap(lambda x: rotary(x, 3))(x), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_graph_serves_all_lengths(dtype: torch.dtype) -> None:
    rotary = Rotary(8).to(dtype)
    graphs: list[Any] = []
    compiled = torch.compile(
        rotary, fullgraph=True, dynamic=True, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1]
    )
    for n, start in ((7, 5), (12, 40), (33, 5000)):
        x = torch.randn(2, 3, n, 8, dtype=dtype)
        assert torch.equal(compiled(x, start), rotary(x, start))
    assert len(graphs) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exported_layers_have_the_formula(dtype: torch.dtype) -> None:
    layer, x = hw.MultiHeadAttention(12, 2, rotary=True).to(dtype).eval(), given(dtype=dtype)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: torch.export.Dim("n", min=2, max=64)}})
    y = given(29, dtype=dtype)
    torch.testing.assert_close(program.module()(y), layer(y))
