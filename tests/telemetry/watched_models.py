"""Small models of every make to be watched, and what their records should say."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw

VOCAB = 53


class Mixed(nn.Module):
    """headwise's layers, PyTorch's, and a model of transformers if there is one, one after the other."""

    def __init__(self, llama: bool = False, heads: tuple[int, ...] = (2, 3)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            hw.TransformerBlock(hw.MultiHeadAttention(24, count, rotary=True), d_ff=17) for count in heads
        )
        self.encoder = nn.TransformerEncoderLayer(24, 4, 19, batch_first=True, dropout=0.0)
        self.llama = transformers_model("llama").base_model if llama else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask=hw.Causal())
        x = self.encoder(x)
        return x if self.llama is None else self.llama(inputs_embeds=x)[0]


MIXED_LAYERS = ("blocks.0.attention", "blocks.1.attention", "encoder.self_attn")


def mixed(llama: bool = False, heads: tuple[int, ...] = (2, 3)) -> Mixed:
    torch.manual_seed(5)
    return Mixed(llama, heads).eval()


def x(b: int = 2, n: int = 11, d: int = 24, seed: int = 1) -> Tensor:
    return torch.randn(b, n, d, generator=torch.Generator().manual_seed(seed))


def ids(b: int = 2, n: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (b, n), generator=torch.Generator().manual_seed(seed))


def transformers_model(name: str, **changes: Any) -> Any:
    """4 heads of 6 channels, two layers; decoders of the Llama family have 2 key heads. Every parameter is drawn."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    torch.manual_seed(7)
    common: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes: dict[str, Any] = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29,
        "max_position_embeddings": 40,
    }  # fmt: skip
    grouped = {**sizes, "num_key_value_heads": 2, "head_dim": 6}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {
        "gpt2": lambda o: transformers.GPT2Config(**o, n_embd=24, n_layer=2, n_head=4, n_positions=40, **quiet),
        "bert": lambda o: transformers.BertConfig(**o, **sizes, **still),
        "llama": lambda o: transformers.LlamaConfig(**o, **grouped),
        "qwen3": lambda o: transformers.Qwen3Config(**o, **grouped),
        "gemma3": lambda o: transformers.Gemma3TextConfig(**o, **grouped),
    }[name]({**common, **changes})
    kind = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def largest(record: Any, layer: str) -> Tensor:
    """The largest logit of each head of a layer, [h], from the maps of a record with maps="lazy", in float64."""
    amap = record.maps[layer]
    doubled = hw.attend(
        amap.q.double(), amap.k.double(), amap.k.double()[..., :1], mask=amap.mask, scale=amap.rule.scale,
        score=amap.rule.scores, return_map=True, kernel="reference",
    )[1]  # fmt: skip
    logits = doubled[:].log() + doubled.lse[..., None]
    return logits.amax((0, 2, 3))
