"""A decoder of headwise as a loaded model."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.lm.loading.base import (
    LoadedModel,
    LossFunction,
    Maps,
    OnMap,
    TokenizedText,
    checked_text,
    described,
    remark,
    remarks_on_map,
)
from headwise.lm.model import Decoder, mean_loss, next_token_loss
from headwise.lm.texts import CharTokenizer
from headwise.masks import Lengths
from headwise.nn.registry import STANDARD
from headwise.stats import Measure
from headwise.wording import Bilingual, Message, scaled


class DecoderModel(LoadedModel):
    """A `Decoder` with its tokenizer."""

    kind, limit, causal = "headwise", None, True
    model: Decoder

    def __init__(
        self, decoder: Decoder, tokenizer: CharTokenizer, name: str = "decoder", info: Mapping[str, Any] | None = None
    ) -> None:
        """info: of the checkpoint; it may contain held-out losses."""
        self.heldout = _heldout(info or {})
        self.name, self.model, self._tokenizer = name, decoder.eval(), tokenizer
        self.context = decoder.config.context
        self.layers = tuple(f"blocks.{i}.attention" for i in range(decoder.config.num_layers))
        maps, _ = self._run(torch.zeros(1, 1, dtype=torch.long), None, (), False)
        self.heads = tuple(amap.shape[1] for amap in maps.values())
        self.about = self._described()

    def read(self, text: str) -> TokenizedText:
        """Tokenize a text: one token per character, or one per UTF-8 byte of a character outside the vocabulary."""
        ids = torch.from_numpy(self._tokenizer.encode(checked_text(text)))
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        in_bytes = 0
        for i, (character, (start, end)) in enumerate(zip(text, self._tokenizer.spans(text), strict=True)):
            more = end - start - 1
            pieces += [""] * more + [character]
            spans += [(i, i)] * more + [(i, i + 1)]
            in_bytes += more > 0
        remarks = (remark("read_as_bytes", count=in_bytes),) if in_bytes else ()
        return TokenizedText(text, ids, pieces, spans, [False] * len(pieces), remarks)

    @property
    def loss_fn(self) -> LossFunction:
        """As in `LoadedModel`."""
        return mean_loss

    @property
    def unembedding(self) -> Tensor:
        """As in `LoadedModel`."""
        return self.model.embedding.weight.detach()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """As in `LoadedModel`; a byte as <0xE4>."""
        return self._tokenizer.pieces(ids)

    def remarks(self, tokens: int) -> list[Message]:
        """As in `LoadedModel`."""
        return [*remarks_on_map(self.model.config.design), *super().remarks(tokens)]

    @property
    def _vocabulary(self) -> int:
        return self.model.config.vocab_size

    @torch.no_grad()
    def _run(
        self, ids: Tensor, mask: Tensor | None, measures: Sequence[str | Measure], with_loss: bool,
        on_map: OnMap | None = None,
    ) -> tuple[Maps, Callable[[], float | None]]:  # fmt: skip
        padding = None if mask is None else Lengths(mask.sum(-1), mask.sum(-1))
        with self._collected(measures, on_map) as maps:
            hidden, _ = self.model.hidden(ids, mask=padding)

        def loss() -> float | None:
            if ids.shape[1] < 2:
                return None
            weight = self.model.embedding.weight
            return float(next_token_loss(hidden[:, :-1].flatten(0, 1), weight, ids[:, 1:].flatten()))

        return maps, loss

    def _described(self) -> Bilingual:
        c, heads, size = self.model.config, described(self.heads), scaled(self.model.num_parameters)
        extras = [] if c.design == STANDARD else [c.design]
        extras += [] if c.num_kv_heads is None else [f"{c.num_kv_heads} KV"]
        kind = f" ({', '.join(extras)})" if extras else ""
        return Bilingual(
            f"{heads}{kind}, d_model {c.d_model}, {size} weights", f"{heads.zh}{kind}，d_model {c.d_model}，{size} 参数"
        )


def _heldout(info: Mapping[str, Any]) -> dict[str, float]:
    """The held-out losses in the info of a checkpoint; {} if there are none, or the model was changed afterwards."""
    found = info.get("heldout")
    if not isinstance(found, dict) or "changes" in info:
        return {}
    losses = {name: x for name, x in found.items() if name != "all"}
    known = all(isinstance(x, float) and math.isfinite(x) for x in losses.values())
    return losses if known else {}
