"""A text run through a decoder, and all that its heads did with it put into a report."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.anatomy import find_heads, record_heads
from headwise.errors import ConfigError, TextError
from headwise.lm.loss import next_token_loss
from headwise.lm.model import Decoder
from headwise.lm.tokenizer import CharTokenizer
from headwise.map import AttentionMap
from headwise.measures import MEASURES, ClassMass, Measure, Measurements
from headwise.science.roles import roles
from headwise.see.heads import comparisons, importance
from headwise.see.places import Places
from headwise.see.words import patterns, roles_in_words
from headwise.tiles import Progress
from headwise.views.data import Passage, Report, Statistic

SHOWN = (
    "entropy", "normalized_entropy", "effective_keys", "top1_mass", "max_logit", "mean_distance", "local_mass",
    "sink_mass", "previous_mass", "self_mass", "received_mass",
)  # fmt: skip
# What a map shows, of designs where it is not all that acts on the values.
_UNCHOSEN = "A row without weights is a token that did not choose the head; the gate's weight on a head is not shown."
MEANING = {
    "talking_heads": "Weights are those of the softmax; the heads are mixed once more before they reach the values.",
    "head_mixing": "Weights are those over the text; afterwards the heads of each token attend to one another.",
    "gated_output": "Weights are those before the gate, which may silence a head for a token.",
    "sparse_mixture": _UNCHOSEN,
    "mixture_of_heads": _UNCHOSEN,
}
CELLS = 384  # a map at most so many cells wide is shown exactly

Step = Callable[[str, int, int], None]  # what is being done, how much is done, of how much


@torch.no_grad()
def see(
    text: str,
    decoder: Decoder,
    tokenizer: CharTokenizer,
    *,
    title: str = "",
    cells: int = CELLS,
    step: Step | None = None,
) -> Report:
    """Run the decoder over the text and report every head: statistics, strongest pattern, maps.

    Texts of at most `cells` tokens get exact maps; longer ones are pooled to that many cells, mean and largest
    weight, and no n×n tensor is made. Raises TextError if the text is empty.
    """
    if not text:
        raise TextError("the text is empty; give at least one character")
    tell = step or _tell_nobody
    ids = torch.from_numpy(tokenizer.encode(text))
    n = len(ids)
    tell("reading", 0, 1)
    hidden, maps, outputs = _read(decoder.eval(), ids)
    tell("reading", 1, 1)
    loss = float(next_token_loss(hidden[0, :-1], decoder.embedding.weight, ids[1:])) if n > 1 else None
    spans = tokenizer.spans(text)
    pieces = _pieces(text, spans)
    wanted: list[str | Measure] = [*SHOWN, ClassMass.of_tokens(pieces)]
    places = Places(tuple(amap.shape[1] for amap in maps))
    results = [amap.measure(*wanted, progress=_layer(tell, "measuring", i, len(maps))) for i, amap in enumerate(maps)]
    if n <= cells:
        tokens = list(text)
        passage = Passage(title, tokens, _exact(maps, spans, places), sentences=sentences(tokens))
    else:
        means, peaks = (_pooled(maps, places, cells, reduce, tell) for reduce in ("mean", "max"))
        passage = Passage(title, pieces, means, -(-n // cells), peaks, sentences(pieces))
    in_bytes = sum(end - start > 1 for start, end in spans)
    facts = [
        ("text", f"{len(text):,} characters"),
        ("model", _describe(decoder, places)),
        ("kernel", ", ".join(sorted({amap.kernel for amap in maps}))),
    ]
    if loss is not None:
        facts.append(("loss", f"{loss:.2f} nats a token"))
    tell("roles", 0, 1)
    found = [roles(amap, tokens=ids, pieces=pieces) for amap in maps]
    tell("roles", 1, 1)
    tell("comparing", 0, 1)
    alike = comparisons(outputs, maps, places) if outputs else []
    tell("comparing", 1, 1)
    needed = importance(decoder, ids, places, progress=lambda done, of: tell("importance", done, of))
    return Report(
        title, [passage], statistics(results, places), patterns(found, places), facts, _notes(n, in_bytes, decoder),
        counts=places.uneven, roles=roles_in_words(found, places), comparisons=alike, importance=needed,
    )  # fmt: skip


def statistics(results: list[Measurements], places: Places) -> list[Statistic]:
    """One `Statistic` a measure from the measurements of each layer (the mean over a batch)."""

    def of_all(name: str) -> np.ndarray:
        return places.stacked([result[name].mean(0).numpy() for result in results])

    found = []
    for name in SHOWN:
        measure = MEASURES[name]()
        found.append(Statistic(name, of_all(name), measure.unit, _first_sentence(measure)))
    if "punctuation_mass" in results[0]:
        values = of_all("punctuation_mass")
        found.append(Statistic("punctuation_mass", values, "mass", "Weight on punctuation marks, mean over queries."))
    return found


def sentences(tokens: list[str]) -> list[tuple[int, int]]:
    """Token ranges of the sentences; ends are 。！？!?… or a full stop before white space, and line ends."""
    ends, start = [], 0
    for i, token in enumerate(tokens):
        after = tokens[i + 1] if i + 1 < len(tokens) else "\n"
        closes = token in "。！？!?…\n" or (token == "." and after.isspace())
        if token and closes and not (after and after in "。！？!?…”’」』\"'\n"):
            if any(not t.isspace() for t in tokens[start : i + 1]):
                ends.append((start, i + 1))
            start = i + 1
    if any(not t.isspace() for t in tokens[start:]):
        ends.append((start, len(tokens)))
    return ends if len(ends) > 1 else []


def _read(decoder: Decoder, ids: Tensor) -> tuple[Tensor, list[AttentionMap], list[Tensor]]:
    """The last hidden states, the maps, and every head's outputs [1, h, n, d_v] ([] where heads have none of their
    own)."""
    try:
        sites = find_heads(decoder)
    except ConfigError:
        return *decoder.hidden(ids[None], return_maps=True), []
    with record_heads(sites) as outputs:
        hidden, maps = decoder.hidden(ids[None], return_maps=True)
    return hidden, maps, outputs


def _tell_nobody(what: str, done: int, of: int) -> None:
    pass


def _layer(tell: Step, what: str, layer: int, layers: int) -> Progress:
    """Progress within a layer as progress over all of them."""
    return lambda done, of: tell(what, layer * of + done, layers * of)


def _pieces(text: str, spans: list[tuple[int, int]]) -> list[str]:
    """One string a token: the character, whole, at the last of its tokens, where the model knows it."""
    pieces = []
    for character, (start, end) in zip(text, spans, strict=True):
        pieces += [""] * (end - start - 1) + [character]
    return pieces


def _exact(maps: list[AttentionMap], spans: list[tuple[int, int]], places: Places) -> np.ndarray:
    """[layers, heads, characters, characters]: what a character gives is the mean over its tokens, what it gets
    the sum, so that rows still sum to one."""
    starts = [start for start, _ in spans]
    sizes = np.array([end - start for start, end in spans], np.float32)
    weights = places.stacked([amap[0].numpy() for amap in maps], 0.0)
    if sizes.max() == 1:
        return weights
    weights = np.add.reduceat(weights, starts, axis=3)
    return np.add.reduceat(weights, starts, axis=2) / sizes[:, None]


def _pooled(maps: list[AttentionMap], places: Places, cells: int, reduce: str, tell: Step) -> np.ndarray:
    pictures = (
        amap.pool(cells, reduce, progress=_layer(tell, f"pooling ({reduce})", i, len(maps)))
        for i, amap in enumerate(maps)
    )
    return places.stacked([picture[0].numpy() for picture in pictures], 0.0)


def _notes(n: int, in_bytes: int, decoder: Decoder) -> list[str]:
    notes = ["Weights say where a head looks on this input; they do not by themselves explain what the model does."]
    if decoder.config.design in MEANING:
        notes.append(MEANING[decoder.config.design])
    if in_bytes:
        notes.append(
            f"Not in the model's vocabulary and read as UTF-8 bytes: {in_bytes} of the characters; each is shown whole."
        )
    if n > decoder.config.context:
        notes.append(
            f"The model was trained on {decoder.config.context} tokens at a time; what it does further apart was never "
            f"trained."
        )
    return notes


def _describe(decoder: Decoder, places: Places) -> str:
    c = decoder.config
    size = decoder.num_parameters / 1e6
    extras = [] if c.design == "multi_head" else [c.design]
    extras += [] if c.num_kv_heads is None else [f"{c.num_kv_heads} of keys and values"]
    kind = f" ({', '.join(extras)})" if extras else ""
    each = "/".join(map(str, places.uneven or [places.most]))
    count = f"{each} head{'s' * (places.most > 1)}"
    return f"{c.num_layers} layers × {count}{kind}, d_model {c.d_model}, {size:.1f} M weights"


def _first_sentence(measure: Any) -> str:
    text = re.sub(r"\s+", " ", type(measure).__doc__ or "").strip()
    return re.split(r"(?<=[.:;])\s", text, maxsplit=1)[0].rstrip(":;")
