"""Libraries that read and change attention weights inside of a model: nnterp, and others by the same calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_checks import same
from model_families import FAMILIES, inputs, make
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import headwise as hw
from headwise.models.adapters.weights import AttentionWeights

FAMILY = {family.name: family for family in FAMILIES}


class Tracer(TorchFunctionMode):
    """Changes what `F.dropout` returns in eager attention functions: the weights [b, h, n, m]."""

    def __init__(self, change: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.change, self.seen = change, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.dropout and found.ndim == 4 and found.shape[-1] > 1:
            self.seen.append(found)
            changed = self.change(found)
            return found if changed is None else changed
        return found


def without_the_first_key(weights: Tensor) -> None:
    weights[..., 1] += weights[..., 0]
    weights[..., 0] = 0


CHANGES = {
    "in place": without_the_first_key,
    "another tensor": lambda weights: torch.ones_like(weights) / weights.shape[-1],
    "a function of them": lambda weights: weights.flip(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_changed_weights_change_the_output_as_in_eager_attention(name, change):
    model, (given, _) = make(FAMILY[name]), inputs(FAMILY[name])
    before = model(**given)[0]
    model.set_attn_implementation("eager")
    with Tracer(CHANGES[change]) as theirs:
        expected = model(**given)[0]
    with hw.attach(model, weights=True), Tracer(CHANGES[change]) as ours:
        found = model(**given)[0]
    assert len(ours.seen) == len(theirs.seen) > 0
    same(found.detach(), expected.detach())
    assert (expected - before).abs().max() > 1e-3
    if change == "in place":  # eager attention has no gradients then: autograd needs what was overwritten
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours, theirs = (torch.autograd.grad((y**3).sum(), parameters, materialize_grads=True) for y in (found, expected))
    same(torch.cat([x.flatten() for x in ours]), torch.cat([x.flatten() for x in theirs]))


def test_weights_that_are_only_read_are_not_computed():
    model, (given, _) = make(FAMILY["Llama"]), inputs(FAMILY["Llama"])
    with torch.no_grad(), hw.attach(model, weights=True):
        expected = model(**given)[0]
        with Tracer(lambda weights: None) as tracer:
            assert torch.equal(model(**given)[0], expected)
    assert all(isinstance(weights, AttentionWeights) and not weights.made for weights in tracer.seen)
    assert len(tracer.seen) == model.config.num_hidden_layers


def traced(model: Any) -> Any:
    nnterp = pytest.importorskip("nnterp", reason="needs nnterp with nnsight < 0.8", exc_type=ImportError)
    return nnterp.StandardizedTransformer(model, enable_attention_probs=True, tokenizer=tokenizer())


def tokenizer() -> Any:
    """A tokenizer of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: i for i, piece in enumerate(["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])), pad_token="<pad>")


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_layer=2, n_head=4, n_embd=32))


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_attention_heads=4, **sizes))


@pytest.mark.parametrize("build", [gpt2, llama])
def test_nnterp_reads_and_changes_probabilities(build):
    def edited(model: Any) -> list[Tensor]:
        with model.trace(ids):
            without_the_first_key(model.attention_probabilities[0])
            first = model.logits.save()
        with model.trace(ids):
            weights = model.attention_probabilities[1]
            model.attention_probabilities[1] = torch.ones_like(weights) / weights.shape[-1]
            second = model.logits.save()
        return [first, second]

    torch.manual_seed(0)
    model, ids = build().eval(), torch.randint(97, (2, 7))
    expected = gone = None
    with torch.no_grad():
        with hw.attach(model, weights=True):
            wrapped = traced(model)
            with wrapped.trace(ids):
                weights = wrapped.attention_probabilities[1].save()
            assert isinstance(weights, AttentionWeights)
            assert not weights.made
            found = edited(wrapped)
            without = hw.interventions.Forbid(keys=[0], queries=slice(1, None))
            with hw.intervene(model, without, layers=0), wrapped.trace(ids):
                gone = wrapped.attention_probabilities[0].save()
        assert not gone[:, :, 1:, 0].any()
        again = build().eval()
        again.load_state_dict(model.state_dict())
        again.set_attn_implementation("eager")
        wrapped = traced(again)
        with wrapped.trace(ids):
            theirs = wrapped.attention_probabilities[1].save()
        expected = edited(wrapped)
    torch.testing.assert_close(weights + 0, theirs, rtol=1e-5, atol=1e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(
        hw.ConfigError, match=r"nnsight has rewritten the attention function of .*attach the model first"
    ):
        hw.attach(again, weights=True)
