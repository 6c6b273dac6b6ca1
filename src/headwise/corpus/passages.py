"""The passages in which each head is strongest, collected window by window, beside a sample; and their file.

>>> import pathlib, tempfile
>>> from headwise.corpus import measure_corpus
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = pathlib.Path(folder, "text.txt").write_text("武松打虎。" * 40, encoding="utf-8")
...     found = measure_corpus(None, folder, f"{folder}/stats.csv", measures=["entropy"], window=64, device="cpu")
>>> of_head = found.passages[2, 5]                                      # of layer 2, head 5
>>> best = of_head.strongest[0]
>>> best.token in best.tokens, best.keys[0].weight == max(key.weight for key in best.keys)
(True, True)

The strongest passages say what makes a head attend; the sample says what it usually does. Both have sizes that do not
depend on the corpus, and both merge: those of two parts of a corpus, joined, are those of the whole.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headwise.base.files import write_text
from headwise.base.read import Entry, each, number, parsed, reading, text_of, whole, word
from headwise.corpus.select import Head, TextWindow
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.loading import LoadedModel
from headwise.wording import tr

FORMAT = "headwise-passages-2"
ROUNDING = 1e-9  # of means of equal strengths


class Key(NamedTuple):
    """A key of a query: its position in the window, the text of its token, and its weight."""

    position: int
    token: str
    weight: float


@dataclass(frozen=True)
class CorpusPassage:
    """A query, the keys with its largest weights, and the tokens around them.

    Attributes:
        strength: of the head in this window: that of its strongest query, which this is.
        file, where: the file, and the place of the text in it. first: the window's first token in the text.
        query: the position of the query in the window.
        positions: of the tokens that are shown, in the window, ascending; where they jump, tokens are left out.
        tokens: their texts. weights: their exact weights, None for those that are not among the largest of the query.
    """

    strength: float
    file: str
    where: str
    first: int
    query: int
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    weights: tuple[float | None, ...]

    @property
    def token(self) -> str:
        """The text of the query."""
        return self.tokens[self.positions.index(self.query)]

    @property
    def keys(self) -> list[Key]:
        """The keys with known weights, largest first."""
        known = zip(self.positions, self.tokens, self.weights, strict=True)
        keys = [Key(at, token, weight) for at, token, weight in known if weight is not None]
        return sorted(keys, key=lambda key: -key.weight)

    @classmethod
    def of(cls, found: Entry) -> "CorpusPassage":
        """Read one from a file. CheckpointError if it is not one."""

        def weight(value: Any, at: str) -> float | None:
            return None if value is None else number(value, at)

        made = cls(
            found.number("strength"), found.word("file"), found.word("where"), found.whole("first", 0),
            found.whole("query", 0), tuple(found.each("positions", whole)), tuple(found.each("tokens", word)),
            tuple(found.each("weights", weight)),
        )  # fmt: skip
        if not len(made.positions) == len(made.tokens) == len(made.weights) or made.query not in made.positions:
            raise CheckpointError("positions, tokens and weights: expected as many of each, and the query among them")
        return made


@dataclass(frozen=True)
class HeadPassages:
    """Passages of a head, the strongest first.

    Attributes:
        strongest: those in which it is strongest. sampled: those of the sample, the same windows for all heads, without
            windows in which it has no strength.
    """

    strongest: tuple[CorpusPassage, ...]
    sampled: tuple[CorpusPassage, ...]

    @property
    def contrast(self) -> float:
        """The mean strength of the strongest minus that of the sample, 0 without passages: large for a head that
        attends strongly in few passages."""
        means = [sum(one.strength for one in part) / len(part) for part in (self.strongest, self.sampled) if part]
        return means[0] - means[1] if len(means) == 2 else 0.0


@dataclass(frozen=True, eq=False)
class Passages(Mapping[tuple[int, int], HeadPassages]):
    """Passages of heads by (layer, head).

    Attributes:
        by: what makes a passage strong, as in `headwise measure --strongest-by`. unit: of the strengths.
        model: name and SHA-256 of the weights. names: of the layers with passages, by number.
        found: (layer, head) → its passages. sample: the random number of each window of the sample, by which samples
            of parts of a corpus are merged.
    """

    by: str
    unit: str
    model: Mapping[str, str]
    names: Mapping[int, str]
    found: Mapping[tuple[int, int], HeadPassages]
    sample: tuple[int, ...] = ()

    @classmethod
    def nothing(cls, by: str) -> "Passages":
        """Passages of no head."""
        return cls(by, "", {}, {}, {})

    def __getitem__(self, place: tuple[int, int]) -> HeadPassages:
        if place not in self.found:
            heads = ", ".join(f"({layer}, {head})" for layer, head in list(self.found)[:8])
            raise ConfigError(f"passages[{place!r}]: expected (layer, head), one of {heads or 'no heads'} …")
        return self.found[place]

    def __contains__(self, place: object) -> bool:
        return place in self.found

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __repr__(self) -> str:
        count = sum(len(one.strongest) for one in self.found.values())
        return f"Passages({len(self)} heads, {count} strongest passages by {self.by})"

    def distinctive(self, count: int) -> list[tuple[int, int]]:
        """The heads with the largest `contrast`, at most `count`; without those whose strongest passages are no
        stronger than the sample, as where both are of the same windows."""
        strong = [place for place, found in self.found.items() if found.contrast > ROUNDING]
        return sorted(strong, key=lambda place: -self.found[place].contrast)[:count]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, as in the file."""
        heads = [
            {
                "layer": layer, "module": self.names[layer], "head": head,
                "strongest": [vars(one) for one in found.strongest],
                "sampled": [vars(one) for one in found.sampled],
            }
            for (layer, head), found in self.found.items()
        ]  # fmt: skip
        return {
            "format": FORMAT, "model": dict(self.model), "by": self.by, "unit": self.unit, "sample": self.sample,
            "heads": heads,
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all. CheckpointError if it cannot be written."""
        write_text(Path(path), json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Passages":
        """Read the file of a sweep. path: the file, or the table that `headwise measure` wrote beside it.

        Raises:
            CheckpointError: if it does not exist or is damaged.
        """
        file = Path(path)
        file = file if file.suffix.lower() == ".json" else passages_path(file)
        again = tr("headwise measure writes it, unless with --passages 0")
        with reading(file, tr("passages"), missing=again, way_out=again):
            whole_file = Entry(parsed(text_of(file)))
            if whole_file.word("format") != FORMAT:
                raise CheckpointError(f"it is not of the format {FORMAT}")
            model, found, names = whole_file.named("model", word), {}, {}
            for head in whole_file.entries("heads"):
                place = head.whole("layer", 0), head.whole("head", 0)
                names[place[0]] = head.word("module")
                parts = (tuple(map(CorpusPassage.of, head.entries(part))) for part in ("strongest", "sampled"))
                found[place] = HeadPassages(*parts)
            if "sha256" not in model:
                raise CheckpointError("model.sha256 is missing")
            sample = tuple(whole_file.each("sample", whole))
            return cls(whole_file.word("by"), whole_file.word("unit"), model, names, found, sample)


def passages_path(table: Path) -> Path:
    """The file of the passages beside a table."""
    return table.with_name(f"{table.name}.passages.json")


def weights_print(loaded: LoadedModel) -> str:
    """SHA-256 of all weights, with their names, dtypes and sizes."""
    digest = hashlib.sha256()
    for name, x in sorted(loaded.model.state_dict().items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        flat = x.detach().cpu().contiguous().flatten()
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def check_model(passages: Passages, loaded: LoadedModel) -> None:
    """Raise ConfigError unless passages were measured with the weights of this model."""
    if passages.model["sha256"] != weights_print(loaded):
        raise ConfigError(
            "sweep: its passages are of {of!r}, whose weights differ from those of {name!r}; give the sweep of this "
            "model, or --model the model of the sweep",
            of=passages.model.get("name", tr("another model")),
            name=loaded.name,
        )


@dataclass
class Collected:
    """The passages of a part of a corpus: at most `most` of each head, the strongest first; and of a sample of windows,
    a random number, by which they are sorted, with the passage of each head or None."""

    most: int
    strongest: list[list[CorpusPassage]]
    sampled: list[tuple[int, list[CorpusPassage | None]]]

    @classmethod
    def nothing(cls, most: int, heads: int) -> "Collected":
        """No passages."""
        return cls(most, [[] for _ in range(heads)], [])

    def add(self, other: "Collected") -> None:
        """Add the passages of the next part."""
        for mine, others in zip(self.strongest, other.strongest, strict=True):
            mine[:] = sorted([*mine, *others], key=lambda one: -one.strength)[: self.most]
        self.sampled = sorted([*self.sampled, *other.sampled], key=lambda one: one[0])[: self.most]

    def of_heads(self, heads: Sequence[Head], by: str, unit: str, model: Mapping[str, str]) -> Passages:
        """The passages by head."""
        found = {}
        for i, (head, strongest) in enumerate(zip(heads, self.strongest, strict=True)):
            there = [passages[i] for _, passages in self.sampled]
            sampled = sorted((one for one in there if one is not None), key=lambda one: -one.strength)
            found[head.layer, head.head] = HeadPassages(tuple(strongest), tuple(sampled))
        sample = tuple(at for at, _ in self.sampled)
        return Passages(by, unit, model, {head.layer: head.name for head in heads}, found, sample)

    @classmethod
    def again(cls, passages: Passages, heads: Sequence[Head], about: Mapping[str, Any]) -> "Collected":
        """The inverse of `of_heads`. about: the description of the table."""
        numbers = {path: number for number, path in enumerate(about["given"])}
        windows: dict[int, list[CorpusPassage | None]] = {at: [None] * len(heads) for at in passages.sample}
        for i, head in enumerate(heads):
            for one in passages[head.layer, head.head].sampled:
                windows[_drawn(numbers[one.file], one.where, one.first)][i] = one
        strongest = [list(passages[head.layer, head.head].strongest) for head in heads]
        return cls(about["options"]["passages"], strongest, sorted(windows.items()))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "strongest": [[vars(one) for one in head] for head in self.strongest],
            "sampled": [[at, [None if one is None else vars(one) for one in heads]] for at, heads in self.sampled],
        }

    @classmethod
    def of(cls, found: Entry, most: int, heads: int) -> "Collected":
        """Read a result of `to_dict`; for use in a `reading` block."""

        def passage(value: Any, at: str) -> CorpusPassage:
            return CorpusPassage.of(Entry(value, at))

        def sample(value: Any, at: str) -> tuple[int, list[CorpusPassage | None]]:
            first, rest = value
            return first, each(rest, at, lambda one, there: None if one is None else passage(one, there))

        strongest = found.each("strongest", lambda value, at: each(value, at, passage))
        sampled = found.each("sampled", sample)
        if len(strongest) != heads or any(len(one) != heads for _, one in sampled):
            raise CheckpointError(f"passages: expected {heads} heads")
        return cls(most, strongest, sampled)


BEFORE, AFTER = 24, 8  # tokens that are shown around a query
AROUND = 2  # and on each side of a key outside of these
Keys = tuple[np.ndarray, np.ndarray]  # positions and weights
Places = Sequence[Sequence[tuple[int, str, int, int]]]  # of each head


class OfWindow(NamedTuple):
    """The strongest query of each head in a window: strength [h] and query [h]. read: the keys with the largest weights
    of this query of a head, and these weights, which are 0 for lack of keys."""

    strength: np.ndarray
    query: np.ndarray
    read: Callable[[int], Keys]


@dataclass(frozen=True)
class OfBatch:
    """The same in each window of a batch: strength and query [b, h]. layers: of each head, a function that returns the
    keys of all heads of its layer [b, heads, keys], and its number there. Few windows have a passage: it is called for
    these."""

    strength: np.ndarray
    query: np.ndarray
    layers: Sequence[tuple[Callable[[], Keys], int]]

    def window(self, i: int) -> OfWindow:
        """That of a window."""

        def read(head: int) -> Keys:
            of_layer, there = self.layers[head]
            keys, weights = of_layer()
            return keys[i, there], weights[i, there]

        return OfWindow(self.strength[i], self.query[i], read)


class Floors:
    """What the passages of other units of this process, at first `nothing`, leave no room for: units measured later can
    drop it, and the result is the same."""

    def __init__(self, nothing: Collected) -> None:
        self._found = nothing
        self.most, self.heads = nothing.most, len(nothing.strongest)

    def raise_by(self, found: Collected) -> None:
        """Raise the floors by the passages of a finished unit."""
        self._found.add(found)

    def least(self) -> np.ndarray:
        """The strength below which a head needs no passage, [h] float32."""
        least = [part[-1].strength if len(part) == self.most > 0 else -np.inf for part in self._found.strongest]
        return np.array(least, np.float32)  # as strengths are: equal ones stay equal

    def largest(self) -> int:
        """The random number above which a window is not in the sample."""
        sample = self._found.sampled
        return sample[-1][0] if len(sample) == self.most > 0 else 1 << 64


class _Kept(NamedTuple):
    number: int  # of the window in its unit
    passage: CorpusPassage


class Collector:
    """Keeps the strongest passages of each head in a unit, and a sample of its windows. lines: whether each text of a
    file is a document of its own; of a text file, the tokens of a window are one. path: of a file. piece: of a special
    token."""

    def __init__(
        self, floors: Floors, *, lines: Callable[[int], bool], path: Callable[[int], str],
        piece: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._most, self._lines, self._path, self._piece = floors.most, lines, path, piece
        self._best: list[dict[tuple[int, str, int], _Kept]] = [{} for _ in range(floors.heads)]
        self._least, self._largest = floors.least(), floors.largest()
        self._sample: list[tuple[int, list[CorpusPassage | None]]] = []

    def add(self, window: TextWindow, found: OfWindow) -> None:
        """Add a window; they come in any order."""
        for head in np.flatnonzero((found.strength >= self._least) & (found.strength > -np.inf)).tolist():
            self._offer(head, window, found)
        at = _drawn(window.source, window.where, window.first)
        if at < self._largest:
            known = enumerate((found.strength > -np.inf).tolist())
            heads = [self._passage(window, found, head) if there else None for head, there in known]
            self._sample = sorted([*self._sample, (at, heads)], key=lambda one: one[0])[: self._most]
            self._raise_largest()

    def _offer(self, head: int, window: TextWindow, found: OfWindow) -> None:
        best = self._best[head]
        # A text has one passage; of a text file, as many tokens as a window has.
        document, query = (window.source, window.where, 0), int(found.query[head])
        if not self._lines(window.source):
            own = np.flatnonzero(~window.special.numpy())
            document = *document[:2], (window.first + query - int(own[0])) // window.room
        before = best.get(document)
        worst = None if len(best) < self._most else max(best, key=lambda one: _order(best[one]))
        beaten = before if before is not None else None if worst is None else best[worst]
        if beaten is not None and _order(beaten) <= (-_short(found.strength[head]), window.number):
            return
        if before is None and worst is not None:
            del best[worst]
        best[document] = _Kept(window.number, self._passage(window, found, head))
        self._raise_least(head)

    def _raise_least(self, head: int) -> None:
        if len(best := self._best[head]) == self._most:
            self._least[head] = max(self._least[head], min(one.passage.strength for one in best.values()))

    def _raise_largest(self) -> None:
        if len(self._sample) == self._most:
            self._largest = min(self._largest, self._sample[-1][0])

    def collected(self) -> Collected:
        """The passages."""
        strongest = [[kept.passage for kept in sorted(best.values(), key=_order)] for best in self._best]
        return Collected(self._most, strongest, self._sample)

    def places(self) -> Places:
        """The document and the window's number of each of the strongest passages, in their order."""
        ordered = (sorted(best.items(), key=lambda one: _order(one[1])) for best in self._best)
        return [[(*document, kept.number) for document, kept in each] for each in ordered]

    def restore(self, found: Collected, places: Places) -> None:
        """Go on from these, as `collected` and `places` have returned them."""
        for head, (passages, here) in enumerate(zip(found.strongest, places, strict=True)):
            self._best[head] = {at[:3]: _Kept(at[3], one) for one, at in zip(passages, here, strict=True)}
            self._raise_least(head)
        self._sample = list(found.sampled)
        self._raise_largest()

    def _passage(self, window: TextWindow, found: OfWindow, head: int) -> CorpusPassage:
        query, n = int(found.query[head]), len(window.ids)
        keys, largest = found.read(head)
        weights = {key: _short(weight) for key, weight in zip(keys.tolist(), largest, strict=True) if weight > 0}
        near = set(range(max(0, query - BEFORE), min(n, query + AFTER + 1)))
        for key in weights.keys() - near:
            near |= set(range(max(0, key - AROUND), min(n, key + AROUND + 1)))
        shown = sorted(near)
        special = window.special.numpy()
        tokens = (self._piece(int(window.ids[at])) if special[at] else window.words[at] for at in shown)
        return CorpusPassage(
            _short(found.strength[head]), self._path(window.source), window.where, window.first, query, tuple(shown),
            tuple(tokens), tuple(map(weights.get, shown)),
        )  # fmt: skip


def _drawn(source: int, where: str, first: int) -> int:
    """The random number of a window, by its place alone: those with the least numbers are a sample without order."""
    place = f"{source} {where} {first}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "big")


def _order(kept: _Kept) -> tuple[float, int]:
    return -kept.passage.strength, kept.number


def _short(x: np.floating | float) -> float:
    """A float32 as the shortest number that is read back as it."""
    return float(str(np.float32(x)))
