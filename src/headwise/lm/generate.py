"""Writing: one token after the other, with a KV cache."""

import codecs
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headwise.cache import BudgetCache, SlidingCache
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
    """Yield the continuation of `prompt`, `length` characters, as it is written.

    Every token sees the last `context` tokens through a sliding cache, so the text may be of any length at a steady
    cost. (In a multi-layer model a token so knows a little of what lies further back, through those in between.)

    Args:
        prompt: at least one character.
        temperature: 0 takes the likeliest token each time; 1 samples the model's own probabilities.
        top_k: sample among the k likeliest only; top_p: among the likeliest that hold that share (nucleus sampling,
            Holtzman et al. 2019). None turns either off.
        seed: the same seed writes the same text.
        budget: how many tokens each key head keeps, at most `context` of them; all keep `context` without it. Its
            sinks, kept while the window slides on, come to stand further back than the model has ever looked: a
            budget with sinks is for texts of at most `context` tokens. (On the embedded model they cost 0.67 nats a
            token beyond.)
    Raises:
        TextError, ConfigError: naming the argument; for a budget of another model too.
    """
    if not prompt:
        raise TextError("prompt: is empty; give at least one character to begin with")
    if length < 0:
        raise ConfigError(f"length={length}: expected at least 0")
    if not temperature >= 0:
        raise ConfigError(f"temperature={temperature}: expected 0 or more")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}: expected at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p}: expected 0 < top_p <= 1")
    context = decoder.config.context
    if budget is not None and budget.sinks and len(tokenizer.encode(prompt)) + length > context:
        raise ConfigError(
            f"length={length}: with the prompt that is more than the context of {context} tokens, and the budget's "
            f"first {budget.sinks} tokens would be further back than the model was trained for; give a shorter "
            f"length, or make the budget with --sinks 0"
        )
    caches = _caches(decoder, budget)
    return _write(decoder.eval(), tokenizer, prompt, length, temperature, top_k, top_p, seed, caches)


def _caches(decoder: Decoder, budget: Budget | None) -> Sequence[Cache]:
    """New caches, one a layer."""
    context = decoder.config.context
    if budget is None:
        return [SlidingCache(context) for _ in decoder.blocks]
    given, has = [len(windows) for windows in budget.windows], [site.num_kv_heads for site in find_heads(decoder)]
    if given != has:
        raise ConfigError(f"budget: was made for layers of {given} KV heads; this model has {has}")
    return [
        BudgetCache([context if w is None else min(w, context) for w in windows], budget.sinks)
        for windows in budget.windows
    ]


def _write(
    decoder: Decoder,
    tokenizer: CharTokenizer,
    prompt: str,
    length: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    caches: Sequence[Cache],
) -> Iterator[str]:
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    ids = torch.from_numpy(tokenizer.encode(prompt))[None]
    # Bytes are put together to characters; what is no UTF-8 comes out as U+FFFD.
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


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # Largest first becomes 0, in float64: however small the temperature, the rest is −inf at worst, never NaN.
    values, order = ((logits - logits.max()).double() / temperature).sort(descending=True)
    if top_k is not None:
        values[top_k:] = -torch.inf
    p = values.softmax(-1)
    if top_p is not None:
        p[p.cumsum(-1) - p >= top_p] = 0.0  # the token that crosses the share is kept
    return int(order[torch.multinomial(p, 1, generator=generator)])
