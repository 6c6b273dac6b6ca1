"""What a subject is: a model that reads texts and shows its heads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import ConfigError, DTypeError, ShapeError, TextError
from headwise.lm.loading.reading import TokenizedText
from headwise.lm.loading.remarks import remark
from headwise.map import AttentionMap
from headwise.models import HeadSite, find_heads, record_heads
from headwise.stats import Measure
from headwise.wording import Bilingual, Message

Seen = Callable[[str, AttentionMap], None]  # a layer's name, and its map
LossFunction = Callable[[nn.Module, Tensor], Tensor]  # (model, windows [w, tokens + 1]) to nats a token
Maps = dict[str, AttentionMap]


@dataclass(frozen=True, eq=False)
class Look:
    """What a model did with a text.

    Attributes:
        maps: as `LoadedModel.maps` gives them. loss: as `LoadedModel.loss` does.
        outputs: of each layer what its heads give to the output projection, [b, heads, n, d_v]; [] if it is not known
            where that is.
    """

    maps: Maps
    outputs: list[Tensor]
    loss: float | None


class LoadedModel(ABC):
    """A model in eval mode, its tokenizer, and what is known of its heads; `load_model` makes it.

    Attributes:
        name: of the folder, or "embedded decoder". kind: "headwise" or "transformers".
        model: the module. about: it in a line, with its sizes.
        context: tokens that it was trained on at a time, None if nobody says. limit: tokens that it can read at most,
            None if it can read any number.
        layers: qualified names of the attention modules in forward order; a module that is called again has #2, #3 …
            behind its name. heads: of each of them.
        causal: whether no token sees a later one, in any layer.
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

    @abstractmethod
    def read(self, text: str) -> TokenizedText:
        """The text as tokens. TextError if it is empty, or none that can be written as UTF-8."""

    @abstractmethod
    def _run(
        self, ids: Tensor, mask: Tensor | None, measures: Sequence[str | Measure], with_loss: bool,
        seen: Seen | None = None,
    ) -> tuple[Maps, Callable[[], float | None]]:  # fmt: skip
        """Maps, and what then gives the loss if it is asked for. ids [b, n]; mask [b, n] or None."""

    @property
    @abstractmethod
    def loss_fn(self) -> LossFunction | None:
        """(model, windows [w, tokens + 1]) to the mean next-token loss in nats a token, with its graph where gradients
        are on; None for a model that predicts no next token."""

    def remarks(self, tokens: int) -> list[Message]:
        """What to know when a text of so many tokens is read by this model."""
        found = []
        if self.context is not None and tokens > self.context:
            found.append(remark("untrained_length", trained=self.context))
        if self.loss_fn is None:
            found.append(remark("no_next_token"))
        return found

    @torch.no_grad()
    def maps(
        self, ids: Tensor, mask: Tensor | None = None, *, measures: Sequence[str | Measure] = (),
        seen: Seen | None = None,
    ) -> Maps:  # fmt: skip
        """The map of every layer, in forward order.

        Args:
            ids: token ids, [n] or [b, n].
            mask: [b, n] boolean, True where a token stands; padding goes behind the tokens. Padded queries see nothing
                in the maps.
            measures: added up in the same pass, as each map's `measured`.
            seen: told each layer's map as soon as it is there; the model goes on when it returns.
        Returns:
            name → map [b, heads, n, n], lazy: q, k and the log-sum-exp.
        Raises:
            ShapeError, DTypeError: for ids or a mask that do not fit. TextError: for more tokens than `limit`.
        """
        return self._run(*self._checked(ids, mask), measures, False, seen)[0]

    @torch.no_grad()
    def loss(self, ids: Tensor) -> float | None:
        """Mean next-token loss of a text in nats a token; None if the model predicts no next token, or there is only
        one. ids as in `maps`."""
        return self._run(*self._checked(ids, None), (), True)[1]()

    @torch.no_grad()
    def look(self, ids: Tensor) -> Look:
        """Maps, head outputs and loss, in one pass where that is possible. ids as in `maps`."""
        ids, _ = self._checked(ids, None)
        with record_heads(self.sites) as outputs:
            maps, loss = self._run(ids, None, (), True)
            outputs = list(outputs)  # the loss may need the model once more
        return Look(maps, outputs, loss())

    @property
    def sites(self) -> list[HeadSite]:
        """Where the heads lie in the model, one site a layer; [] if that is not known of all layers."""
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
                f"the text has {n:,} tokens, but {self.name} has learned {self.limit:,} positions, which is "
                f"its maximum; give a shorter text"
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
        """Token ids that the model has an embedding for."""

    def __repr__(self) -> str:
        return f"LoadedModel({self.name}: {self.about})"


def described(heads: Sequence[int]) -> Bilingual:
    """Layers and heads in words: "6 layers × 12 heads", or "2 layers × 5/3 heads" where layers differ."""
    each = "/".join(map(str, heads if len(set(heads)) > 1 else heads[:1]))
    return Bilingual(f"{len(heads)} layers × {each} head{'s' * (max(heads) > 1)}", f"{len(heads)} 层 × {each} 头")


def text_of(text: str) -> str:
    """The text, or a TextError if there is nothing in it, or half of a surrogate pair."""
    if not text:
        raise TextError("the text is empty; give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(
            f"text: character {error.start} is half of a surrogate pair (U+{ord(text[error.start]):04X}), "
            f"which is not valid text"
        ) from None
    return text
