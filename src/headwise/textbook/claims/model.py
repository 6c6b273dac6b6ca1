"""The trained model for claims about trained heads: the decoder that comes with headwise."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.lm.checkpoint import load_pretrained
from headwise.lm.model import Decoder
from headwise.lm.texts import CharTokenizer
from headwise.map import AttentionMap
from headwise.models import find_heads, record_heads, scale_heads

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
    """A trained decoder and the results of its heads on the passage.

    Attributes:
        losses: nats per token, [n − 1]. maps: one per layer. heads: the heads' outputs of each layer, [n, h, d_v].
    """

    decoder: Decoder
    tokenizer: CharTokenizer
    ids: Tensor
    losses: Tensor
    maps: list[AttentionMap]
    heads: list[Tensor]

    def attention(self, layer: int) -> Any:
        """The attention of a layer."""
        return self.decoder.blocks[layer].attention


@cache
def trained() -> Trained:
    """The embedded decoder with its results on the passage; loaded and run once."""
    decoder, tokenizer, _ = load_pretrained()
    return observed(decoder, tokenizer)


@torch.no_grad()
def observed(decoder: Decoder, tokenizer: CharTokenizer) -> Trained:
    """Run a decoder on the passage."""
    ids = torch.from_numpy(tokenizer.encode(PASSAGE))[None]
    with record_heads(find_heads(decoder)) as heads:
        logits, maps = decoder(ids, return_maps=True)
    return Trained(decoder, tokenizer, ids, _losses(logits, ids)[0], maps, [x[0].transpose(0, 1) for x in heads])


@torch.no_grad()
def losses_without(model: Trained, removed: list[tuple[int, int]], ids: Tensor | None = None) -> Tensor:
    """Nats per token, [n − 1], with the outputs of the heads (layer, head) set to zero. ids: another text than the
    passage, [1, n]."""
    sites = find_heads(model.decoder)
    gates = [torch.ones(site.num_heads) for site in sites]
    for layer, head in removed:
        gates[layer][head] = 0.0
    with scale_heads(sites, gates):
        return losses_of(model.decoder, model.ids if ids is None else ids)[0]


@torch.no_grad()
def losses_of(decoder: Decoder, ids: Tensor, *, scale: float = 1.0) -> Tensor:
    """Nats per token of texts [b, n], as [b, n − 1]. scale: of the outputs of all heads."""
    sites = find_heads(decoder)
    with (
        scale_heads(sites, [torch.full((site.num_heads,), scale) for site in sites]) if scale != 1.0 else nullcontext()
    ):
        return _losses(decoder(ids), ids)


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().mT, ids[:, 1:], reduction="none")
