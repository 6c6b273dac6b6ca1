"""Records roles, similarity and induction scores of a decoder's heads during training in heads.jsonl. Training is not
affected: each record uses its own random generators, in eval mode and without gradients."""

import json
import math
import time
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.head_roles.repeats import VERSION, HeadScores, RepeatProbe, probe_induction
from headwise.analysis.head_roles.result import roles
from headwise.analysis.head_roles.score import VERSION as ROLES
from headwise.analysis.head_roles.tally import offset_mass
from headwise.analysis.history import Alike, HeadHistory, HeadLook
from headwise.analysis.information import output_similarities
from headwise.analysis.similarity import HeadSimilarity
from headwise.errors import ConfigError
from headwise.lm.model import Decoder
from headwise.lm.texts import BYTES, CharTokenizer, Corpus
from headwise.models import find_heads, input_embedding, record_heads

__all__ = ["VERSION", "HeadScores", "RepeatProbe", "frequent_characters", "offset_mass", "probe_repeats"]


def probe_repeats(
    decoder: Decoder,
    tokenizer: CharTokenizer,
    characters: str,
    *,
    length: int = 64,
    sequences: int = 8,
    seed: int = 0,
) -> RepeatProbe:
    """Induction and previous-token scores of every head on `sequences` random sequences of 2·length tokens, of
    `characters` that are one token each; sequence s is drawn with seed + s, none twice in a copy."""
    if sequences < 1:
        raise ConfigError(f"sequences={sequences}: expected at least 1")
    if not 2 <= length <= decoder.config.context // 2:
        raise ConfigError(
            f"length={length}: expected 2 to {decoder.config.context // 2}, as two copies must fit in the context "
            f"of {decoder.config.context}"
        )
    unknown = set(characters) - set(tokenizer.characters)
    if unknown or len(set(characters)) != len(characters):
        what = f"{sorted(unknown)[0]!r} is not in the vocabulary" if unknown else "one occurs twice"
        raise ConfigError(f"characters: {what}; frequent_characters(text, tokenizer) returns a suitable set")
    if len(characters) < length:
        raise ConfigError(
            f"characters: {len(characters)} of them cannot fill length={length} without repeating; give more "
            f"characters or a smaller length"
        )
    if decoder.training:
        raise ConfigError("decoder: is in training mode; call decoder.eval() first")
    ids, device = torch.from_numpy(tokenizer.encode(characters)), decoder.embedding.weight.device
    return probe_induction(
        lambda drawn: decoder(drawn, return_maps=True),
        ids, length=length, copies=2, sequences=sequences, seed=seed, device=device,
    )  # fmt: skip


def frequent_characters(text: str, tokenizer: CharTokenizer, count: int = 256) -> str:
    """The `count` most frequent letters and ideographs of `text` with a token of their own. Punctuation and white space
    are excluded because heads treat them differently."""
    known = set(tokenizer.characters)
    found = Counter(c for c in text if c in known and unicodedata.category(c)[0] == "L")
    return "".join(sorted(found, key=lambda c: (-found[c], c))[:count])


HEADS_FILE = "heads.jsonl"
PASSAGE = 1024  # approximate length of the held-out passage in tokens: whole windows, equally many of each file
LENGTH, SEQUENCES = 64, 8  # of the repeated random tokens


class HeadWatcher:
    """Measures a decoder's heads on `windows` [w, context + 1] for each file; `record(step)` writes to the run's
    folder. Entries later than `step` are discarded; a record of other `settings` is not continued."""

    def __init__(
        self,
        folder: Path,
        decoder: Decoder,
        corpus: Corpus,
        windows: Sequence[Tensor],
        settings: dict[str, Any],
        step: int | None,
    ) -> None:
        counts = {int(layer.get("num_heads", decoder.config.num_heads)) for layer in decoder.config.layers}
        if len(counts) > 1:
            raise ConfigError(
                f"watch_heads: layers have {sorted(counts)} heads; watching requires the same number in every layer"
            )
        self._path, self._decoder, self._tokenizer = folder / HEADS_FILE, decoder, corpus.tokenizer
        # A few windows of each file without their last token, [w, context].
        each = math.ceil(PASSAGE / (windows[0].shape[1] - 1) / len(windows))
        picked = [group[torch.linspace(0, len(group) - 1, min(each, len(group))).long()] for group in windows]
        self._ids = torch.cat(picked)[:, :-1]
        text = "".join(corpus.tokenizer.decode(stream.numpy()) for stream in corpus.heldout)
        self._drawn = frequent_characters(text, corpus.tokenizer)
        self._length = min(LENGTH, decoder.config.context // 2, len(self._drawn))
        about = {
            "settings": settings, "config": decoder.config.to_dict(), "passage": list(self._ids.shape),
            "roles": ROLES, "probe": VERSION, "drawn": len(self._drawn), "length": self._length, "sequences": SEQUENCES,
        }  # fmt: skip
        about = json.loads(json.dumps(about))  # as read from the file
        self.history = HeadHistory(about, [])
        if step is not None and self._path.exists():
            before = HeadHistory.read(self._path)
            if before.about == about:
                self.history = before.until(step)

    def record(self, step: int) -> None:
        """Measure the heads, unless this step is already recorded, and write the record atomically."""
        if step not in self.history.steps:
            self.history = HeadHistory(self.history.about, [*self.history.looks, self.look(step)])
        self.history.write(self._path)

    @torch.no_grad()
    def look(self, step: int) -> HeadLook:
        """Measure all heads of the present model."""
        begun = time.perf_counter()
        decoder, training = self._decoder, self._decoder.training
        decoder.eval()
        try:
            maps, outputs = _read(decoder, self._ids)
            probe = None
            if self._length >= 2:
                probe = probe_repeats(
                    decoder, self._tokenizer, self._drawn, length=self._length, sequences=SEQUENCES, seed=0
                )
        finally:
            decoder.train(training)
        known = self._tokenizer.characters
        pieces = [
            [known[i - BYTES] if i >= BYTES else chr(i) if i < 128 else "" for i in row] for row in self._ids.tolist()
        ]
        found = roles(maps, tokens=self._ids, pieces=pieces, embeddings=input_embedding(decoder))
        repeats = {} if probe is None else {x.name: x.mass for x in (probe.previous, probe.induction, probe.duplicate)}
        layers, heads = found.shape
        labels = [
            [_labels(probe, [x.role for x in found.labels(i, j)], (i, j)) for j in range(heads)] for i in range(layers)
        ]
        alike = {}
        if outputs and layers * heads > 1:
            similar = output_similarities(outputs, ("cosine", "cka"))
            alike = {name: _alike(x, heads) for name, x in similar.items()}
        passage = {name: score.mass for name, score in found.items()}
        return HeadLook(step, time.perf_counter() - begun, passage, repeats, labels, alike)


def _read(decoder: Decoder, ids: Tensor) -> tuple[list[Any], list[Tensor]]:
    """Maps and head outputs of each layer; no outputs for designs without separate head outputs."""
    try:
        sites = find_heads(decoder)
    except ConfigError:
        return decoder.hidden(ids, return_maps=True)[1], []
    with record_heads(sites) as outputs:
        maps = decoder.hidden(ids, return_maps=True)[1]
    return maps, outputs


def _labels(probe: RepeatProbe | None, on_passage: list[str], at: tuple[int, int]) -> list[str]:
    """The roles of a head: induction and previous token as measured on random tokens, then the roles on the passage."""
    scores = () if probe is None else (probe.induction, probe.previous)
    on_random = [x.name for x in scores if x.holds[at]]
    return [*on_random, *(role for role in on_passage if role not in on_random)]


def _alike(found: HeadSimilarity, heads: int) -> Alike:
    values = found.matrix.numpy()
    layer = np.arange(len(values)) // heads
    others = ~np.eye(len(values), dtype=bool)
    inside = others & (layer[:, None] == layer)
    best = np.where(others, values, -np.inf).argmax(1)
    nearest = tuple((found.names[j], float(values[i, j])) for i, j in enumerate(best))
    return Alike(float(values[others].mean()), float(values[inside].mean()) if inside.any() else float("nan"), nearest)
