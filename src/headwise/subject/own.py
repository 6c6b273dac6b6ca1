"""A decoder of headwise as a subject."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.lm.loss import mean_loss, next_token_loss
from headwise.lm.model import Decoder
from headwise.lm.tokenizer import CharTokenizer
from headwise.masks import Lengths
from headwise.measures import Measure
from headwise.subject.base import LossFunction, Maps, Subject, described, text_of
from headwise.subject.reading import Reading

# What a map shows, of designs where it is not all that acts on the values.
_UNCHOSEN = "A row without weights is a token that did not choose the head; the gate's weight on a head is not shown."
MEANING = {
    "talking_heads": "Weights are those of the softmax; the heads are mixed once more before they reach the values.",
    "head_mixing": "Weights are those over the text; afterwards the heads of each token attend to one another.",
    "gated_output": "Weights are those before the gate, which may silence a head for a token.",
    "sparse_mixture": _UNCHOSEN,
    "mixture_of_heads": _UNCHOSEN,
}


class DecoderSubject(Subject):
    """A `Decoder` and the characters that it knows."""

    kind, limit, causal = "headwise", None, True
    model: Decoder

    def __init__(self, decoder: Decoder, tokenizer: CharTokenizer, name: str = "decoder") -> None:
        self.name, self.model, self._tokenizer = name, decoder.eval(), tokenizer
        self.context = decoder.config.context
        self.layers = tuple(f"blocks.{i}.attention" for i in range(decoder.config.num_layers))
        maps, _ = self._run(torch.zeros(1, 1, dtype=torch.long), None, (), False)
        self.heads = tuple(amap.shape[1] for amap in maps.values())
        self.about = self._described()

    def read(self, text: str) -> Reading:
        """One token a character, or one a byte of a character that the vocabulary does not have."""
        ids = torch.from_numpy(self._tokenizer.encode(text_of(text)))
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        in_bytes = 0
        for i, (character, (start, end)) in enumerate(zip(text, self._tokenizer.spans(text), strict=True)):
            more = end - start - 1
            pieces += [""] * more + [character]
            spans += [(i, i)] * more + [(i, i + 1)]
            in_bytes += more > 0
        said = (
            f"Not in the model's vocabulary and read as UTF-8 bytes: {in_bytes} of the characters; each is shown whole."
        )
        return Reading(text, ids, pieces, spans, [False] * len(pieces), (said,) if in_bytes else ())

    @property
    def loss_fn(self) -> LossFunction:
        """As in `Subject`."""
        return mean_loss

    def remarks(self, tokens: int) -> list[str]:
        """As in `Subject`."""
        config = self.model.config
        found = [MEANING[config.design]] if config.design in MEANING else []
        if tokens > config.context:
            found.append(
                f"The model was trained on {config.context} tokens at a time; what it does further apart was never "
                f"trained."
            )
        return found

    @property
    def _vocabulary(self) -> int:
        return self.model.config.vocab_size

    @torch.no_grad()
    def _run(
        self, ids: Tensor, mask: Tensor | None, measures: Sequence[str | Measure], with_loss: bool
    ) -> tuple[Maps, Callable[[], float | None]]:
        padding = None if mask is None else Lengths(mask.sum(-1), mask.sum(-1))
        hidden, maps = self.model.hidden(ids, mask=padding, return_maps=True, measures=measures)

        def loss() -> float | None:
            if ids.shape[1] < 2:
                return None
            weight = self.model.embedding.weight
            return float(next_token_loss(hidden[:, :-1].flatten(0, 1), weight, ids[:, 1:].flatten()))

        return dict(zip(self.layers, maps, strict=True)), loss

    def _described(self) -> str:
        c = self.model.config
        extras = [] if c.design == "multi_head" else [c.design]
        extras += [] if c.num_kv_heads is None else [f"{c.num_kv_heads} of keys and values"]
        kind = f" ({', '.join(extras)})" if extras else ""
        return f"{described(self.heads)}{kind}, d_model {c.d_model}, {self.model.num_parameters / 1e6:.1f} M weights"
