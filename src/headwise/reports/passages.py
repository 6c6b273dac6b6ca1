"""What a report is made of: texts by any library's tokenizer, layers of any number of heads, groups of maps; maps and
their tokens as passages, and the patterns of heads in a few words.

Supported are tokenizers of transformers and headwise, of the packages tokenizers, sentencepiece and tiktoken, and any
object with encode(text) and decode(ids), such as that of a character model.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.head_roles.result import Roles
from headwise.analysis.head_roles.score import Label, is_marker
from headwise.base.run import Progress, part
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.kernels.events import crosses, module_name
from headwise.lm.loading.base import units_of
from headwise.lm.loading.characters import Pieces, decoded_tokens, pieces_of
from headwise.map import AttentionMap
from headwise.masks import Grid, Span, is_causal
from headwise.masks.grid import NO_GAP
from headwise.reports.data import Passage
from headwise.reports.messages import message
from headwise.telemetry.lens import SIZE, Picture
from headwise.wording import counted, joined

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

    def title(self, groups: Sequence["Group"], n: int, m: int) -> str:
        """The title of n queries and m keys that are shown, among these groups."""
        if self.crosses:
            return message("title_cross", queries=counted("token", n), keys=m)
        if any(other.crosses for other in groups):
            return message("title_decoder" if self.causal else "title_encoder", tokens=counted("token", m))
        return counted("token", m) if len(groups) > 1 else ""

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
        if isinstance(amap, AttentionMap):
            causal = is_causal(amap.mask)
        else:
            causal = n == m and amap.largest.shape[2] > 1 and not bool(amap.largest.triu(1).any())
        gap = amap.rule.grid.gap if isinstance(amap, AttentionMap) else amap.gap
        # Fewer queries than keys under a causal mask, or of a cache that has dropped some, are a step of generation.
        over = crosses(module_name(name)) or (n != m and not causal and not gap.size)
        key = type(amap), b, n, m, over, causal, gap
        group = found.setdefault(key, Group([], [], over, causal, gap))
        group.maps.append(amap)
        group.layers.append(layer)
    return list(found.values())


REDUCES = "mean", "max"
CLOSERS = "”’」』\"'"  # belong to the sentence that they end


@dataclass(frozen=True)
class Side:
    """The tokens along one side of a map: their texts, the ranges that are shown as one, those outside of the text."""

    words: list[str]
    units: list[tuple[int, int]]
    special: list[bool]

    @classmethod
    def numbered(cls, tokens: Sequence[int]) -> "Side":
        """Positions or ids of unknown text, shown as numbers."""
        names = [str(i) for i in tokens]
        return cls(names, units_of(names), [True] * len(names))

    def cut(self, exact: bool) -> tuple[list[str], list[int]]:
        """The text of each cell (units if cells are exact, tokens otherwise) and the indices of special ones."""
        ranges = self.units if exact else [(i, i + 1) for i in range(len(self.words))]
        shown = ["".join(self.words[a:b]) for a, b in ranges]
        return shown, [i for i, (a, b) in enumerate(ranges) if all(self.special[a:b])]


def passage(
    title: str, maps: Sequence[Kept], entry: int, sides: tuple[Side, Side | None], places: Places, cells: int,
    progress: Progress | None, layers: Sequence[int] = (), first: tuple[int, int] = (0, 0),
) -> Passage:  # fmt: skip
    """The maps of one batch entry: exact weights up to `cells` tokens, otherwise mean and maximum in `cells` cells; of
    pictures their cells. layers: their indices in the report, () for all. first: the query and the key at which the
    sides begin, for exact maps."""
    queries, keys = sides
    n, m = len(queries.words), len((keys or queries).words)
    exact = [amap for amap in maps if isinstance(amap, AttentionMap)]
    cell, peaks = 1, None
    if not exact:
        cell = -(-max(maps[0].shape[2:]) // SIZE)
        pictures = [picture for picture in maps if isinstance(picture, Picture)]
        means = places.stacked([picture.mean[entry].cpu().numpy() for picture in pictures], 0.0)
        peaks = places.stacked([picture.largest[entry].cpu().numpy() for picture in pictures], 0.0)
    elif max(n, m) <= cells:
        rows, columns = (slice(at, at + size) for at, size in zip(first, (n, m), strict=True))
        means = places.stacked([amap[entry, :, rows, columns].cpu().numpy() for amap in exact], 0.0)
    else:
        cell = -(-max(maps[0].shape[2:]) // cells)
        high, wide = -(-n // cell), -(-m // cell)
        means, peaks = (_pooled(exact, entry, places, cells, reduce, progress)[..., :high, :wide] for reduce in REDUCES)
    return composed_passage(title, means, cell, peaks, sides, layers)


def composed_passage(
    title: str, means: np.ndarray, cell: int, peaks: np.ndarray | None, sides: tuple[Side, Side | None],
    layers: Sequence[int] = (),
) -> Passage:  # fmt: skip
    """A passage from weights of all layers and heads whose cells are squares of `cell` × `cell` tokens."""
    queries, keys = sides
    if cell == 1:
        means, peaks = _by_units(means, queries, keys or queries), None
    words, special = queries.cut(cell == 1)
    other, special_keys = (None, []) if keys is None else keys.cut(cell == 1)
    return Passage(
        title, words, means, cell, peaks, [] if keys else sentences(words, special), keys=other, layers=list(layers),
        special=special, special_keys=special_keys,
    )  # fmt: skip


def _pooled(
    maps: Sequence[AttentionMap], entry: int, places: Places, cells: int, reduce: str, progress: Progress | None
) -> np.ndarray:
    """[layers, heads, P, Q], with P and Q at most `cells`."""
    pictures = []
    for i, amap in enumerate(maps):
        one = [amap] if amap.shape[0] == 1 else [amap.head(entry, head) for head in range(amap.shape[1])]
        within = part(progress, f"pooling ({reduce})", i, len(maps))
        pooled = [head.pool(cells, reduce, progress=within)[0].cpu().numpy() for head in one]
        pictures.append(np.concatenate(pooled))
    return places.stacked(pictures, 0.0)


def sentences(tokens: list[str], special: Collection[int] = ()) -> list[tuple[int, int]]:
    """Token ranges of the sentences, which end at 。！？!?…, a full stop before white space, or a line end."""
    ends, start = [], 0
    for i, token in enumerate(tokens):
        after = tokens[i + 1] if i + 1 < len(tokens) else "\n"
        last = token.strip(" ")[-1:]
        closes = last in "。！？!?…\n" or (last == "." and after[:1].isspace())
        if last and closes and not (after and after[0] in "。！？!?…" + CLOSERS + "\n"):
            if any(not t.isspace() for t in tokens[start : i + 1]):
                ends.append((start, i + 1))
            start = i + 1
    if any(not tokens[i].isspace() and i not in special for i in range(start, len(tokens))):
        ends.append((start, len(tokens)))
    elif ends and start < len(tokens) and special:  # those at the end belong to the last one
        ends[-1] = ends[-1][0], len(tokens)
    return ends if len(ends) > 1 else []


def _by_units(weights: np.ndarray, queries: Side, keys: Side) -> np.ndarray:
    """[layers, heads, units, units]: the mean over the queries and the sum over the keys of a unit; rows sum to one."""
    if len(keys.units) < weights.shape[3]:
        weights = np.add.reduceat(weights, [start for start, _ in keys.units], axis=3)
    if len(queries.units) < weights.shape[2]:
        sizes = np.array([end - start for start, end in queries.units], np.float32)
        weights = np.add.reduceat(weights, [start for start, _ in queries.units], axis=2) / sizes[:, None]
    return weights


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of a batch: ids [b or 1, m], None if only their text is known; of each entry the text of the tokens,
    with the blanks between words, None without text, and which tokens are not part of it."""

    ids: Tensor | None
    pieces: list[list[str]] | None
    special: list[list[bool]]

    @property
    def length(self) -> int:
        """The number of tokens of an entry."""
        return len(self.special[0])

    @property
    def entries(self) -> int:
        """The number of entries; one may apply to the whole batch."""
        return len(self.special)

    def side(self, entry: int, tokens: Sequence[int]) -> Side:
        """Tokens of an entry as a side of a map."""
        at = entry if self.entries > 1 else 0
        special = [self.special[at][i] for i in tokens]
        if self.pieces is None:
            assert self.ids is not None
            return Side.numbered(self.ids[at, list(tokens)].tolist())
        words = [self.pieces[at][i] for i in tokens]
        return Side(words, units_of(words), special)


def text_of(name: str, tokens: Any, pieces: Any, tokenizer: Any, written: str = "text") -> Text | None:
    """The tokens given by the arguments `tokens` and `pieces`; None if both are None. name: the prefix of the arguments
    in messages. written: how pieces are written, as in `decoded_tokens`."""
    if tokens is None and pieces is None:
        return None
    ids = None if tokens is None else _ids(f"{name}tokens", tokens)
    if pieces is not None:
        raw = _texts(f"{name}pieces", pieces)
        if ids is not None and (len(raw) != len(ids) or len(raw[0]) != ids.shape[1]):
            raise ShapeError(
                f"{name}pieces: {len(raw)} × {len(raw[0])} of them for {name}tokens of {tuple(ids.shape)}; expected "
                f"one for each token"
            )
        shown = [decoded_tokens(row, written) for row in raw]
        return Text(ids, shown, [[is_marker(piece) for piece in row] for row in raw])
    assert ids is not None
    if tokenizer is None:
        return Text(ids, None, [[False] * ids.shape[1]] * len(ids))
    rows = [decoded(tokenizer, row) for row in ids.tolist()]
    return Text(ids, [row.texts for row in rows], [row.special for row in rows])


def _ids(name: str, tokens: Any) -> Tensor:
    ids = torch.as_tensor(tokens)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DTypeError(f"{name}: expected integers [m] or [b, m], got {ids.dtype}")
    ids = torch.atleast_2d(ids).cpu().long()
    if ids.ndim != 2 or 0 in ids.shape:
        raise ShapeError(f"{name}: shape {tuple(ids.shape)}, expected [m] or [b, m]")
    return ids


def _texts(name: str, pieces: Any) -> list[list[str]]:
    flat = not isinstance(pieces, str) and all(isinstance(piece, str) for piece in pieces)
    rows = [list(pieces)] if flat else [list(row) for row in pieces if not isinstance(row, str)]
    if isinstance(pieces, str) or not rows or not all(isinstance(piece, str) for row in rows for piece in row):
        raise DTypeError(f"{name}: expected the text of each token, a list of strings or one list per batch entry")
    if not rows[0] or len({len(row) for row in rows}) > 1:
        raise ShapeError(
            f"{name}: lists of {[len(row) for row in rows][:6]}; all entries of a batch must have the same "
            f"number of tokens"
        )
    return rows


def labels_of(found: Sequence[Roles], places: Places) -> list[list[list[Label]]]:
    """What each head is named by, `Roles.pattern`, from the roles of each layer; [] where a layer has no such head."""
    return [
        [layer.pattern(0, head) if head < count else [] for head in range(places.most)]
        for layer, count in zip(found, places.counts, strict=True)
    ]


def in_words(labels: Sequence[Label]) -> str:
    """The clearest two of a head's labels, with their scores."""
    return joined(label.words for label in labels[:2])
