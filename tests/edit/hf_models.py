"""Small models of transformers with random weights, every parameter drawn; inputs for them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")

VOCAB = 53
CAUSAL = ["gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"]
ENCODERS = ["bert", "roberta", "electra", "distilbert"]


def _config(name: str, changes: dict[str, Any]) -> Any:
    """4 heads of 6 channels; decoders of the Llama family have 2 key heads."""
    common: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 40}
        return transformers.GPT2Config(**(common | sizes | changes))
    if name == "distilbert":
        sizes = {"dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 29, "max_position_embeddings": 40}
        return transformers.DistilBertConfig(**(common | sizes | changes))
    if name == "opt":
        sizes = {"hidden_size": 24, "word_embed_proj_dim": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
        sizes |= {"ffn_dim": 29, "max_position_embeddings": 40}
        return transformers.OPTConfig(**(common | sizes | changes))
    sizes = {
        "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 29,
        "max_position_embeddings": 40,
    }  # fmt: skip
    kinds = {
        "bert": transformers.BertConfig, "roberta": transformers.RobertaConfig, "electra": transformers.ElectraConfig,
        "llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig, "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config, "gemma": transformers.GemmaConfig, "gemma2": transformers.Gemma2Config,
        "gemma3": transformers.Gemma3TextConfig,
    }  # fmt: skip
    if name in ENCODERS:
        return kinds[name](**(common | sizes | {"embedding_size": 24} | changes))
    sizes |= {"num_key_value_heads": 2, "head_dim": 6}
    return kinds[name](**(common | sizes | changes))


def hf_model(name: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model in eval mode: a language model for decoders, the bare encoder otherwise."""
    torch.manual_seed(7)
    config = _config(name, changes)
    kind = transformers.AutoModel if name in ENCODERS else transformers.AutoModelForCausalLM
    how = changes.get("attn_implementation", "eager" if name == "gemma2" else "sdpa")  # SDPA knows no soft cap
    model = kind.from_config(config, attn_implementation=how).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # buffers, such as rotary frequencies, stay in float32
    draw(model)
    return model


def draw(model: nn.Module) -> None:
    """Every parameter moved, so that no bias is at zero and no norm at one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)


def ids(n: int = 11, b: int = 2, seed: int = 3) -> Tensor:
    return torch.randint(3, VOCAB, (b, n), generator=torch.Generator().manual_seed(seed))


def hidden(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    """Logits of a language model, last hidden states of an encoder."""
    found: Tensor = model(input_ids=tokens, **options)[0]
    return found
