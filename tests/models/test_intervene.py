"""`intervene` on real models: against their own eager attention with weights changed by hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_attach import state
from torch import Tensor, nn

import headwise as hw
from headwise.interventions import Forbid, Replace, Scale, Uniform

Change = Callable[[int, Tensor], Tensor]  # of a layer's weights [b, h, n, m]


def llama(dtype: torch.dtype = torch.float64) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=24, intermediate_size=19, num_attention_heads=6, num_key_value_heads=2,
        num_hidden_layers=3, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@contextmanager
def eager(model: nn.Module, change: Change) -> Iterator[None]:
    """The model's attention written out, with changed weights."""
    from transformers import AttentionInterface

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        group, (n, m) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
        logits = q @ k.repeat_interleave(group, 1).mT * scaling
        logits = logits.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
        weights = change(module.layer_idx, logits.softmax(-1))
        return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2), weights

    AttentionInterface.register("changed_by_hand", attention)
    model.set_attn_implementation("changed_by_hand")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def forbidden(layer: int, weights: Tensor) -> Tensor:
    if layer == 1:
        length = weights.shape[-1]
        first = length - weights.shape[-2]
        weights = weights.clone()
        for query in (5, 6):
            if query >= first:
                weights[:, 2:4, query - first, 1:3] = 0
    return weights / weights.sum(-1, keepdim=True)


def test_knocked_out_pairs_of_some_heads_of_one_layer():
    model, ids = llama(), torch.arange(22).view(2, 11)
    before = state(model)
    with eager(model, forbidden):
        expected = model(ids).logits
    before = state(model)
    with hw.intervene(model, Forbid([5, 6], [1, 2], heads=[2, 3]), layers="model.layers.1.self_attn"):
        torch.testing.assert_close(model(ids).logits, expected)
    assert state(model) == before
    assert not torch.allclose(model(ids).logits, expected)


def test_gradients_of_the_model():
    model, ids = llama(), torch.arange(11)[None]
    with eager(model, forbidden):
        model(ids).logits.square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with hw.intervene(model, Forbid([5, 6], [1, 2], heads=[2, 3]), layers=1):
        model(ids).logits.square().mean().backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


@pytest.mark.thorough
def test_positions_hold_in_generation_with_a_cache():
    model, ids = llama(), torch.tensor([[3, 1, 4, 1, 5, 9, 2]])

    def change(layer: int, weights: Tensor) -> Tensor:
        weights = weights.clone()
        weights[..., 4] = 0  # no token attends to token 4
        return weights / weights.sum(-1, keepdim=True)

    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with eager(model, lambda layer, w: change(layer, w) if w.shape[-2] == 1 else forbidden_after(w)):
        expected = model.generate(ids, **options)
    with hw.intervene(model, Forbid(slice(5, None), 4)):
        found = model.generate(ids, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))


def forbidden_after(weights: Tensor) -> Tensor:
    """The prompt: tokens after token 4 do not attend to it."""
    weights = weights.clone()
    weights[..., 5:, 4] = 0
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.thorough
def test_weights_of_another_text():
    model, one, two = llama(), torch.arange(11)[None], torch.arange(11, 22)[None]
    taken: dict[int, Tensor] = {}

    def keep(layer: int, weights: Tensor) -> Tensor:
        taken[layer] = weights
        return weights

    with eager(model, keep):
        model(two)
    with eager(model, lambda layer, w: torch.cat([w[:, :4], taken[layer][:, 4:]], 1)):
        expected = model(one).logits
    with hw.watch(model, maps="lazy") as record:
        model(two)
    with hw.intervene(model, Replace(record.maps, heads=[4, 5])):
        torch.testing.assert_close(model(one).logits, expected)


def test_records_have_the_weights_that_were_used():
    model, ids = llama(), torch.arange(11)[None]
    with (
        hw.intervene(model, Forbid(None, 0, heads=3), layers=[0, 2]),
        hw.watch(model, measures=["sink_mass"]) as record,
    ):
        model(ids)
    sinks = record.latest["sink_mass"]
    assert (sinks[:, 3] == 0).tolist() == [True, False, True]
    assert bool((sinks[:, :3] > 0).all())


def test_torch_modules_and_own_layers_in_training_with_dropout():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 19, dropout=0.0), 2, enable_nested_tensor=False)
    x = torch.randn(7, 3, 16)
    with hw.intervene(model, Scale(0.0)):
        silent = model(x)
    outs = [layer.self_attn.out_proj for layer in model.layers]
    with torch.no_grad():
        for out in outs:
            out.weight.zero_()  # what is left without any weight is the bias
    torch.testing.assert_close(model(x), silent)
    own = hw.MultiHeadAttention(16, 4, num_kv_heads=2, dropout=0.5)
    with hw.intervene(own, Uniform(heads=[0]), Forbid(None, 0, heads=[1, 2])):
        y = own(torch.randn(1, 500, 16), mask=hw.Causal())
    assert torch.isfinite(y).all()


@pytest.mark.thorough
def test_every_layer_of_designs_of_several_calls():
    for name, design in hw.nn.DESIGNS.items():
        torch.manual_seed(0)
        layer = design.build(16, 4).eval() if hasattr(design, "build") else None
        x = torch.randn(1, 6, 16)
        if not design.takes_mask:
            continue
        before = layer(x)
        if layer.coupling.at in ("scores", "heads"):
            with pytest.raises(hw.ConfigError, match=rf"the model \({design.__name__}\) cannot be edited: "):
                hw.intervene(layer, Scale(1.0)).__enter__()
            assert not hw.kernels.events.editing
            continue
        with hw.intervene(layer, Scale(1.0)):
            torch.testing.assert_close(layer(x), before, msg=name)
        with hw.intervene(layer, Scale(0.0)), torch.no_grad():
            assert not torch.allclose(layer(x), before), name


def test_queries_of_a_convolution_are_its_outputs_and_keys_its_padded_inputs():
    layer, x = hw.nn.DESIGNS["convolution"].build(12, 4), torch.randn(2, 7, 12)
    with torch.no_grad():
        before = layer(x)
        with hw.intervene(layer, Scale(0.0, queries=[3])):
            changed = layer(x) - before
    assert changed.abs().amax(-1).nonzero().tolist() == [[0, 3], [1, 3]]
    with torch.no_grad(), hw.intervene(layer, Scale(0.0, keys=[1])):  # the padding is one zero before the input
        without = layer(x)
    x[:, 0] = 0.0
    torch.testing.assert_close(without, layer(x))


def test_layers_that_can_be_edited_are_named_where_others_cannot():
    model = nn.Sequential(hw.MultiHeadAttention(16, 4), hw.nn.TalkingHeadsAttention(16, 4))
    x = torch.randn(1, 6, 16)
    with pytest.raises(hw.ConfigError, match=r"1 \(TalkingHeadsAttention\) cannot be edited: its heads mix"):
        hw.intervene(model, Scale(0.0)).__enter__()
    with torch.no_grad(), hw.intervene(model, Scale(0.0), layers=["0"]):
        torch.testing.assert_close(model(x), torch.zeros(1, 6, 16))


class Outside(hw.nn.MultiHeadAttention):
    """Computes its attention without `attend`."""

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v), None


def test_a_layer_that_does_not_call_attend_raises_instead_of_ignoring_its_edits():
    layer, x = Outside(16, 4), torch.randn(1, 6, 16)
    layer(x)
    with (
        pytest.raises(hw.ConfigError, match=r"\(Outside\) did not call attend, so it cannot be edited"),
        hw.intervene(layer, Scale(0.5)),
    ):
        layer(x)


def test_contexts_nest():
    model, ids = llama(), torch.arange(11)[None]
    edits = Forbid([5, 6], [1, 2], heads=[2, 3]), Scale(0.5, heads=[1, 2])
    with hw.intervene(model, *edits, layers=1):
        together = model(ids).logits
    with hw.intervene(model, edits[0], layers=1), hw.intervene(model, edits[1], layers=[1]):
        torch.testing.assert_close(model(ids).logits, together)


def test_an_edit_without_tokens_in_any_call_is_reported():
    model, ids = llama(), torch.arange(11)[None]
    nothing = r"Forbid\(heads=None, queries=\[11\], keys=\[0\]\): none of the 3 calls"
    with pytest.warns(UserWarning, match=nothing), hw.intervene(model, Forbid(11, 0)):
        model(ids)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: hw.intervene(llama()), r"expected edits such as Forbid\(queries, keys\), got none"),
    (lambda: hw.intervene(llama(), "forbid"), "got str"),
    (lambda: hw.intervene(nn.Linear(2, 2), Uniform()), r"intervene\(model\): Linear has no attention that can be"),
    (lambda: hw.intervene(llama(), Uniform(), layers="layers.9.*"), "no such layer"),
])  # fmt: skip
def test_bad_input(make: Any, message: str):
    with pytest.raises(hw.ConfigError, match=message), make():
        pass


class ByHand(nn.Module):
    """Causal attention written out, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor, forbidden: Tensor | None = None) -> Tensor:
        q, k, v = (y.view(*y.shape[:2], 3, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(mask == 0, float("-inf"))
        if forbidden is not None:
            scores = scores.masked_fill(forbidden, float("-inf"))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_the_error_for_attention_that_is_written_by_hand_names_the_way_out_once():
    class SelfAttention(ByHand):
        """By its name, an attention."""

    model = nn.Sequential(*(SelfAttention() for _ in range(6)))
    with pytest.raises(hw.ConfigError) as error, hw.intervene(model, Uniform()):
        pass
    said = str(error.value)
    assert said.startswith("intervene(model): Sequential has no attention that can be edited (headwise's own layers")
    assert "; 0: SelfAttention computes its attention by itself; 1: SelfAttention" in said
    assert said.endswith("; and 2 more. Attention that is written by hand is recognised on a batch: "
                         "hw.intervene(hw.attach(model, batch=…), …)")  # fmt: skip
    assert said.count("nn.MultiheadAttention") == said.count("hw.attach") == 1


def test_attach_takes_the_batch_by_position_too():
    model, x = nn.Sequential(ByHand()).eval(), torch.randn(2, 7, 12)
    with hw.attach(model, x) as handle:
        assert handle.attached == ("0",)


def test_attention_that_is_written_by_hand():
    torch.manual_seed(0)
    model, x = nn.Sequential(ByHand(), ByHand()).eval(), torch.randn(2, 7, 12)
    forbidden = torch.zeros(3, 7, 7, dtype=torch.bool)
    forbidden[1, 5:, 2] = True
    expected = model[1](model[0](x), forbidden)
    with hw.attach(model, batch=x) as handle, hw.intervene(handle, Forbid([5, 6], 2, heads=1), layers="1"):
        found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    handle = hw.attach(model, batch=x)
    with pytest.raises(hw.ConfigError, match="no such layer"), hw.intervene(handle, Uniform(), layers="2"):
        pass
