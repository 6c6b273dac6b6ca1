"""The gradients of heads' gates, heard in backward passes: those of gates that are really there."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from watched_models import ids, mixed, transformers_model, x

import headwise as hw
from headwise.kernels.cpu.library import library
from headwise.kernels.events import listen
from headwise.nn.registry import DESIGNS

HEARING = ("cpu", "torch_blocks", "torch_fused", "reference")


def heard(kernel, dtype, mask, dropout=0.0):
    """δ as it is told, and ∂L/∂ξ [b, h, n] of gates that multiply the output."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, 13, 8, generator=generator).to(dtype).requires_grad_() for h in (6, 3, 3))
    slope = torch.randn(2, 6, 13, 8, generator=generator).to(dtype)
    told = []
    torch.manual_seed(1)
    with listen(told.append):
        out = hw.attend(q, k, v, mask=mask, dropout_p=dropout, kernel=kernel)
    (out * slope).sum().backward()
    gates = torch.ones(2, 6, 13, dtype=dtype, requires_grad=True)
    torch.manual_seed(1)
    gated = hw.attend(q, k, v, mask=mask, dropout_p=dropout, kernel=kernel) * gates[..., None]
    (gated * slope).sum().backward()
    assert len(told) == 1  # nobody listened to the second
    return told[0], gates.grad


@pytest.mark.parametrize("kernel", HEARING)
@pytest.mark.parametrize("mask", [None, hw.Causal()])
def test_every_kernel_tells_the_gradient_of_a_gate(kernel, mask):
    dtypes = [torch.float32] if kernel == "cpu" else [torch.float32, torch.float64]
    if kernel == "cpu" and library().reason:
        pytest.skip(str(library().reason))
    for dtype in dtypes:
        told, expected = heard(kernel, dtype, mask)
        assert told.shape == expected.shape
        tolerance = 1e-12 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(told, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", ["auto", "torch_blocks"])
def test_dropped_weights_are_dropped_in_what_is_told(kernel):
    told, expected = heard(kernel, torch.float32, hw.Causal(), dropout=0.4)
    torch.testing.assert_close(told, expected, rtol=2e-5, atol=2e-5)


def test_listening_changes_no_gradient_and_ends():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 9, 4))
    plain = torch.autograd.grad(hw.attend(q, k, v).square().sum(), (q, k, v))
    outer, inner = [], []
    with listen(outer.append):
        with listen(inner.append):
            out = hw.attend(q, k, v)
        found = torch.autograd.grad(out.square().sum(), (q, k, v))
        hw.attend(q, k, v).sum().backward()
    hw.attend(q, k, v).sum().backward()
    assert (len(outer), len(inner)) == (1, 1)
    assert all(torch.equal(one, two) for one, two in zip(plain, found, strict=True))
    with torch.no_grad(), listen(outer.append):
        hw.attend(q, k, v)
    assert len(outer) == 1


def loss_of(model, batch):
    """A mean over rows. Not of squares alone: the last norm would make them constant."""
    y = model(batch)
    return (y * torch.linspace(-1, 2, y.shape[-1], dtype=y.dtype)).sum(-1).square().mean()


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", ["auto", "torch_blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("absolute", ["each", "mean"])
@pytest.mark.parametrize("per", ["batch", "row"])
def test_training_tells_what_passes_of_their_own_find(kernel, dtype, absolute, per):
    model = mixed().to(dtype)
    batches = [x(b, 7, seed=seed).to(dtype) for seed, b in enumerate((2, 2, 3))]
    expected = hw.analysis.gradient_importance(model, batches, loss_of, absolute=absolute, per=per)
    with hw.use_kernel(kernel), hw.telemetry.gate_gradients(model) as gates:
        for batch in batches:
            loss_of(model, batch).backward()
    found = gates.importance(per=per, absolute=absolute)
    assert found.table.layers == expected.table.layers
    assert gates.passes == dict.fromkeys(gates.layers, 3)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    pairs = [(found.column.flat, expected.column.flat), (found.column.flat_error, expected.column.flat_error)]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * np.abs(expected.flat).max())
    assert found.order() == expected.order()
    assert "in training" in str(found)
    assert "nan" not in found.title


@pytest.mark.thorough
def test_tokens_apart():
    model = mixed().double()
    batches = [x(2, 7, seed=seed).double() for seed in range(2)]
    expected = hw.analysis.taylor_importance(model, batches, loss_of)
    with hw.telemetry.gate_gradients(model) as gates:
        for batch in batches:
            loss_of(model, batch).backward()
    np.testing.assert_allclose(gates.importance(per="token").flat, expected.flat, rtol=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_models_of_transformers(name):
    model = transformers_model(name).train()

    def loss(model, batch):
        return model(batch)[0].square().mean()

    expected = hw.analysis.gradient_importance(model, [ids()], loss)
    with hw.telemetry.gate_gradients(model) as gates:
        loss(model, ids()).backward()
    np.testing.assert_allclose(gates.importance().flat, expected.flat, rtol=1e-3, atol=1e-4 * expected.flat.max())
    assert model.config._attn_implementation != "headwise"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kernel", ["auto", "torch_blocks", "torch_fused"])
def test_checkpointed_passes_are_heard_once(reentrant, kernel):
    blocks = nn.ModuleList(hw.TransformerBlock(hw.MultiHeadAttention(24, h), d_ff=17) for h in (2, 3))
    batch = x()

    def run(again):
        z = batch.clone().requires_grad_()
        with hw.use_kernel(kernel), hw.telemetry.gate_gradients(blocks) as gates:
            y = z
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant) if again else block(y)
            y.square().mean().backward()
        return gates, z.grad

    (plain, grad), (found, again) = run(False), run(True)
    torch.testing.assert_close(again, grad)
    assert found.passes == plain.passes == dict.fromkeys(plain.layers, 1)
    np.testing.assert_allclose(found.importance().flat, plain.importance().flat, rtol=1e-6)


def test_a_layer_that_is_called_twice_is_one_gate():
    layer = hw.MultiHeadAttention(24, 4).double()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, z):
            return self.layer(self.layer(z))

    batches = [x(seed=seed).double() for seed in range(3)]
    expected = hw.analysis.gradient_importance(Twice(), batches, loss_of)
    model = Twice()
    with hw.telemetry.gate_gradients(model) as gates:
        for batch in batches:
            loss_of(model, batch).backward()
    assert gates.passes == {"layer": 3}
    np.testing.assert_allclose(gates.importance().flat, expected.flat, rtol=1e-10)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_is_heard_or_says_why_not(name):
    torch.manual_seed(0)
    layer = DESIGNS[name].build(24, 4)
    if isinstance(layer, hw.nn.SparseHeadMixture | hw.nn.TalkingHeadsAttention | hw.nn.HeadMixingAttention):
        with pytest.raises(hw.ConfigError, match=re.escape(layer.coupling.why)):
            hw.telemetry.gate_gradients(layer)
        return
    gates = hw.telemetry.gate_gradients(layer)
    with gates:
        y = layer(torch.randn(2, 9, 24))
        (y[0] if isinstance(y, tuple) else y).square().mean().backward()
    assert gates.passes == {"": 1}
    assert [len(row) for row in gates.importance().column] == [layer.num_heads]
    assert (gates.importance().flat > 0).all()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks there for any argument of a frame
def test_a_compiled_model_is_heard():
    model = mixed(heads=(3,))
    torch.compiler.reset()
    with hw.telemetry.gate_gradients(model) as plain:
        loss_of(model, x()).backward()
    compiled = torch.compile(model, backend="aot_eager")
    with hw.telemetry.gate_gradients(model) as gates:
        loss_of(compiled, x()).backward()
    np.testing.assert_allclose(gates.importance().flat, plain.importance().flat, rtol=1e-4)


def test_passes_that_are_not_finite_are_left_out_and_counted():
    layer = hw.MultiHeadAttention(24, 4)
    with hw.telemetry.gate_gradients(layer) as gates:
        layer(x()).square().mean().backward()
        before = gates.importance().flat
        (layer(x(seed=2)) * math.inf).sum().backward()
    assert (gates.passes, gates.skipped) == ({"": 1}, {"": 1})
    np.testing.assert_array_equal(gates.importance().flat, before)
    assert "1 backward passes; not active" in repr(gates)


def test_the_model_is_left_as_it_was_and_errors_leave_nothing_open():
    model = mixed()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with hw.telemetry.gate_gradients(model) as gates:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3, 7))
        with pytest.raises(hw.ConfigError, match="no backward pass so far"):
            gates.importance()
        loss_of(model, x()).backward()
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    told = []
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    hw.attend(q, q, q).sum().backward()  # no hearer is left over
    assert not told
    assert set(gates.passes.values()) == {1}
    gates.clear()
    assert set(gates.passes.values()) == {0}
    with pytest.raises(hw.ConfigError, match="per="):
        gates.importance(per="head")
    with pytest.raises(hw.ConfigError, match="absolute="):
        gates.importance(per="token", absolute="mean")
    with pytest.raises(hw.ConfigError, match=r"gate_gradients\(model\): Linear has no attention"):
        hw.telemetry.gate_gradients(nn.Linear(3, 3))
    with pytest.raises(hw.ConfigError, match=r"gate_gradients\(model\): .*the model: its heads mix their weights"):
        hw.telemetry.gate_gradients(hw.nn.TalkingHeadsAttention(12, 3))
    with pytest.raises(hw.ConfigError, match=r"gate_gradients\(model\): expected an nn"):
        hw.telemetry.gate_gradients("gpt2")
    with pytest.raises(hw.ConfigError, match="no such layer"):
        hw.telemetry.gate_gradients(model, layers=["nowhere"])


def test_layers_that_are_chosen_or_not_heard():
    model = mixed()
    with hw.telemetry.gate_gradients(model, layers=[0, 2]) as gates:
        loss_of(model.blocks[0], x()).backward()
    found = gates.importance()
    assert gates.layers == ("blocks.0.attention", "encoder.self_attn")
    assert found.column[0].isfinite().all()
    assert found.column[1].isnan().all()
    assert len(found.column[1]) == 4
