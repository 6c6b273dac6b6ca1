"""Loaded models: the interface, tokenized texts, lengths, and remarks in both languages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, DTypeError, ShapeError, TextError, whole_number
from headwise.kernels.events import call_name
from headwise.lm.texts import not_text
from headwise.map import AttentionMap
from headwise.models import HeadSite, find_heads, input_embedding, record_heads
from headwise.models.configuration import text_part, trained_context
from headwise.nn.registry import design_of
from headwise.publishing import AttentionCall, observe
from headwise.stats import Measure
from headwise.wording import Bilingual, Message, tr, trn

SENTENCES = {
    "untrained_length": tr(
        "The model was trained on {trained:,} tokens at a time. Do not trust weights, statistics and losses of the "
        "last {beyond:,} tokens: its behaviour there is untrained."
    ),
    "no_next_token": tr(
        "The model does not predict the next token, so there is no loss to measure the importance of heads."
    ),
    "read_as_bytes": tr(
        "Not in the model's vocabulary and read as UTF-8 bytes: {count:,} of the characters; each is shown as a whole."
    ),
    "unknown_tokens": tr(
        "Not in the model's vocabulary: {count:,} of the {of:,} tokens; the model reads {sign}; the original text is "
        "shown."
    ),
    "parts_of_characters": tr(
        "Characters that consist of several tokens are shown as a whole: {count:,} tokens end inside a character."
    ),
}


def remark(code: str, /, **values: int | str) -> Message:
    """One of SENTENCES with its values."""
    return SENTENCES[code].filled(code, **values)


def remarks_on_map(design: str) -> list[Message]:
    """What the map of a head design does not show, by the design's own notes; empty if it shows all."""
    notes = design_of(design).notes.map
    return [] if notes is None else [Message("{note}", {"note": notes}, code=f"map_of_{design}")]


def remarks_on_tokens(ids: list[int], pieces: list[str], unknown: int | None, sign: str) -> tuple[Message, ...]:
    """Which tokens are not shown as the model reads them. unknown, sign: id and text of its token for all others."""
    remarks = []
    missing = 0 if unknown is None else ids.count(unknown)
    if missing:
        remarks.append(remark("unknown_tokens", count=missing, of=len(ids), sign=sign))
    parts = sum(not piece for piece in pieces)
    if parts:
        remarks.append(remark("parts_of_characters", count=parts))
    return tuple(remarks)


BUFFERS = "embed_positions", "pos_encoding"  # tables [positions, width] that are not learned: of GPT-J, CodeGen; CTRL


def positions_of(model: Any) -> int | None:
    """Number of positions of a model, maybe on the meta device, or None: from tables such as `position_embeddings` and
    `wpe` of the part that reads text, without entries reserved for padding."""
    text = model if text_part(model.config) is model.config else model.get_decoder()
    own = type(text.config)
    others = {  # such as an image encoder beside the text's layers (GIT)
        id(inner)
        for module in text.modules()
        if type(getattr(module, "config", text.config)) is not own
        for inner in module.modules()
    }
    parts = [(name, module) for name, module in text.named_modules() if id(module) not in others]
    found = [number for name, module in parts if (number := _entries(name, module)) is not None]
    for _, module in parts:
        found += [table.shape[-2] for name, table in module.named_buffers(recurse=False) if name in BUFFERS]
    # Some tables are longer than the indices that the model makes (Nyströmformer).
    longest = trained_context(model.config)
    return min(found if longest is None else (*found, longest)) if found else None


def whole_window(window: object) -> int | None:
    """The tokens of a window as an integer of Python, or None; raises ConfigError for anything else."""
    number = None if window is None else whole_number(window)
    if number is None and window is not None:
        raise ConfigError("window={window!r}: expected a whole number of tokens", window=window)
    return number


def check_window(window: int, limit: int | None, name: str) -> None:
    """Raise ConfigError if windows have more tokens than a model has positions."""
    if limit is not None and window > limit:
        raise ConfigError(
            "window={window}: {name} has {limit:,} positions; expected at most as many",
            window=window,
            name=name,
            limit=limit,
        )


def _entries(name: str, module: Any) -> int | None:
    """Positions in a table of positions, None for any other module."""
    last, weight = name.rpartition(".")[2], getattr(module, "weight", None)
    if not (last == "wpe" or "position" in last) or not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    if not hasattr(module, "padding_idx"):  # not an embedding, nor the quantized one of I-BERT
        return None
    kept = getattr(module, "offset", None)  # OPT
    if not isinstance(kept, int):
        kept = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa
    return int(weight.shape[0]) - kept


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text and its tokens.

    Attributes:
        text: the original text.
        ids: [n] int64 token ids, including the special tokens that the tokenizer adds.
        pieces: the readable form of each token, such as "武", " world" or "[SEP]". A token that ends inside a character
            has "", and the last token of that character has the whole character.
        spans: (start, end) of each token in the text, in characters; empty for tokens that are not in the text.
        special: whether each token was added by the tokenizer, such as [CLS] and <s>.
        remarks: notes on the tokenization, such as how much of the text is not in the vocabulary.
    """

    text: str
    ids: Tensor
    pieces: list[str]
    spans: list[tuple[int, int]]
    special: list[bool]
    remarks: tuple[Message, ...] = ()

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def words(self) -> list[str]:
        """The text divided at its tokens; joined without the special ones, they are the whole text. Characters that the
        tokenizer drops, such as blanks between words, belong to the token after them."""
        found: list[str] = []
        at, last = 0, -1
        for i, (piece, (start, end), special) in enumerate(zip(self.pieces, self.spans, self.special, strict=True)):
            if special or start == end:
                found.append(piece)
                continue
            found.append(self.text[at:end])
            at, last = end, i
        if last >= 0:
            found[last] += self.text[at:]
        return found

    @property
    def units(self) -> list[tuple[int, int]]:
        """Token ranges that can be shown: a token, or all tokens of one character."""
        return units_of(self.pieces)

    def __repr__(self) -> str:
        start = " ".join(self.text.split())
        return f"TokenizedText({start[:24] + '…' if len(start) > 24 else start!r}, {len(self)} tokens)"


def units_of(pieces: Sequence[str]) -> list[tuple[int, int]]:
    """Token ranges that each end with a nonempty piece; empty pieces at the end belong to the last range."""
    ends = [i + 1 for i, piece in enumerate(pieces) if piece]
    if not ends or ends[-1] < len(pieces):
        ends[-1:] = [len(pieces)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


OnMap = Callable[[str, AttentionMap], None]  # (name of a layer, its map)
LossFunction = Callable[[nn.Module, Tensor], Tensor]  # (model, windows [w, tokens + 1]) to nats per token
Maps = dict[str, AttentionMap]


@dataclass(frozen=True, eq=False)
class Look:
    """The results of a model on a text."""

    maps: Maps  # as returned by `LoadedModel.maps`
    outputs: list[Tensor]  # of each layer the heads' outputs, [b, heads, n, d_v]; [] if unknown
    loss: float | None  # as returned by `LoadedModel.loss`


class LoadedModel(ABC):
    """A model in eval mode with its tokenizer, as returned by `load_model`.

    Attributes:
        name: of the folder, or "embedded decoder". kind: "headwise" or "transformers".
        model: the module. about: a description in one line, with sizes.
        context: context length in training, None if unknown. limit: maximum number of tokens, None if unlimited.
        layers: qualified names of the attention modules in forward order; repeated calls of a module are marked #2,
            #3 …. heads: number of heads of each layer.
        causal: whether all layers are causal.
        heldout: of each text that the model was trained on, the loss on its held-out part, in nats per token; {} if
            unknown.
    """

    name: str
    kind: str
    model: nn.Module
    about: str
    context: int | None
    limit: int | None
    layers: tuple[str, ...]
    heads: tuple[int, ...]
    causal: bool
    heldout: Mapping[str, float] = {}

    @abstractmethod
    def read(self, text: str) -> TokenizedText:
        """Tokenize a text. TextError if it is empty or cannot be encoded as UTF-8."""

    @abstractmethod
    def _run(
        self, ids: Tensor, mask: Tensor | None, measures: Sequence[str | Measure], first: int | None,
        on_map: OnMap | None = None,
    ) -> tuple[Maps, Callable[[], float | None]]:  # fmt: skip
        """Maps, and a function that returns the loss of the tokens from `first` on; of none if `first` is None. ids
        [b, n]; mask [b, n] or None."""

    @contextmanager
    def _collected(self, measures: Sequence[str | Measure], on_map: OnMap | None) -> Iterator[Maps]:
        """Within it, the map of each attention call of the model is stored in the dictionary that it yields."""
        maps: Maps = {}

        def store(call: AttentionCall) -> None:
            if call.held is not None:
                raise ConfigError(f"{call.name}: {call.held}; give a model whose heads are not split over ranks")
            name = call_name(call.name, maps)
            maps[name] = call.map
            if on_map is not None:
                on_map(name, call.map)

        with observe(store, model=self.model, measures=measures):
            yield maps

    @property
    @abstractmethod
    def loss_fn(self) -> LossFunction | None:
        """A function from (model, windows [w, tokens + 1]) to the mean next-token loss in nats per token, with its
        graph if gradients are enabled; None for a model that does not predict the next token."""

    @property
    def unembedding(self) -> Tensor | None:
        """The matrix [vocabulary, d_model] of next-token logits; None for a model that does not predict them."""
        return None

    @property
    def embedding(self) -> Tensor | None:
        """The input embedding of each token id, [vocabulary, d_model]; None if unknown."""
        return input_embedding(self.model)

    @abstractmethod
    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of single tokens, each by itself."""

    def remarks(self, tokens: int) -> list[Message]:
        """Notes on reading a text of this number of tokens with this model."""
        found = []
        if self.context is not None and tokens > self.context:
            found.append(remark("untrained_length", trained=self.context, beyond=tokens - self.context))
        if self.loss_fn is None:
            found.append(remark("no_next_token"))
        return found

    @torch.no_grad()
    def maps(
        self, ids: Tensor, mask: Tensor | None = None, *, measures: Sequence[str | Measure] = (),
        on_map: OnMap | None = None,
    ) -> Maps:  # fmt: skip
        """Compute the map of every layer, in forward order.

        Args:
            ids: token ids, [n] or [b, n].
            mask: [b, n] boolean, True for tokens and False for padding, which must follow the tokens. Padded queries
                are fully masked in the maps.
            measures: statistics accumulated in the same pass, as each map's `measured`.
            on_map: called with each layer's name and map as soon as it is computed.
        Returns:
            name → map [b, heads, n, n], which stores q, k and the log-sum-exp.
        Raises:
            ShapeError, DTypeError: if ids or mask do not fit. TextError: for more tokens than `limit`.
        """
        return self._run(*self._checked(ids, mask), measures, None, on_map)[0]

    @torch.no_grad()
    def loss(self, ids: Tensor) -> float | None:
        """Mean next-token loss of a text in nats per token; None for a single token, or if the model does not predict
        the next token. ids as in `maps`."""
        return self._run(*self._checked(ids, None), (), 1)[1]()

    @torch.no_grad()
    def look(self, ids: Tensor, *, first: int = 1) -> Look:
        """Maps, head outputs and the loss of the tokens from `first` on, in one pass where that is possible. ids as in
        `maps`."""
        ids, _ = self._checked(ids, None)
        with record_heads(self.sites) as outputs:
            maps, loss = self._run(ids, None, (), first)
            outputs = list(outputs)  # a copy: computing the loss may run the model again
        return Look(maps, outputs, loss())

    @property
    def sites(self) -> list[HeadSite]:
        """The locations of the heads in the model, one site per layer; [] if unknown for any layer."""
        try:
            found = {site.name: site for site in find_heads(self.model)}
        except ConfigError:
            return []
        known = [found[name] for name in self.layers if name in found]
        fits = [site.num_heads for site in known] == list(self.heads)
        return known if fits else []

    def _checked(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            came = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
            raise DTypeError(f"ids: expected a tensor of whole numbers [n] or [b, n], got {came}")
        if ids.ndim not in (1, 2) or 0 in ids.shape:
            raise ShapeError(f"ids: shape {tuple(ids.shape)}, expected [n] or [b, n] with at least one token")
        ids = torch.atleast_2d(ids).long()
        n = ids.shape[1]
        if self.limit is not None and n > self.limit:
            raise TextError(
                "the text has {n:,} tokens, but {name} has {limit:,} positions, which is its maximum; give a shorter "
                "text, or measure it in windows with `headwise measure`",
                n=n,
                name=self.name,
                limit=self.limit,
            )
        size = self._vocabulary
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ShapeError(
                f"ids: from {int(ids.min())} to {int(ids.max())}, but {self.name} has embeddings for 0 to {size - 1}"
            )
        if mask is None:
            return ids, None
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
            came = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ShapeError(
                f"mask: expected booleans {tuple(ids.shape)}, True for tokens and False for padding, got {came}"
            )
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()) or not bool(mask[:, 0].all()):
            raise ShapeError("mask: padding must follow the tokens, and each text needs at least one token")
        return ids, None if bool(mask.all()) else mask

    @property
    @abstractmethod
    def _vocabulary(self) -> int:
        """Number of token ids that have an embedding."""

    def __repr__(self) -> str:
        return f"LoadedModel({self.name}: {self.about})"


def described(heads: Sequence[int]) -> Bilingual:
    """Describe layers and heads: "6 layers × 12 heads", or "2 layers × 5/3 heads" if layers differ."""
    each = "/".join(map(str, heads if len(set(heads)) > 1 else heads[:1]))
    return trn(
        "{number} layers × {each} head",
        "{number} layers × {each} heads",
        count=max(heads),
        number=len(heads),
        each=each,
    )


def checked_text(text: str) -> str:
    """Return the text. TextError if it is empty or contains half of a surrogate pair."""
    if not text:
        raise TextError(tr("the text is empty; give at least one character"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise not_text(text, error) from None
    return text
