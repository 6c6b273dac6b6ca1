"""The same answers for models of other makers: heads cut out of their own weights."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from importance_samples import decoder, texts, token_loss
from torch import Tensor, nn
from torch.nn import functional as F

from by_hand import ByHand
from headwise.analysis.importance.ablation import ablation_importance
from headwise.analysis.importance.gradients import gradient_importance, learn_gates, taylor_importance
from headwise.errors import ConfigError
from headwise.models.find import find_heads

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {"vocab_size": 37, "initializer_range": 0.3}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=15, n_layer=2, n_head=3, n_positions=16, bos_token_id=0, eos_token_id=0, **SIZES
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=15, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17, max_position_embeddings=16,
        **SIZES,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=17,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=0, **SIZES,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Encoder(nn.Module):
    """PyTorch's own encoder between an embedding and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 15)
        layer = nn.TransformerEncoderLayer(15, 3, 17, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(15, 37)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.encoder(self.embedding(ids)))


class Written(nn.Module):
    """Two layers of attention written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second, self.out = nn.Embedding(37, 6), ByHand(), ByHand(), nn.Linear(6, 37)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.first(x)
        return self.out(x + self.second(x))


MODELS = {"gpt2": gpt2, "bert": bert, "llama": llama, "torch": Encoder, "headwise": decoder, "by hand": Written}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def made(make: Any) -> nn.Module:
    torch.manual_seed(4)
    return make().eval()


@pytest.mark.thorough
@every_model
def test_ablation_by_zero_is_that_of_the_model_with_the_rows_cut(make: Any) -> None:
    model, batches = made(make), texts()
    found = ablation_importance(model, batches, token_loss)
    sites = find_heads(model)
    assert [len(row) for row in found.column] == [site.num_heads for site in sites]
    for i, (layer, head) in enumerate(found.table.places):
        cut = copy.deepcopy(model)
        site = find_heads(cut)[layer]
        part = next(part for part in site.parts() if part.letter == "o")
        with torch.no_grad():
            part.tensor.narrow(part.axis, part.start + head * part.width, part.width).zero_()  # type: ignore[union-attr]
            rises = [token_loss(cut, b).item() - token_loss(model, b).item() for b in batches]
        assert np.allclose(found.samples[:, i], rises, atol=2e-6)  # type: ignore[index]
    assert np.abs(found.flat).max() > 1e-4


def test_heads_written_by_hand_are_found_in_the_call_that_the_loss_makes() -> None:
    model, calls = made(Written), []

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(batch)
        return F.cross_entropy(model(ids=batch[0]).flatten(0, 1), batch[1].flatten())

    batches = [(ids, ids.flip(1)) for ids in texts(2)]
    found = ablation_importance(model, batches, loss_fn)
    assert found.table.layers == ("first", "second")
    assert len(calls) == 1 + len(batches) * (1 + 4)
    assert not model._forward_pre_hooks
    expected = ablation_importance(model, batches, loss_fn, sites=find_heads(model))
    assert np.array_equal(found.flat, expected.flat)
    with pytest.raises(ConfigError, match="no attention heads"):
        ablation_importance(made(Written), batches, lambda model, _: next(model.parameters()).mean())


@pytest.mark.thorough_beyond(4)
@every_model
def test_gradients_are_those_of_a_factor_on_the_output_matrix(make: Any) -> None:
    """∂L/∂ξ_h = Σ W_O^h ∘ ∂L/∂W_O^h: another way to the same number, by the weights' own gradient."""
    model, batches = made(make), texts()
    found = gradient_importance(model, batches, token_loss, absolute="mean")
    expected = []
    for batch in batches:
        model.zero_grad()
        token_loss(model, batch).backward()
        values: list[float] = []
        for site in find_heads(model):
            part = next(part for part in site.parts() if part.letter == "o")
            weight: Any = part.tensor
            products = (weight.detach() * weight.grad).movedim(part.axis, 0).flatten(1).sum(1)
            values += products.unflatten(0, (site.num_heads, -1)).sum(1).tolist()
        expected.append(values)
    assert np.allclose(found.samples, expected, atol=2e-6)
    assert np.allclose(found.flat, np.abs(np.mean(expected, 0)), atol=2e-6)
    assert found.flat.max() > 1e-4


@pytest.mark.thorough
@every_model
def test_other_methods_run_and_leave_the_model_as_it_was(make: Any) -> None:
    model, batches = made(make), texts(2)
    before, loss = copy.deepcopy(model.state_dict()), token_loss(model, batches[0]).item()
    rows = gradient_importance(model, batches, token_loss, per="row")
    assert rows.samples is not None
    assert rows.samples.shape[0] == 8
    alone = gradient_importance(model, [b[i : i + 1] for b in batches for i in range(4)], token_loss)
    assert np.allclose(rows.samples, alone.samples, atol=1e-5)
    for found in (
        taylor_importance(model, batches, token_loss),
        ablation_importance(model, batches, token_loss, by="mean"),
        ablation_importance(model, batches, token_loss, by="resample"),
        learn_gates(model, batches, token_loss, 0.01, steps=3).importance,
    ):
        assert np.isfinite(found.flat).all()
        assert np.ptp(found.flat) > 0
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert token_loss(model, batches[0]).item() == loss


class Shared(nn.Module):
    """One attention that is called twice, as in models that share weights between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(14, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.attention(x, x, x, need_weights=False)[0]
        return x


def test_a_module_that_is_called_twice_is_one_layer() -> None:
    torch.manual_seed(0)
    model = Shared().double()
    batches = [torch.randn(3, 5, 14, dtype=torch.float64) for _ in range(2)]

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(m(x), 2 * x.flip(0))

    zero = ablation_importance(model, batches, loss_fn)
    cut = copy.deepcopy(model)
    with torch.no_grad():
        cut.attention.out_proj.weight[:, 7:] = 0
        rise = np.mean([loss_fn(cut, x).item() - loss_fn(model, x).item() for x in batches])
    assert zero.column[0][1].item() == pytest.approx(rise, abs=1e-12)
    for x in batches:
        loss_fn(model, x).backward()
    weight = model.attention.out_proj.weight
    products = (weight.detach() * weight.grad).sum(0).unflatten(0, (2, 7)).sum(1).abs() / 2  # type: ignore[operator]
    mean = gradient_importance(model, batches, loss_fn, absolute="mean")
    assert np.allclose(mean.flat, products.numpy(), atol=1e-12)
    assert np.isfinite(ablation_importance(model, batches, loss_fn, by="resample").flat).all()
