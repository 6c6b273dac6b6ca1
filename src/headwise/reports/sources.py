"""What a report is made of: texts by any library's tokenizer, layers of any number of heads, groups of maps.

Supported are tokenizers of transformers and headwise, of the packages tokenizers, sentencepiece and tiktoken, and any
object with encode(text) and decode(ids), such as that of a character model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.kernels.events import crosses, module_name
from headwise.lm.loading.characters import Pieces, pieces_of
from headwise.map import AttentionMap
from headwise.masks import Grid, Span, is_causal
from headwise.masks.grid import NO_GAP
from headwise.reports.messages import message
from headwise.telemetry.lens import Picture
from headwise.wording import counted

EXPECTED = (
    "expected a tokenizer of transformers or headwise, or an object with encode(text) and decode(ids), such as "
    "types.SimpleNamespace(encode=…, decode=…)"
)
NAMES = ("convert_ids_to_tokens", "id_to_token", "id_to_piece", "decode")  # methods that tokens are decoded by


def inputs_of(text: str, tokenizer: Any) -> Tensor | dict[str, Any]:
    """The arguments of a model for a text: the tokenizer's for transformers, else the token ids [1, n]."""
    if hasattr(tokenizer, "convert_ids_to_tokens") and callable(tokenizer):
        return dict(_called(tokenizer, "call", lambda: tokenizer(text, return_tensors="pt")))
    if not hasattr(tokenizer, "encode"):
        raise ConfigError(f"tokenizer: {type(tokenizer).__name__} has no encode; {EXPECTED}")
    found = _called(tokenizer, "encode", lambda: tokenizer.encode(text))
    found = getattr(found, "ids", found)  # tokenizers returns an Encoding
    try:
        ids = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"tokenizer: encode(text) of {len(text)} characters returned {short(found)}, no token ids")
    return torch.atleast_2d(ids)


def decoded(tokenizer: Any, ids: Sequence[int]) -> Pieces:
    """The text of each token."""
    if not any(hasattr(tokenizer, name) for name in NAMES):
        raise ConfigError(
            f"tokenizer: {type(tokenizer).__name__} has no convert_ids_to_tokens and no decode; {EXPECTED}, or give "
            f"pieces=…, the text of each token"
        )
    return _called(tokenizer, "decode", lambda: pieces_of(tokenizer, ids))


def _called(tokenizer: Any, name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"tokenizer: {name} of {type(tokenizer).__name__} raised {what}") from error


def short(value: object) -> str:
    """A value as it is shown in an error: at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True)
class Places:
    """The number of heads of each layer. Arrays are padded to the largest one, and at least to `least`."""

    counts: tuple[int, ...]
    least: int = 0

    @property
    def most(self) -> int:
        """The number of heads of padded arrays."""
        return max(self.least, *self.counts)

    @property
    def indices(self) -> list[int]:
        """layer · most + head of every head."""
        return [layer * self.most + head for layer, count in enumerate(self.counts) for head in range(count)]

    def stacked(self, layers: Sequence[np.ndarray], fill: float = np.nan) -> np.ndarray:
        """Arrays [heads, …], one per layer, as [layers, most, …]."""
        whole = np.full((len(layers), self.most, *layers[0].shape[1:]), fill, layers[0].dtype)
        for into, layer in zip(whole, layers, strict=True):
            into[: len(layer)] = layer
        return whole

    def square(self, matrix: np.ndarray) -> np.ndarray:
        """A matrix [heads, heads] as [layers · most, layers · most], NaN for missing heads."""
        whole = np.full((len(self.counts) * self.most,) * 2, np.nan)
        whole[np.ix_(self.indices, self.indices)] = matrix
        return whole


Kept = AttentionMap | Picture


@dataclass(frozen=True)
class Group:
    """Layers whose maps, all exact or all `Picture`s, have the same tokens: their indices in the model; whether it is
    cross attention, and causal, as far as is known; the tokens that a cache has dropped."""

    maps: list[Kept]
    layers: list[int]
    crosses: bool
    causal: bool
    gap: Span = NO_GAP

    @property
    def size(self) -> tuple[int, int, int]:
        """Batch entries, queries and keys."""
        b, _, n, m = self.maps[0].shape
        return b, n, m

    def token(self, key: int) -> int:
        """The token of a key."""
        b, n, m = self.size
        return Grid(b, 1, n, m, gap=self.gap).token(key)

    @property
    def lazy(self) -> list[AttentionMap]:
        """The exact maps; [] if there are only pictures."""
        return [amap for amap in self.maps if isinstance(amap, AttentionMap)]

    @property
    def pooled(self) -> list[Picture]:
        """The pictures of the maps; [] if the maps are exact."""
        return [picture for picture in self.maps if isinstance(picture, Picture)]


def groups_of(maps: Mapping[str, Kept]) -> list[Group]:
    """The groups, in the order in which the model called the first layer of each."""
    found: dict[tuple[object, ...], Group] = {}
    for layer, (name, amap) in enumerate(maps.items()):
        b, _, n, m = amap.shape
        causal = _causal(amap)
        gap = amap.rule.grid.gap if isinstance(amap, AttentionMap) else amap.gap
        # Fewer queries than keys under a causal mask, or of a cache that has dropped some, are a step of generation.
        over = crosses(module_name(name)) or (n != m and not causal and not gap.size)
        key = type(amap), b, n, m, over, causal, gap
        group = found.setdefault(key, Group([], [], over, causal, gap))
        group.maps.append(amap)
        group.layers.append(layer)
    return list(found.values())


def title(group: Group, groups: Sequence[Group], n: int, m: int) -> str:
    """The title of n queries and m keys of a group that are shown, among these groups."""
    if group.crosses:
        return message("title_cross", queries=counted("token", n), keys=m)
    if any(other.crosses for other in groups):
        return message("title_decoder" if group.causal else "title_encoder", tokens=counted("token", m))
    return counted("token", m) if len(groups) > 1 else ""


def _causal(amap: Kept) -> bool:
    if isinstance(amap, AttentionMap):
        return is_causal(amap.mask)
    n, m = amap.shape[2:]
    return n == m and amap.largest.shape[2] > 1 and not bool(amap.largest.triu(1).any())
