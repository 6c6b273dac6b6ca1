"""Direct effects of heads on logits, against the dense formula and against the whole of the logits."""

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.analysis import direct_effects
from headwise.errors import ConfigError
from headwise.lm.model import Decoder, DecoderConfig
from headwise.models import find_heads, record_heads

N, VOCABULARY = 11, 37


def decoder(**options) -> Decoder:
    torch.manual_seed(3)
    config = DecoderConfig(VOCABULARY, d_model=20, num_layers=2, num_heads=5, d_ff=23, context=64, **options)
    return Decoder(config).eval()


def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (N,), generator=torch.Generator().manual_seed(5))


def found(model: nn.Module, unembedding: torch.Tensor, **options) -> hw.analysis.DirectEffects:
    tokens = ids()
    return direct_effects(model, lambda: model(tokens[None]), tokens, unembedding, sites=find_heads(model), **options)


def test_effects_are_those_of_the_formula():
    model, tokens = decoder(), ids()
    nn.init.uniform_(model.norm.weight, 0.5, 2.0)
    effects = found(model, model.embedding.weight.detach(), top=4)
    sites = find_heads(model)
    with record_heads(sites) as outputs, torch.no_grad():
        residual: list[torch.Tensor] = []
        hook = model.norm.register_forward_pre_hook(lambda _, args: residual.append(args[0][0].double()))
        logits = model(tokens[None])[0].double()
        hook.remove()
    x, words = residual[0], model.embedding.weight.detach().double()
    scale = 1 / x.square().mean(-1, keepdim=True).sqrt()

    def effect(written: torch.Tensor) -> torch.Tensor:
        """[..., n, d_model] as logits less their mean."""
        made = (written * scale * model.norm.weight.detach().double()) @ words.T
        return made - made.mean(-1, keepdim=True)

    torch.testing.assert_close(effect(x), logits - logits.mean(-1, keepdim=True), rtol=1e-4, atol=1e-4)
    for layer, site in enumerate(sites):
        exact = effect(outputs[layer][0].double() @ site.weights()["o"].double())  # [h, n, V]
        following = exact[:, range(N - 1), tokens[1:]]
        torch.testing.assert_close(effects.next_token[layer][:, :-1].double(), following, rtol=1e-3, atol=1e-4)
        assert effects.next_token[layer][:, -1].isnan().all()
        best = exact.topk(4)
        torch.testing.assert_close(effects.values[layer].double(), best.values, rtol=1e-3, atol=1e-4)
        chosen = exact.gather(2, effects.tokens[layer])
        torch.testing.assert_close(chosen, best.values, rtol=1e-3, atol=1e-4)


def test_a_residual_stream_that_ends_in_no_norm_is_refused():
    model = decoder(order="post")
    with pytest.raises(ConfigError, match="residual stream"):
        found(model, model.embedding.weight.detach())


def test_heads_whose_outputs_are_not_summed_are_refused():
    model = decoder(design="talking_heads")
    model.blocks[0].attention.register_forward_hook(lambda _, __, out: out * torch.linspace(1, 2, 20))
    with pytest.raises(ConfigError, match=r"blocks\.0\.attention: its output is not the sum of what its heads write"):
        found(model, model.embedding.weight.detach())


def test_too_few_tokens_are_refused():
    model = decoder()
    with pytest.raises(ConfigError, match="at least 2"):
        direct_effects(model, lambda: None, ids()[:1], model.embedding.weight, sites=find_heads(model))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Gemma2", "Olmo2"])
def test_models_of_transformers_are_read_or_refused(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "GPT2":
        config = transformers.GPT2Config(n_layer=2, n_head=3, n_embd=24, n_positions=64, **sizes)
    else:
        config = getattr(transformers, f"{kind}Config")(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=41,
            head_dim=8, **sizes,
        )  # fmt: skip
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))(config).eval()
    matrix = model.get_output_embeddings().weight.detach()
    if kind in ("Gemma2", "Olmo2"):  # a norm follows their attention
        with pytest.raises(ConfigError, match="residual stream"):
            found(model, matrix)
        return
    effects = found(model, matrix)
    assert [tuple(layer.shape) for layer in effects.next_token] == [(config.num_attention_heads, N)] * 2
    assert all(torch.isfinite(layer[:, :-1]).all() for layer in effects.next_token)


def test_they_show_themselves_as_a_table_and_find_the_heads():
    model, tokens = decoder(), ids()
    effects = direct_effects(model, lambda: model(tokens[None]), tokens, model.embedding.weight.detach())
    means = [row[:, :-1].mean(1) for row in effects.next_token]
    for column, row in zip(effects.table["direct effect"], means, strict=True):
        torch.testing.assert_close(column, row.to(column))
    lines = repr(effects).splitlines()
    assert lines[0] == "Direct effect on the logit of the next token, mean over the text"
    assert len(lines) == 2 + sum(len(row) for row in means)
    assert "<table" in effects._repr_html_()
