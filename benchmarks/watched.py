"""The models that `benchmarks.watch` watches, the same weights with SDPA, and what people do without a watch."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise as hw
from benchmarks.formulas import statistics

Size = tuple[int, int, int]  # layers, d_model, heads
# Those of the six measures of `watch` that can be computed from weights: all except the largest logit.
OF_WEIGHTS = ("entropy", "effective_keys", "top1_mass", "sink_mass", "mean_distance")


class Block(nn.Module):
    """A pre-norm block; attention is headwise's layer, or the same weights through SDPA."""

    def __init__(self, d: int, heads: int, sdpa: bool) -> None:
        super().__init__()
        self.norm, self.ff_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = hw.MultiHeadAttention(d, heads)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.sdpa = sdpa

    def forward(self, x: Tensor) -> Tensor:
        """One block, causal."""
        z = self.norm(x)
        if self.sdpa:
            q, k, v = self.attention.project(z, z)
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attention.output(heads.transpose(1, 2).flatten(2))
        else:
            x = x + self.attention(z, mask=hw.Causal())
        return x + self.ff(self.ff_norm(x))


def blocks(size: Size, sdpa: bool) -> nn.Module:
    """The same weights whatever computes attention."""
    layers, d, heads = size
    torch.manual_seed(0)
    return nn.Sequential(*(Block(d, heads, sdpa) for _ in range(layers)))


def gpt2(size: Size, n: int, attention: str) -> nn.Module:
    """A GPT-2 of transformers with random weights, the same for each implementation of attention."""
    from transformers import GPT2Config, GPT2Model

    layers, d, heads = size
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1000, bos_token_id=0, eos_token_id=0, n_positions=n, n_embd=d, n_layer=layers, n_head=heads,
        attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    return GPT2Model(config).eval()


def llama(size: Size, kv_heads: int) -> nn.Module:
    """A Llama of transformers with random weights and SDPA, always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, d, heads = size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=d, intermediate_size=8 * d // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def generated(net: nn.Module, ids: Tensor, steps: int) -> tuple[Tensor, list[float]]:
    """The last logits of that many decoding steps after the tokens, and the seconds of each step."""
    cache, times = net(ids).past_key_values, []
    for _ in range(steps):
        begun = time.perf_counter()
        logits: Tensor = net(ids[:, :1], past_key_values=cache).logits
        times.append(time.perf_counter() - begun)
    return logits, times


def answer(net: nn.Module, x: Tensor) -> Tensor:
    """The output of the model, without gradients."""
    with torch.no_grad():
        y = net(x)
    return y if isinstance(y, Tensor) else y.last_hidden_state


def train(net: nn.Module, x: Tensor) -> Tensor:
    """A training step without its optimiser."""
    net.zero_grad(set_to_none=True)
    y: Tensor = net(x)
    y.square().mean().backward()
    return y.detach()


@torch.no_grad()
def with_weights(net: nn.Module, x: Tensor) -> list[dict[str, Tensor]]:
    """The stored weights of every layer, and the statistics that can be computed from them."""
    weights = net(x, output_attentions=True).attentions
    n = x.shape[-1]
    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    return [statistics(p, p, allowed, OF_WEIGHTS) for p in weights]


def prepared(size: Size, n: int, watched: bool, training: bool) -> tuple[Callable[[], Any], Callable[[Any], int]]:
    """A step for `benchmarks.memory.peak_of`. One is done before: gradients of weights and threads then have their
    memory."""
    net, x = blocks(size, sdpa=False), torch.randn(1, n, size[1])
    if watched:
        hw.watch(net).start()
    call = partial(train if training else answer, net, x)
    call()
    return call, lambda y: y.nbytes
