"""A common small demonstration: attention trained to reconstruct the embeddings of three passages of a novel."""

from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headwise.masks import Dense, Lengths, Mask
from headwise.wording import tr
from headwise_textbook.claims.claim import Check, Plot, at_least, at_most, claim, equal
from headwise_textbook.claims.model import trained
from headwise_textbook.reconstruct import DROPOUT, EPOCHS, fit, numbered, stolen
from headwise_textbook.trace import seeded

SEEDS = 0, 1, 2
# Three paragraphs of Water Margin, chapters 1 to 3, as the demonstration has them.
PARAGRAPHS = files(__package__).joinpath("paragraphs.txt").read_text(encoding="utf-8").split()
PAIRS = ("天", "子"), ("鳳", "閣")
LENGTHS = torch.tensor([len(text) for text in PARAGRAPHS])
# Colours of two maps of matplotlib at equal steps, red, green and blue.
VIRIDIS = (68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)
JET = (0, 0, 128), (0, 128, 255), (125, 255, 122), (255, 148, 0), (128, 0, 0)


@claim
def demo_learns_attention() -> list[Check | Plot]:
    _, _, losses, weights = _rebuilt(0)
    masked = _fitted(Lengths(LENGTHS, queries=LENGTHS), LENGTHS)[3]
    to_itself = _fitted(Dense(torch.eye(int(LENGTHS.max()), dtype=torch.bool)))[2]
    moved = _moved(_rebuilt(0)[0])
    left, alone = losses[-1] / losses[0], to_itself[-1] / to_itself[0]
    epochs = (*range(0, EPOCHS, 10), EPOCHS - 1)
    on_padding = float(stolen(weights, LENGTHS).mean())
    return [
        at_most(tr("remaining share of the loss"), left, 0.5),
        at_most(tr("weight of characters on padding"), on_padding, 0.01).suggested(),
        at_most(tr("relative change of the target"), moved, 0.01).suggested(),
        at_least(tr("loss if each character attends only to itself, relative to that"),
                 alone / left, 1.0).suggested(),
        at_most(tr("weight on padding if it is masked"), float(stolen(masked, LENGTHS).max()), 0.0)
        .control(on_padding),
        Plot({
            tr("as described"): {at + 1: losses[at] for at in epochs},
            tr("each character attends only to itself"): {at + 1: to_itself[at] for at in epochs},
        }),
    ]  # fmt: skip


@claim
def phrases_attend() -> list[Check]:
    demo, known = ({pair: _to_first(of(), pair) for pair in PAIRS} for of in (_of_first_passage, _of_language_model))
    what = {pair: tr("{second} → {first}, best head", second=pair[1], first=pair[0]) for pair in PAIRS}
    return [
        *(at_least(what[pair], demo[pair], 5) for pair in PAIRS),
        *(at_least(tr("{pair} of the language model", pair=what[pair]), known[pair], 5).control(demo[pair])
          for pair in PAIRS),
    ]  # fmt: skip


@claim
def demo_heads_have_kinds() -> list[Check]:
    demo, model = _kinds(_of_first_passage()), _kinds(_of_language_model())
    what = {
        "neighbours": tr("weight on the character before, best head"),
        "starts": tr("on the first characters of sentences, best head"),
        "ends": tr("of the last characters of lines on one another, best head"),
    }
    return [
        *(at_least(what[kind], demo[kind], 1.5) for kind in what),
        at_least(tr("{what} of the language model", what=what["neighbours"]), model["neighbours"], 1.5).control(),
        at_least(tr("{what} of the language model", what=what["starts"]), model["starts"], 1.5)
        .control(demo["starts"]),
    ]  # fmt: skip


@claim
def bright_is_important() -> list[Check]:
    text = PARAGRAPHS[0]
    to_sky = _of_first_passage()[:, :, text.index("宋"), [i for i, c in enumerate(text) if c == "天"]]
    brightest, all_ = (sum(part) / len(SEEDS) for part in zip(*map(_harmful, SEEDS), strict=True))
    return [
        at_least(tr("share of characters that are rebuilt worse without the one that is brightest"), brightest, 0.7),
        at_least(tr("weight of 宋 on 天 relative to uniform"), float(to_sky.mean()), 2.0).suggested(),
        at_most(tr("share that are rebuilt worse without any other one, mean"), all_, 0.6).control(),
    ]  # fmt: skip


@claim
def brighter_is_stronger() -> list[Check]:
    weights = _rebuilt(0)[3]
    tops = torch.stack([weights[i, :, :n, :n].amax((-1, -2)) for i, n in enumerate(LENGTHS)])
    with seeded(0):
        shown = nn.functional.dropout(weights, DROPOUT, training=True)
    above = weights > weights.median(-1, keepdim=True).values
    steps = [_darker_steps(colours) for colours in (VIRIDIS, JET)]
    return [
        equal(tr("steps of the colour map at which more weight is darker"), steps[0], 0),
        at_most(tr("weight of the brightest cell: largest of twelve pictures relative to the smallest"),
                float(tops.max() / tops.min()), 1.1).beyond(),
        at_most(tr("share of cells above their row's median that are drawn darkest, after dropout"),
                float((shown[above] == 0).double().mean()), 0.01).beyond(),
        equal(tr("steps of the colour map jet at which more weight is darker"), steps[1], 2).control(),
    ]  # fmt: skip


def _darker_steps(colours: tuple[tuple[int, int, int], ...]) -> int:
    """At how many steps of a colour map the luminance falls."""
    light = [0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2 for r, g, b in colours]
    return sum(after < before for before, after in pairwise(light))


def _fitted(mask: Mask | None = None, lengths: Tensor | None = None, seed: int = 0) -> tuple[Any, Any, list, Tensor]:
    """Embedding, layer, losses and weights [texts, h, n, n] without dropout, after training on the passages."""
    ids = numbered(PARAGRAPHS)
    with seeded(seed):
        embedding, attention, losses = fit(ids, mask, lengths)
    with torch.no_grad():
        maps = attention.eval()(embedding(ids), mask=mask, return_map=True)[1]
    return embedding, attention, losses, maps.to_dense()


@cache
def _rebuilt(seed: int) -> tuple[Any, Any, list, Tensor]:
    """The demonstration as described."""
    return _fitted(seed=seed)


def _of_first_passage() -> Tensor:
    """The weights on the first passage relative to uniform, [seeds, h, n, n]."""
    return torch.stack([len(PARAGRAPHS[0]) * _rebuilt(seed)[3][0] for seed in SEEDS])


@cache
def _of_language_model() -> Tensor:
    """Those of the heads of the trained language model, at the last token of each character, [1, heads, n, n]."""
    model, text = trained(), PARAGRAPHS[0]
    with torch.no_grad():
        maps = model.decoder(torch.from_numpy(model.tokenizer.encode(text))[None], return_maps=True)[1]
    ends = [len(model.tokenizer.encode(text[: i + 1])) - 1 for i in range(len(text))]
    weights = torch.cat([amap.to_dense()[0] for amap in maps])
    return weights.shape[-1] * weights[:, ends][:, :, ends][None]


def _to_first(weights: Tensor, pair: tuple[str, str]) -> float:
    """The weight of the second character of a pair on the first, of the best head; mean over trainings."""
    at = PARAGRAPHS[0].index("".join(pair))
    return float(weights[:, :, at + 1, at].amax(-1).mean())


def _kinds(weights: Tensor) -> dict[str, float]:
    """The mean weight, of the best head, on neighbours, on starts of sentences, and of ends of lines on one another."""
    text = PARAGRAPHS[0]
    starts = [0, *(i + 1 for i, c in enumerate(text[:-1]) if c in "。：")]
    ends = [i - 1 for i, c in enumerate(text) if c in "，。"]
    of_heads = {
        "neighbours": weights.diagonal(-1, -2, -1).mean(-1),
        "starts": weights[..., starts].mean((-1, -2)),
        "ends": weights[:, :, ends][..., ends].mean((-1, -2)),
    }
    return {kind: float(heads.amax(-1).mean()) for kind, heads in of_heads.items()}


def _moved(embedding: nn.Embedding) -> float:
    """The relative change of the characters' embeddings in training."""
    with seeded(0):
        start = nn.Embedding(*embedding.weight.shape).weight.detach()
    return float((embedding.weight.detach() - start)[1:].norm() / start[1:].norm())


@torch.no_grad()
def _harmful(seed: int) -> tuple[float, float]:
    """How many characters of the first passage are rebuilt worse if another one is removed from their rows: the one
    with the largest weight, and all others in the mean."""
    embedding, attention, _, weights = _rebuilt(seed)
    x, w = embedding(numbered(PARAGRAPHS)[:1]), weights[0]
    values = attention.project(x, x)[2][0]

    def error(p: Tensor) -> Tensor:
        return (attention.output(attention.merge((p @ values)[None], x)) - x).square().sum(-1)[0]

    worse = []
    for j in range(w.shape[-1]):
        rest = w.clone()
        rest[:, :, j] = 0.0
        worse.append(error(rest / rest.sum(-1, keepdim=True)) > error(w))
    found = torch.stack(worse, -1)  # [n queries, n keys]
    brightest = w.mean(0).argmax(-1, keepdim=True)
    return float(found.gather(1, brightest).double().mean()), float(found.double().mean())
