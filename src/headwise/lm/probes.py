"""What each head does on text it cannot know: random characters, said twice.

    tokens    a b c d e │ a b c d e
                  ▲         │              induction: from the second b (position T + i) to the c (i + 1) that
                  └─────────┘              followed the first b (Olsson et al. 2022, 2209.11895)

There is nothing to learn from the characters themselves, so what is foretold in the second half was copied.
"""

import unicodedata
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.lm.model import Decoder
from headwise.lm.tokenizer import CharTokenizer
from headwise.map import AttentionMap

VERSION = "repeat-1"  # of the definitions below; scores of different versions do not compare
_BLOCK = 64  # queries of a tile that is gathered at once


@dataclass(frozen=True)
class HeadScores:
    """Attention mass on one key per eligible query.

    Attributes:
        mass: [layers, heads], mean over eligible queries and sequences; 0 to 1.
        spread: [layers, heads], standard deviation over the sequences (0 for one sequence).
        coverage: share of all queries that are eligible, that is, have the key in question.
        uniform: what a head would score that looks at all it may see alike.
    """

    name: str
    mass: np.ndarray
    spread: np.ndarray
    coverage: float
    uniform: float

    @property
    def lift(self) -> np.ndarray:
        """mass / uniform, [layers, heads]: 1 is no preference."""
        return self.mass / self.uniform


@dataclass(frozen=True)
class RepeatProbe:
    """Scores of every head on repeated random characters, and how well the model copied.

    Attributes:
        induction: from position T + i to position i + 1; previous: from i to i − 1.
        first_loss, second_loss: nats a token within the first and within the second copy, [sequences]. The first
            token of each copy is left out: nothing foretells it.
        length: T, tokens of one copy. version: of the definitions.
    """

    induction: HeadScores
    previous: HeadScores
    first_loss: np.ndarray
    second_loss: np.ndarray
    length: int
    version: str = VERSION


def probe_repeats(
    decoder: Decoder,
    tokenizer: CharTokenizer,
    characters: str,
    *,
    length: int = 64,
    sequences: int = 8,
    seed: int = 0,
) -> RepeatProbe:
    """Induction and previous-token scores of every head on `sequences` random sequences of 2·length tokens.

    Args:
        characters: what is drawn from, such as `frequent_characters(text)`; all in the vocabulary, so that each is
            one token. A copy holds no character twice: "the earlier equal token" is then one position.
        length: T, at least 2, at most half the context and the number of characters.
        seed: sequence s is drawn with seed + s.
    Raises:
        ConfigError: naming the argument.
    """
    copies = _draw(decoder, tokenizer, characters, length, sequences, seed)  # [s, T]
    ids = torch.cat((copies, copies), 1).to(decoder.embedding.weight.device)
    with torch.no_grad():
        logits, maps = decoder(ids, return_maps=True)
        losses = nn.functional.cross_entropy(logits[:, :-1].float().mT, ids[:, 1:], reduction="none")
    n = 2 * length
    return RepeatProbe(
        induction=_scores("induction", maps, range(length, n), 1 - length),
        previous=_scores("previous", maps, range(1, n), -1),
        first_loss=losses[:, : length - 1].mean(1).cpu().numpy(),
        second_loss=losses[:, length:].mean(1).cpu().numpy(),
        length=length,
    )


def frequent_characters(text: str, tokenizer: CharTokenizer, count: int = 256) -> str:
    """The `count` most frequent letters and ideographs of `text` that have a token of their own; fewer if the text
    has fewer. Punctuation and white space are left out: heads treat them in ways of their own."""
    known = set(tokenizer.characters)
    found = Counter(c for c in text if c in known and unicodedata.category(c)[0] == "L")
    return "".join(sorted(found, key=lambda c: (-found[c], c))[:count])


def offset_mass(amap: AttentionMap, queries: range, offset: int) -> Tensor:
    """Exact weights p[i, i + offset] for consecutive queries i, [b, h, len(queries)]: O(queries) memory, read from
    small tiles of the map."""
    parts = []
    for start in range(queries.start, queries.stop, _BLOCK):
        stop = min(start + _BLOCK, queries.stop)
        tile = amap[:, :, start:stop, start + offset : stop + offset]
        parts.append(tile.diagonal(dim1=-2, dim2=-1))
    return torch.cat(parts, -1)


def _scores(name: str, maps: list[AttentionMap], queries: range, offset: int) -> HeadScores:
    each = torch.stack([offset_mass(amap, queries, offset).mean(-1) for amap in maps], 1)  # [s, layers, heads]
    spread = each.std(0, unbiased=False)
    uniform = float(np.mean([1.0 / (i + 1) for i in queries]))  # query i sees i + 1 keys
    coverage = len(queries) / maps[0].shape[2]
    return HeadScores(name, each.mean(0).cpu().numpy(), spread.cpu().numpy(), coverage, uniform)


def _draw(
    decoder: Decoder, tokenizer: CharTokenizer, characters: str, length: int, sequences: int, seed: int
) -> Tensor:
    if sequences < 1:
        raise ConfigError(f"sequences={sequences}: expected at least 1")
    if not 2 <= length <= decoder.config.context // 2:
        raise ConfigError(
            f"length={length}: expected 2 to {decoder.config.context // 2}, as two copies must fit in the context "
            f"of {decoder.config.context}"
        )
    unknown = set(characters) - set(tokenizer.characters)
    if unknown or len(set(characters)) != len(characters):
        what = f"{sorted(unknown)[0]!r} is not in the vocabulary" if unknown else "one stands there twice"
        raise ConfigError(f"characters: {what}; frequent_characters(text, tokenizer) gives a fitting set")
    if len(characters) < length:
        raise ConfigError(
            f"characters: {len(characters)} of them cannot fill length={length} without repeating; give more "
            f"characters or a smaller length"
        )
    if decoder.training:
        raise ConfigError("decoder: is in training mode, where dropout is on; call decoder.eval() first")
    ids = torch.from_numpy(tokenizer.encode(characters))
    orders = [
        torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed + s))[:length] for s in range(sequences)
    ]
    return ids[torch.stack(orders)]
