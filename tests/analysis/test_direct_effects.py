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


def test_a_factor_and_a_bias_of_the_logits_are_part_of_the_effects():
    model = decoder()
    plain = found(model, model.embedding.weight.detach())
    bias = torch.randn(VOCABULARY)
    hook = model.register_forward_hook(lambda _, __, out: out * 0.125 + bias)
    scaled = found(model, model.embedding.weight.detach())
    hook.remove()
    for one, other in zip(plain.next_token, scaled.next_token, strict=True):
        torch.testing.assert_close(other, one * 0.125, equal_nan=True)


def test_logits_with_a_soft_cap_are_refused():
    model = decoder()
    model.register_forward_hook(lambda _, __, out: torch.tanh(out))
    with pytest.raises(ConfigError, match="not a multiple of norm"):
        found(model, model.embedding.weight.detach())


def test_an_unembedding_of_another_width_is_refused():
    with pytest.raises(ConfigError, match=r"unembedding: shape \(37, 19\), expected \[vocabulary, 20\]"):
        found(decoder(), torch.randn(VOCABULARY, 19))


SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
USUAL = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
    "intermediate_size": 41, **SIZES,
}  # fmt: skip
KINDS = {
    "GPT2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, **SIZES},
    "Llama": USUAL,
    "Cohere": {**USUAL, "logit_scale": 0.0625},
    "Granite": {**USUAL, "residual_multiplier": 0.3, "logits_scaling": 3.0, "attention_multiplier": 0.2},
    "OPT": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "word_embed_proj_dim": 32,
            "ffn_dim": 41, **SIZES},
    "Gemma2": {**USUAL, "head_dim": 8, "final_logit_softcapping": None},
    "Olmo2": USUAL,
    "Glm4": {**USUAL, "head_dim": 8},
    "Exaone4": {**USUAL, "head_dim": 8},
}  # fmt: skip


def of_transformers(kind: str, **options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    if not hasattr(transformers, f"{kind}{suffix}"):
        pytest.skip(f"this version of transformers has no {kind}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**KINDS[kind], **options})
    model = getattr(transformers, f"{kind}{suffix}")(config).eval()
    for name, p in model.named_parameters():
        if p.ndim == 1 and ("norm" in name or "ln_" in name):
            p.data.add_(0.3 * torch.randn(p.shape))
        elif p.ndim > 1:
            p.data.mul_(5)
    return model


@pytest.mark.thorough_except("OPT")
@pytest.mark.parametrize("kind", KINDS)
def test_effects_are_those_of_the_model_itself(kind):
    """The logits' derivative with respect to a head's size in the last layer, norms and feed-forward layers held as
    they are: by automatic differentiation of the model's own modules."""
    model, tokens = of_transformers(kind), ids()
    sites = find_heads(model)
    effects = direct_effects(model, lambda: model(tokens[None]), tokens, model.get_output_embeddings().weight.detach())
    site = sites[-1]
    block = model.get_submodule(site.name.rpartition(".")[0])
    size = torch.zeros(1, requires_grad=True)
    after_attention = [False]

    def mark(module, args, out):
        after_attention[0] = True

    def held(module, args, out):
        """A norm at the scale that it has: linear in its input."""
        x = args[0]
        if not (x.requires_grad and after_attention[0]):
            return out
        bias = getattr(module, "bias", None)
        centred = isinstance(module, nn.LayerNorm) or type(module).__name__ == "CohereLayerNorm"
        inner = x - x.mean(-1, keepdim=True) if centred else x
        y = (out if bias is None else out - bias).detach()
        gain_and_scale = y / inner.detach()
        return inner * gain_and_scale + (0 if bias is None else bias)

    def still(module, args, out):
        return out.detach()

    attention = site.module
    feed_forward = [child for name, child in block.named_children() if "mlp" in name or name == "fc2"]
    norms = [m for m in model.modules() if "Norm" in type(m).__name__ and not any(m is c for c in attention.modules())]
    with record_heads(sites) as outputs, torch.no_grad():
        model(tokens[None])
        written = outputs[-1][0] @ site.weights()["o"]  # [h, n, d_model]
    for head in range(len(written)):

        def louder(module, args, out, head=head):
            first = out[0] if isinstance(out, tuple) else out
            first = first + size * written[head]
            return (first, *out[1:]) if isinstance(out, tuple) else first

        hooks = [attention.register_forward_hook(mark), attention.register_forward_hook(louder)]
        hooks += [one.register_forward_hook(still) for one in feed_forward]
        hooks += [one.register_forward_hook(held) for one in norms]
        after_attention[0] = False
        logits = model(tokens[None]).logits[0]
        for hook in hooks:
            hook.remove()
        logits = logits - logits.mean(-1, keepdim=True)
        chosen = logits[range(N - 1), tokens[1:]]
        expected = torch.stack([torch.autograd.grad(x, size, retain_graph=True)[0][0] for x in chosen])
        torch.testing.assert_close(effects.next_token[-1][head, :-1], expected, rtol=1e-3, atol=1e-5)


def test_the_soft_cap_of_gemma_is_refused():
    model, tokens = of_transformers("Gemma2", final_logit_softcapping=5.0), ids()
    with pytest.raises(ConfigError, match="not a multiple of norm"):
        direct_effects(model, lambda: model(tokens[None]), tokens, model.get_output_embeddings().weight.detach())


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
