"""The passages of a corpus in which each head is strongest, beside a sample of all of them, and their file.

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

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headwise.contents import Entry, each, number, parsed, reading, text_of, whole, word
from headwise.corpus.selection import Head
from headwise.errors import CheckpointError, ConfigError
from headwise.files import write_text
from headwise.wording import Bilingual

FORMAT = "headwise-passages-1"
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
        found: (layer, head) → its passages.
    """

    by: str
    unit: str
    model: Mapping[str, str]
    names: Mapping[int, str]
    found: Mapping[tuple[int, int], HeadPassages]

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
        return {"format": FORMAT, "model": dict(self.model), "by": self.by, "unit": self.unit, "heads": heads}

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
        again = Bilingual(
            "headwise measure writes it, unless with --passages 0",
            "它由 headwise measure 写出（除非加了 --passages 0）",
        )
        with reading(file, Bilingual("passages", "段落文件"), missing=again, way_out=again):
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
            return cls(whole_file.word("by"), whole_file.word("unit"), model, names, found)


def passages_path(table: Path) -> Path:
    """The file of the passages beside a table."""
    return table.with_name(f"{table.name}.passages.json")


@dataclass
class Collected:
    """The passages of a part of a corpus, in the order of the heads.

    Attributes:
        most: how many of each are kept at most.
        strongest: of each head, the strongest first; of equally strong ones the first in the corpus.
        sampled: (random number, passage of each head or None) of windows, by that number.
    """

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
        return Passages(by, unit, model, {head.layer: head.name for head in heads}, found)

    def to_json(self) -> str:
        """For a file of the journal."""
        plain = {
            "strongest": [[vars(one) for one in head] for head in self.strongest],
            "sampled": [[at, [None if one is None else vars(one) for one in heads]] for at, heads in self.sampled],
        }
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, most: int, heads: int) -> "Collected":
        """Read a result of `to_json`; for use in a `reading` block."""
        found = Entry(parsed(text), "passages")

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
