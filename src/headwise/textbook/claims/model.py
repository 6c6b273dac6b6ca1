"""The trained model that claims about trained heads are measured on: the decoder that comes with headwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.lm.checkpoint import load_pretrained
from headwise.lm.model import Decoder
from headwise.lm.tokenizer import CharTokenizer
from headwise.map import AttentionMap

# From chapter 120 of Water Margin, which the model has not been trained on.
PASSAGE = (
    '当下上皇在马上观之不足，问戴宗道："此是何处，要寡人到此？"戴宗指着山上关路道："请陛下行去，到彼便知。"上'
    "皇纵马登山，行过三重关道，至第三座关前，见有上百人，俯伏在地，尽是披袍挂铠，戎装革带，金盔金甲之将。上皇大惊"
    '，连问道："卿等皆是何人？"只见为头一个，凤翅金盔，锦袍金甲，向前奏道："臣乃梁山泊宋江是也。"上皇曰："寡'
    '人已教卿在楚州为安抚使，却缘何在此？"宋江奏道："臣等谨请陛下到忠义堂上，容臣细诉衷曲枉死之冤。"上皇到忠义'
    "堂前下马，上堂坐定，看堂下时，烟雾中拜伏着许多人。上皇犹豫不定。只见为首"
)


@dataclass(frozen=True)
class Trained:
    """A trained decoder and what its heads do on the passage.

    losses: nats a token, [n − 1]. maps: one a layer. heads: Concat(head_1 … head_h) of each layer, [n, h, d_v].
    """

    decoder: Decoder
    tokenizer: CharTokenizer
    ids: Tensor
    losses: Tensor
    maps: list[AttentionMap]
    heads: list[Tensor]

    def attention(self, layer: int) -> Any:
        """The attention of a layer."""
        return _attention(self.decoder, layer)


@cache
def trained() -> Trained:
    """The decoder on the passage, loaded and run once."""
    decoder, tokenizer, _ = load_pretrained()
    return observed(decoder, tokenizer)


def observed(decoder: Decoder, tokenizer: CharTokenizer) -> Trained:
    """A decoder on the passage."""
    ids = torch.from_numpy(tokenizer.encode(PASSAGE))[None]
    heads: list[Tensor] = []

    def listen(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        heads.append(given[0][0].unflatten(-1, (decoder.config.num_heads, -1)))

    hooks = [_attention(decoder, i).o_proj.register_forward_pre_hook(listen) for i in range(len(decoder.blocks))]
    try:
        with torch.no_grad():
            logits, maps = decoder(ids, return_maps=True)
    finally:
        for hook in hooks:
            hook.remove()
    return Trained(decoder, tokenizer, ids, _losses(logits, ids), maps, heads)


def losses_without(model: Trained, gone: list[tuple[int, int]]) -> Tensor:
    """Nats a token of the passage, [n − 1], with the heads (layer, head) silenced."""
    with _silenced(model.decoder, gone), torch.no_grad():
        return _losses(model.decoder(model.ids), model.ids)


@contextmanager
def _silenced(decoder: Decoder, gone: list[tuple[int, int]]) -> Iterator[None]:
    def zero(layer: int) -> torch.utils.hooks.RemovableHandle:
        size = decoder.config.d_model // decoder.config.num_heads
        heads = [head for at, head in gone if at == layer]

        def silence(_: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
            concat = given[0].clone()
            for head in heads:
                concat[..., size * head : size * (head + 1)] = 0.0
            return concat

        return _attention(decoder, layer).o_proj.register_forward_pre_hook(silence)

    hooks = [zero(layer) for layer in {layer for layer, _ in gone}]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _attention(decoder: Decoder, layer: int) -> Any:
    return decoder.blocks[layer].attention


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
