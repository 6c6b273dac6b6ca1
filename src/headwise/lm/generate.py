"""Text generation, one token at a time, with a KV cache."""

import codecs
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headwise.cache import BudgetCache
from headwise.cache.base import Cache
from headwise.edit.budgets import Budget
from headwise.errors import ConfigError, TextError
from headwise.lm.model import Decoder
from headwise.lm.tokenizer import BYTES, CharTokenizer
from headwise.models import find_heads


def write(
    decoder: Decoder,
    tokenizer: CharTokenizer,
    prompt: str,
    length: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int | None = None,
    budget: Budget | None = None,
) -> Iterator[str]:
    """Yield the continuation of `prompt` as it is generated, `length` characters in total.

    Every token attends to the last `context` tokens through a sliding cache, so that texts of any length have a
    constant cost per token. (In a model of several layers, earlier text still has an indirect effect.)

    Args:
        prompt: at least one character.
        temperature: 0 always takes the most likely token; 1 samples from the model's probabilities.
        top_k: sample from the k most likely tokens. top_p: sample from the smallest set of tokens with this total
            probability (nucleus sampling, Holtzman et al. 2019). None disables either.
        seed: the same seed gives the same text.
        budget: number of tokens that each KV head keeps, at most `context`; by default all keep `context`. A budget
            with sinks supports texts of at most `context` tokens: beyond, the sinks would be further away than in
            training. (On the embedded model this costs 0.67 nats per token.)
    Raises:
        TextError, ConfigError: naming the argument; also for a budget of another model.
    """
    check_sampling(prompt, length, temperature, top_k, top_p)
    context = decoder.config.context
    if budget is not None and budget.sinks and len(tokenizer.encode(prompt)) + length > context:
        raise ConfigError(
            f"length={length}: with the prompt that is more than the context of {context} tokens, and the budget's "
            f"first {budget.sinks} tokens would be further back than the model was trained for; give a shorter "
            f"length, or make the budget with --sinks 0",
            f"length={length}：加上开头的文本超过了 {context} 个词元的上下文，预算保留的前 {budget.sinks} "
            "个词元会比训练时更远；请减小 length，或用 --sinks 0 重新制作预算",
        )
    caches = _caches(decoder.eval(), budget)
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)

    def pieces() -> Iterator[str]:
        ids = torch.from_numpy(tokenizer.encode(prompt))[None]
        # Byte tokens are joined to characters; invalid UTF-8 becomes U+FFFD.
        assemble = codecs.getincrementaldecoder("utf-8")("replace")
        written = 0
        while written < length:
            with torch.no_grad():
                hidden, _ = decoder.hidden(ids, caches=caches)
                logits = torch.nn.functional.linear(hidden[0, -1], decoder.embedding.weight)
            token = _sample(logits.float(), temperature, top_k, top_p, generator)
            data = bytes((token,)) if token < BYTES else tokenizer.decode([token]).encode()
            piece = assemble.decode(data)[: length - written]
            if piece:
                written += len(piece)
                yield piece
            ids = torch.tensor([[token]])

    return pieces()


def check_sampling(prompt: str, length: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise as `write` does for these arguments, which do not depend on the model."""
    if not prompt:
        raise TextError(
            "prompt: is empty; give at least one character to begin with", "prompt：是空的；至少给出一个字符作为开头"
        )
    if length < 0:
        raise ConfigError(f"length={length}: expected at least 0", f"length={length}：应不小于 0")
    if not temperature >= 0:
        raise ConfigError(f"temperature={temperature}: expected 0 or more", f"temperature={temperature}：应不小于 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}: expected at least 1", f"top_k={top_k}：应不小于 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p}: expected 0 < top_p <= 1", f"top_p={top_p}：应满足 0 < top_p <= 1")


def _caches(decoder: Decoder, budget: Budget | None) -> Sequence[Cache]:
    """New caches, one per layer."""
    context = decoder.config.context
    if budget is None:
        return decoder.new_caches(context)
    expected, has = [len(windows) for windows in budget.windows], [site.num_kv_heads for site in find_heads(decoder)]
    if expected != has:
        raise ConfigError(
            f"budget: was made for layers of {expected} KV heads; this model has {has}",
            f"budget：是为每层 {expected} 个键值头制作的；此模型有 {has} 个",
        )
    return [
        BudgetCache([context if w is None else min(w, context) for w in windows], budget.sinks)
        for windows in budget.windows
    ]


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # The largest becomes 0, in float64: at very small temperatures the others become −inf, never NaN.
    values, order = ((logits - logits.max()).double() / temperature).sort(descending=True)
    if top_k is not None:
        values[top_k:] = -torch.inf
    p = values.softmax(-1)
    if top_p is not None:
        p[p.cumsum(-1) - p >= top_p] = 0.0  # keeps the token that reaches top_p
    return int(order[torch.multinomial(p, 1, generator=generator)])
