"""What training makes of heads: of the decoder that comes with headwise, of small ones, and of a demonstration."""

import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis import probe_induction
from headwise.cache import KVCache
from headwise.lm import Decoder, DecoderConfig
from headwise.masks import Dense, Mask
from headwise.stats import ClassMass
from headwise.wording import joined, tr, trn
from headwise_textbook.claims.claim import Check, at_least, at_most, claim, equal
from headwise_textbook.claims.model import (
    PASSAGE,
    Trained,
    adam,
    layer,
    losses_of,
    losses_without,
    normal,
    rank,
    trained,
    untrained,
)
from headwise_textbook.curves import Curve
from headwise_textbook.reconstruct import EPOCHS, fit, numbered, reconstruct
from headwise_textbook.trace import seeded


@claim
def equal_heads_stay_equal() -> list[Check | Curve]:
    apart = {
        tr("equal at the start"): _apart_in_training(0.0),
        tr("noise of 1e-06 at the start"): _apart_in_training(1e-6),
        tr("noise of 0.001 at the start"): _apart_in_training(1e-3),
        tr("equal, minibatches of 4"): _apart_in_training(0.0, batch=4),
        tr("equal, dropout 0.1"): _apart_in_training(0.0, dropout=0.1),
    }
    steps = (*range(0, 300, 15), 300)
    lines = {name: {t: way[t] for t in steps} for name, way in apart.items()}
    same, noisy, _, batches, dropped = (way[-1] for way in apart.values())
    return [
        at_most(tr("distance of equal heads after training"), same, 1e-9),
        at_least(tr("after noise of 1e-6 at the start, relative to it"), noisy / 1e-6, 1000),
        at_least(tr("distance of equal heads after training on minibatches"), batches, 1e-3).beyond(),
        at_least(tr("after training with dropout"), dropped, 1e-3).control(batches),
        Curve.of(tr("Two heads in training"), tr("step"),
                 tr("relative distance"), lines, log="y"),
    ]  # fmt: skip


@claim
def heads_have_subspaces() -> list[Check]:
    config = trained().decoder.config
    size = config.d_model // config.num_heads
    least, joint, overlap = _subspaces(trained().decoder)
    least_fresh, joint_fresh, _ = _subspaces(untrained().decoder)
    copies = rank(
        torch.cat([trained().attention(0).per_head_weights()["q"][0].detach().double()] * config.num_heads, 1)
    )
    return [
        equal(tr("smallest rank of a head's W^Q"), least, size),
        equal(tr("smallest rank of a layer's"), joint, config.d_model),
        at_least(tr("the same ranks, above those of matrices as initialised"),
                 least - least_fresh + joint - joint_fresh, 1).suggested(),
        at_most(tr("largest cosine between directions of two heads"), overlap, 0.1).suggested(),
        equal(tr("joint rank of equal heads"), copies, size).control(joint),
    ]  # fmt: skip


@claim
def outputs_are_dissimilar() -> list[Check | Curve]:
    before, after, changes, half = [], [], [], []  # a number for each layer
    for i, heads in enumerate(trained().heads):
        found = heads.double()  # [n, h, d_v]
        before.append(_cosine(found))
        w = trained().attention(i).per_head_weights()["o"].detach().double()
        turned, w_turned = _turned(found, w)
        after.append(_cosine(turned))
        y, y_turned, y_half = (torch.einsum("nhd,hde->ne", *p) for p in ((found, w), (turned, w_turned), (turned, w)))
        changes.append(float((y - y_turned).abs().max() / y.abs().max()))
        half.append(float((y - y_half).abs().max() / y.abs().max()))
    mean, mean_turned = sum(before) / len(before), sum(after) / len(after)
    fresh = untrained()
    at_first = [_cosine(heads.double()) for heads in fresh.heads]
    mean_fresh = sum(at_first) / len(at_first)
    lines = {
        tr("trained"): dict(enumerate(before, 1)),
        tr("before training"): dict(enumerate(at_first, 1)),
        tr("trained, in other bases"): dict(enumerate(after, 1)),
    }
    return [
        at_most(tr("mean |ρ| of two heads of a layer"), mean, 0.1),
        at_least(tr("before training, relative to that"), mean_fresh / mean, 1.2),
        at_most(tr("change of the output in other bases"), max(changes), 1e-12),
        at_most(tr("mean |ρ| for the same layer in other bases"), mean_turned, 0.1).suggested(),
        at_least(tr("change of the output with V turned alone"), min(half), 0.01).control(max(changes)),
        Curve.of(tr("Cosine of two heads' outputs, mean of all pairs"),
                 tr("layer"), tr("mean |ρ|"), lines),
    ]  # fmt: skip


@claim
def heads_have_kinds() -> list[Check]:
    fresh = untrained()
    (probe, to_signs), (before, signs_before) = _probed(trained()), _probed(fresh)
    share = sum(not c.isalnum() for c in PASSAGE) / len(PASSAGE)
    kinds = torch.from_numpy(probe.previous.mass) > 0.5
    kinds |= torch.from_numpy(probe.induction.lift) > 10
    kinds |= to_signs > 0.5
    best = {when: float(one.previous.mass.max()) for when, one in (("now", probe), ("before", before))}
    lift = {when: float(one.induction.lift.max()) for when, one in (("now", probe), ("before", before))}
    signs = {when: float(one.max()) / share for when, one in (("now", to_signs), ("before", signs_before))}
    return [
        at_least(tr("previous character, weight of the best head"), best["now"], 0.9),
        at_least(tr("after an equal one (induction), relative to chance"),
                 lift["now"], 10),
        at_least(tr("punctuation, relative to its share of the text"), signs["now"], 2),
        at_least(tr("share of heads of any of these kinds"), float(kinds.double().mean()), 0.5).beyond(),
        at_most(tr("previous character before training"), best["before"], 0.5).control(best["now"]),
        at_most(tr("induction before training"), lift["before"], 5).control(lift["now"]),
        at_most(tr("punctuation before training"), signs["before"], 1.8).control(signs["now"]),
    ]  # fmt: skip


@claim
def heads_can_be_pruned() -> list[Check | Curve]:
    model, every = trained(), trained().every
    harm = {head: losses_without(model, [head]) - model.losses for head in every}
    few, middle = len(every) // 8, len(model.losses) // 2
    halves = slice(None, middle), slice(middle, None)
    counts = sorted({0, 1, 2, few, *range(2 * few, len(every), few), len(every)})
    least, layers, most = (
        tr("least important first"), tr("in the order of the layers"),
        tr("most important first"))  # fmt: skip
    lost: dict[str, dict[int, float]] = {order: {} for order in (least, layers, most)}
    for count in counts:
        both = dict.fromkeys(lost, 0.0)
        for chosen_on, measured_on in (halves, halves[::-1]):
            order = sorted(harm, key=lambda head: float(harm[head][chosen_on].mean()))
            for name, heads in zip(lost, (order, every, order[::-1]), strict=True):
                both[name] += _lost(losses_without(model, heads[:count])[measured_on], model.losses[measured_on])
        for name, total in both.items():
            lost[name][count] = total / 2
    return [
        at_most(
            tr("relative loss increase without the {few} least important of {count} heads", few=few, count=len(every)),
            lost[least][few],
            0.05,
        ),
        at_most(tr("without the {few} most important", few=few), lost[most][few], 0.05).beyond(),
        at_most(tr("without all"), _lost(losses_without(model, every), model.losses), 0.05).beyond(),
        at_least(tr("without the {few} least important", few=7 * few), lost[least][7 * few], 0.05).control(
            lost[least][few]
        ),
        Curve.of(tr("Heads removed from the trained model"), tr("heads removed"), tr("relative loss increase"), lost),
    ]


def _subspaces(decoder: Decoder) -> tuple[int, int, float]:
    """Of the W^Q of all layers: the smallest rank of a head, that of a layer, the largest cosine between two heads."""
    least, joint, overlaps = [], [], []
    for block in decoder.blocks:
        attention: Any = block.attention
        w = attention.per_head_weights()["q"].detach().double()  # [h, d_model, d_k]
        least.append(min(map(rank, w)))
        joint.append(rank(torch.cat(list(w), 1)))
        bases = torch.linalg.qr(w)[0]
        angles = torch.linalg.svdvals(bases[:, None].mT @ bases)[..., 0]  # cosine of the least principal angle, [h, h]
        overlaps.append(float(angles[~torch.eye(len(w), dtype=torch.bool)].max()))
    return min(least), min(joint), max(overlaps)


def _probed(model: Trained) -> tuple[Any, Tensor]:
    """The probe of repeated characters, and each head's weight on punctuation in the passage, [layers, heads]."""
    known = Counter(c for c in PASSAGE if c in model.tokenizer.characters and unicodedata.category(c)[0] == "L")
    common = "".join(sorted(known, key=lambda c: (-known[c], c)))
    ids = torch.from_numpy(model.tokenizer.encode(common))
    probe = probe_induction(lambda drawn: model.decoder(drawn, return_maps=True), ids, length=64, copies=2, sequences=4)
    signs = ClassMass.of_tokens(list(PASSAGE), "punctuation")
    return probe, torch.stack([amap.measure(signs)[signs.name][0] for amap in model.maps])


def _lost(without: Tensor, whole: Tensor) -> float:
    return float(without.mean() / whole.mean()) - 1.0


def _apart_in_training(noise: float, *, batch: int = 16, dropout: float = 0.0) -> list[float]:
    """Relative distance between two heads that start `noise` apart, before each step and at the end.

    batch: sequences of a step, of 16; fewer are drawn anew at each step. dropout: of the attention weights.
    """
    teacher = layer("multi_head", 8, 2, head_dim=6, seed=1)
    student = layer("multi_head", 8, 2, head_dim=6, seed=2, dropout=dropout).train()
    with torch.no_grad():
        for i, w in enumerate(student.per_head_weights().values()):
            w[1] = w[0] + noise * normal(*w[0].shape, seed=10 + i)
    x, draw = 2.0 * normal(16, 9, 8, seed=3), torch.Generator().manual_seed(4)
    target = teacher(x).detach()

    def loss() -> Tensor:
        chosen = torch.arange(16) if batch == 16 else torch.randperm(16, generator=draw)[:batch]
        return (student(x[chosen]) - target[chosen]).square().mean()

    steps = adam(student.parameters(), loss, 300, 1e-2)
    return [_apart(student), *(_apart(student) for _ in steps)]


def _apart(module: Any) -> float:
    """Distance between head 0 and head 1 relative to the norm of head 0, over all their matrices."""
    one, other, *_ = torch.cat([w.detach().flatten(1) for w in module.per_head_weights().values()], 1)
    return float((other - one).norm() / one.norm())


def _cosine(heads: Tensor) -> float:
    """Mean |ρ_ij| over all pairs of heads [n, h, d_v], each head flattened to one vector."""
    flat = nn.functional.normalize(heads.transpose(0, 1).flatten(1), dim=-1)
    rho = flat @ flat.mT
    return float(rho[~torch.eye(len(rho), dtype=torch.bool)].abs().mean())


def _turned(heads: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Heads [n, h, d_v] and their W_i^O [h, d_v, d] in other bases: each head rotated towards the first."""
    u, _, vh = torch.linalg.svd(torch.einsum("nhd,ne->hde", heads, heads[:, 0]))
    turn = u @ vh  # [h, d_v, d_v], the rotation of head h that brings it closest to head 0
    return torch.einsum("nhd,hde->nhe", heads, turn), turn.mT @ w


# One head against several: small decoders, trained on text that the embedded model writes.
SEEDS, HEADS = (0, 1, 2), (1, 4)
STEPS, LENGTH, ROWS, HELD_OUT = 300, 96, 320, 40
# BLEU on newstest2013 for one and eight heads at equal cost: Vaswani et al. 2017, table 3, rows (A) and base.
PUBLISHED_BLEU = {1: 24.9, 8: 25.8}


@claim
def multi_head_is_better() -> list[Check]:
    one, four = (pupils(h) for h in HEADS)
    gain = [a.held_out - b.held_out for a, b in zip(one, four, strict=True)]
    better = [b.held_out < a.held_out for a, b in product(one, four)]
    without = float(losses_of(four[0].decoder, held_out(), scale=0.0).mean()) - four[0].held_out
    return [
        at_least(tr("BLEU of 8 heads minus one, as published"), PUBLISHED_BLEU[8] - PUBLISHED_BLEU[1], 0.5),
        at_least(tr("held-out loss of one head minus four heads, mean of 3 seeds"),
                 sum(gain) / len(gain), 0.02).beyond(),
        at_least(tr("share of 9 pairs of trainings in which four heads are better"),
                 sum(better) / len(better), 0.5).beyond(),
        at_least(tr("loss without any head minus that with all"), without, 0.1).control(sum(gain) / len(gain)),
    ]  # fmt: skip


@claim
def easier_to_train() -> list[Check | Curve]:
    one, four = (pupils(h) for h in HEADS)
    half, end = ([a.near(at) - b.near(at) for a, b in zip(one, four, strict=True)] for at in (STEPS // 2, STEPS))
    ends = [pupil.near(STEPS) for pupil in one]
    at = range(20, STEPS + 1, 20)
    lines = {
        trn("{count} head, mean of 3", "{count} heads, mean of 3", count=h): {
            t: sum(pupil.near(t) for pupil in pupils(h)) / len(SEEDS) for t in at
        }
        for h in HEADS
    }
    return [
        at_least(tr("training loss of one head minus four heads, halfway, mean of 3"),
                 sum(half) / len(half), 0.02),
        at_least(tr("at the end, smallest of 3"), min(end), 0.02),
        at_most(tr("largest difference between single-head trainings"), max(ends) - min(ends), 0.02).control(min(end)),
        Curve.of(tr("Training loss, d_model = 64"), tr("step"),
                 tr("nats per character"), lines),
    ]  # fmt: skip


@claim
def heads_as_ensemble() -> list[Check]:
    model, every = trained(), trained().every
    none, whole = float(losses_without(model, every).mean()), float(model.losses.mean())
    alone = [
        (none - float(losses_without(model, [x for x in every if x[1] != kept]).mean())) / (none - whole)
        for kept in range(model.decoder.config.num_heads)
    ]
    ids, seen, members = _text(), held_out()[:, 1:], pupils(HEADS[-1])
    frequent = torch.bincount(ids[:-HELD_OUT].flatten(), minlength=int(ids.max()) + 1).float() + 1
    base = -float((frequent / frequent.sum()).log()[seen].mean())  # of character frequencies
    with torch.no_grad():
        chances = torch.stack([one.decoder(held_out())[:, :-1].softmax(-1) for one in members]).mean(0)
    together = -float(chances.gather(-1, seen[..., None]).log().mean())
    member = (base - sum(one.held_out for one in members) / len(SEEDS)) / (base - together)
    return [
        at_least(tr("share of the gain with one head per layer, mean of 8"), sum(alone) / len(alone), 0.5),
        at_least(tr("the best of 8"), max(alone), 0.5),
        at_least(tr("share of the gain of an ensemble of three models with one of them"),
                 member, 0.5).control(sum(alone) / len(alone)),
    ]  # fmt: skip


@claim
def more_heads_more_robust() -> list[Check]:
    model = trained()
    least = sorted(model.every, key=lambda head: float((losses_without(model, [head]) - model.losses).mean()))[:8]

    def losses(gone: list[tuple[int, int]], ids: Tensor) -> Tensor:
        return losses_without(model, gone, ids)[None]

    whole, without = (_rise(partial(losses, gone), model.ids) for gone in ([], least))
    twice = _rise(partial(losses_of, model.decoder), model.ids, share=0.2)
    one, four = (
        sum(_rise(partial(losses_of, pupil.decoder), held_out()) for pupil in pupils(h)) / len(SEEDS) for h in HEADS
    )
    return [
        at_least(tr("increase of the loss without 8 of 32 heads relative to all"),
                 without / whole, 1.2),
        at_least(tr("increase with one head relative to four heads, mean of 3 trainings"),
                 one / four, 1.2),
        at_least(tr("increase with a fifth instead of a tenth replaced"), twice / whole, 1.2)
        .control(max(without / whole, one / four)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Pupil:
    """A small decoder after training. losses: of each step. held_out: nats per character of text not trained on."""

    decoder: Decoder
    losses: tuple[float, ...]
    held_out: float

    def near(self, step: int) -> float:
        """The mean training loss of the 20 steps before."""
        return sum(self.losses[step - 20 : step]) / 20


@cache
def pupils(h: int) -> tuple[Pupil, ...]:
    """Decoders of h heads with 3 seeds, each trained on the same batches."""
    return tuple(_taught(h, seed) for seed in SEEDS)


def held_out() -> Tensor:
    """The sequences that were not trained on, [rows, length]."""
    return _text()[-HELD_OUT:]


@cache
@torch.no_grad()
def _text() -> Tensor:
    """Text that the embedded model continues from "ROMEO:", its symbols numbered from 0, [rows, length]."""
    model, draw = trained(), torch.Generator().manual_seed(0)
    new = torch.from_numpy(model.tokenizer.encode("ROMEO:\n"))[None].expand(ROWS, -1)
    caches, written = [KVCache() for _ in model.decoder.blocks], []
    for _ in range(LENGTH):
        logits = model.decoder(new, caches=caches)[:, -1].float()
        new = torch.multinomial(logits.softmax(-1), 1, generator=draw)
        written.append(new)
    return torch.cat(written, 1).unique(return_inverse=True)[1]


def _taught(h: int, seed: int) -> Pupil:
    ids, draw = _text()[:-HELD_OUT], torch.Generator().manual_seed(100 + seed)
    config = DecoderConfig(int(_text().max()) + 1, d_model=64, num_layers=2, num_heads=h, d_ff=160, context=LENGTH)
    with seeded(seed):
        decoder = Decoder(config)

        def loss() -> Tensor:
            batch = ids[torch.randint(0, len(ids), (16,), generator=draw)]
            return nn.functional.cross_entropy(decoder(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

        losses = tuple(adam(decoder.parameters(), loss, STEPS, 3e-3, last=0.1))
    return Pupil(decoder.eval(), losses, float(losses_of(decoder, held_out()).mean()))


def _rise(losses: Callable[[Tensor], Tensor], ids: Tensor, share: float = 0.1) -> float:
    """How much the mean loss of the other characters increases if a share of them is replaced by others of the text.

    losses: of texts [b, n], as [b, n − 1]. Those of replaced characters and of their successors do not count.
    """
    draw, before, rises = torch.Generator().manual_seed(0), losses(ids), []
    for _ in range(8):
        hit = torch.rand(ids.shape, generator=draw) < share
        others = ids.flatten()[torch.randint(0, ids.numel(), ids.shape, generator=draw)]
        same = ~(hit[:, 1:] | hit[:, :-1])
        rises.append(float((losses(torch.where(hit, others, ids)) - before)[same].mean()))
    return sum(rises) / len(rises)


# A common small demonstration: attention trained to reconstruct its own embeddings.
# Three paragraphs of Water Margin, chapters 1 to 3, as the demonstration has them.
PARAGRAPHS = (
    "話說大宋仁宗天子在位，嘉祐三年三月三日五更三點，天子駕坐紫宸殿，受百官朝賀。但見：祥雲迷鳳閣，瑞氣罩龍樓。含煙"
    "御柳拂旌旗，帶露宮花迎劍戟。天香影裏，玉簪珠履聚丹墀。仙樂聲中，繡襖錦衣扶御駕。珍珠廉卷，黃金殿上現金輿。鳳尾"
    "扇開，白玉階前停寶輦。隱隱凈鞭三下響，層層文武兩班齊。",
    "那高俅在臨淮州，因得了赦宥罪犯，思鄉要回東京。這柳世權卻和東京城里金梁橋下開生藥鋪的董將士是親戚，寫了一封書札，"
    "收拾些人事盤纏，赍發高俅回東京，投奔董將士家過活。",
    "話說當時史進道：「卻怎生是好？」朱武等三個頭領跪下答道：「哥哥，你是乾淨的人，休為我等連累了大郎。可把索來綁縛"
    "我三個，出去請賞，免得負累了你不好看。」",
)
PAIRS = ("天", "子"), ("鳳", "閣")
SENTENCES = [part for part in PASSAGE.replace("？", "。").replace("！", "。").split("。") if len(part) > 4][:6]


@claim
def demo_learns_attention() -> list[Check | Curve]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sentences.txt"
        file.write_text("\n".join(SENTENCES), encoding="utf-8")
        report = reconstruct(file)
    first, last = (float(x) for x in dict(report.facts)["loss, faithful (layer 0)"].split(" → "))
    padding = report.statistics.dense("padding_mass").numpy()
    losses, moved = _trained(None)
    to_itself, _ = _trained(Dense(torch.eye(max(map(len, SENTENCES)), dtype=torch.bool)))
    left, alone = losses[-1] / losses[0], to_itself[-1] / to_itself[0]
    epochs = (*range(0, EPOCHS, 10), EPOCHS - 1)
    lines = {
        tr("as described"): {at + 1: losses[at] for at in epochs},
        tr("each character attends only to itself"): {at + 1: to_itself[at] for at in epochs},
    }
    on_padding = float(padding[0].mean())
    return [
        at_most(tr("remaining share of the loss"), last / first, 0.5),
        at_most(tr("remaining share of the loss, trained here"), left, 0.5),
        at_most(tr("weight of characters on padding"), on_padding, 0.01).suggested(),
        at_most(tr("relative change of the target"), moved, 0.01).suggested(),
        at_least(tr("loss if each character attends only to itself, relative to that"),
                 alone / left, 1.0).suggested(),
        at_most(tr("weight on padding if it is masked"), float(padding[1].max()), 0.0).control(on_padding),
        Curve.of(tr("Loss of the demonstration"), tr("epoch"),
                 tr("mean squared error"), lines),
    ]  # fmt: skip


@claim
def phrases_attend() -> list[Check]:
    text, found = PARAGRAPHS[0], []
    places = [text.index("".join(pair)) for pair in PAIRS]
    for seed in range(3):
        weights = len(text) * _weights_after(seed)  # relative to uniform, [heads, n, n]
        found.append(torch.stack([weights[:, i, j] for at in places for i, j in ((at, at + 1), (at + 1, at))]))
    mean = torch.stack(found).mean((0, 2))  # 天 → 子, 子 → 天, 鳳 → 閣, 閣 → 鳳
    model = trained()
    with torch.no_grad():
        maps = model.decoder(torch.from_numpy(model.tokenizer.encode(text))[None], return_maps=True)[1]
    back = torch.stack([amap.to_dense()[0][:, at + 1, at] for amap in maps for at in places])
    known = len(text) * float(back.unflatten(0, (len(maps), len(places))).mean(1).max())
    pairs = [tr("{one} and {other}", one=pair[0], other=pair[1]) for pair in PAIRS]
    backwards = [f"{pair[1]} → {pair[0]}" for pair in PAIRS]
    return [
        at_least(tr("{pair}, mean weight relative to uniform", pair=pairs[0]), float(mean[:2].mean()), 2),
        at_least(pairs[1], float(mean[2:].mean()), 2),
        at_least(tr("{pairs} in the best head of the language model", pairs=joined(backwards, tr(" and "))), known, 2)
        .control(float(mean.mean())),
    ]  # fmt: skip


def _weights_after(seed: int) -> Tensor:
    """The weights of the first paragraph after training as described, without dropout, [heads, n, n]."""
    ids = numbered(PARAGRAPHS)
    with seeded(seed):
        embedding, attention, _ = fit(ids)
    with torch.no_grad():
        return attention.eval()(embedding(ids[:1]), return_map=True)[1].to_dense()[0]


def _trained(mask: Mask | None) -> tuple[list[float], float]:
    """Train under a mask: the loss of each epoch, and the relative change of the characters' embeddings."""
    with seeded(0):
        embedding, _, losses = fit(numbered(SENTENCES), mask)
    with seeded(0):
        start = nn.Embedding(*embedding.weight.shape).weight.detach()
    moved = (embedding.weight.detach() - start)[1:].norm() / start[1:].norm()
    return losses, float(moved)
