"""The interface of loaded models: tokenizing texts, maps of all heads, losses."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, DTypeError, ShapeError, TextError
from headwise.events import call_name
from headwise.lm.loading.remarks import remark
from headwise.lm.loading.tokenized import TokenizedText
from headwise.lm.text_files import not_text
from headwise.map import AttentionMap
from headwise.models import HeadSite, find_heads, input_embedding, record_heads
from headwise.publishing import AttentionCall, observe
from headwise.stats import Measure
from headwise.wording import Bilingual, Message, in_language

OnMap = Callable[[str, AttentionMap], None]  # (name of a layer, its map)
LossFunction = Callable[[nn.Module, Tensor], Tensor]  # (model, windows [w, tokens + 1]) to nats per token
Maps = dict[str, AttentionMap]


@dataclass(frozen=True, eq=False)
class Look:
    """The results of a model on a text.

    Attributes:
        maps: as returned by `LoadedModel.maps`. loss: as returned by `LoadedModel.loss`.
        outputs: of each layer the heads' outputs before the output projection, [b, heads, n, d_v]; [] if their location
            in the model is unknown.
    """

    maps: Maps
    outputs: list[Tensor]
    loss: float | None


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
        self, ids: Tensor, mask: Tensor | None, measures: Sequence[str | Measure], with_loss: bool,
        on_map: OnMap | None = None,
    ) -> tuple[Maps, Callable[[], float | None]]:  # fmt: skip
        """Maps, and a function that returns the loss if `with_loss`. ids [b, n]; mask [b, n] or None."""

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
        return self._run(*self._checked(ids, mask), measures, False, on_map)[0]

    @torch.no_grad()
    def loss(self, ids: Tensor) -> float | None:
        """Mean next-token loss of a text in nats per token; None for a single token, or if the model does not predict
        the next token. ids as in `maps`."""
        return self._run(*self._checked(ids, None), (), True)[1]()

    @torch.no_grad()
    def look(self, ids: Tensor) -> Look:
        """Maps, head outputs and loss, in one pass where that is possible. ids as in `maps`."""
        ids, _ = self._checked(ids, None)
        with record_heads(self.sites) as outputs:
            maps, loss = self._run(ids, None, (), True)
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
                f"the text has {n:,} tokens, but {self.name} has {self.limit:,} positions, which is "
                f"its maximum; give a shorter text, or measure it in windows with `headwise measure`",
                f"文本有 {n:,} 个词元，而 {in_language(self.name, 'zh')} 最多只有 {self.limit:,} 个位置；"
                "请缩短文本，或用 `headwise measure` 分窗口测量",
            )
        self._check_ids(ids)
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

    def _check_ids(self, ids: Tensor) -> None:
        size = self._vocabulary
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ShapeError(
                f"ids: from {int(ids.min())} to {int(ids.max())}, but {self.name} has embeddings for 0 to {size - 1}"
            )

    @property
    @abstractmethod
    def _vocabulary(self) -> int:
        """Number of token ids that have an embedding."""

    def __repr__(self) -> str:
        return f"LoadedModel({self.name}: {self.about})"


def described(heads: Sequence[int]) -> Bilingual:
    """Describe layers and heads: "6 layers × 12 heads", or "2 layers × 5/3 heads" if layers differ."""
    each = "/".join(map(str, heads if len(set(heads)) > 1 else heads[:1]))
    return Bilingual(f"{len(heads)} layers × {each} head{'s' * (max(heads) > 1)}", f"{len(heads)} 层 × {each} 头")


def text_of(text: str) -> str:
    """Return the text. TextError if it is empty or contains half of a surrogate pair."""
    if not text:
        raise TextError("the text is empty; give at least one character", "文本是空的；至少给出一个字符")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise not_text(text, error) from None
    return text
