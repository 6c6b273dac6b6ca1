"""What training makes of heads: of the decoder that comes with headwise, and of small ones."""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from headwise import AttentionMap
from headwise.analysis import probe_induction, roles
from headwise.cache import KVCache
from headwise.lm import Decoder, DecoderConfig
from headwise.stats import ClassMass
from headwise.wording import tr, trn
from headwise_textbook.claims.claim import Check, Plot, at_least, at_most, claim, equal
from headwise_textbook.claims.model import (
    PASSAGE,
    Trained,
    adam,
    layer,
    losses_of,
    losses_without,
    normal,
    rank,
    standard,
    trained,
    untrained,
)
from headwise_textbook.trace import seeded


@claim
def equal_heads_stay_equal() -> list[Check | Plot]:
    apart = {
        tr("equal at the start"): _apart_in_training(0.0),
        tr("noise of 1e-06 at the start"): _apart_in_training(1e-6),
        tr("noise of 0.001 at the start"): _apart_in_training(1e-3),
        tr("equal, minibatches of 4"): _apart_in_training(0.0, batch=4),
        tr("equal, dropout 0.1"): _apart_in_training(0.0, dropout=0.1),
    }
    steps = (*range(0, 300, 15), 300)
    same, noisy, _, batches, dropped = (way[-1] for way in apart.values())
    return [
        at_most(tr("distance of equal heads after training"), same, 1e-9),
        at_least(tr("after noise of 1e-6 at the start, relative to it"), noisy / 1e-6, 1000),
        at_least(tr("distance of equal heads after training on minibatches"), batches, 1e-3).beyond(),
        at_least(tr("after training with dropout"), dropped, 1e-3).control(),
        Plot({name: {t: way[t] for t in steps} for name, way in apart.items()}),
    ]  # fmt: skip


@claim
def heads_have_subspaces() -> list[Check]:
    config = trained().decoder.config
    size = config.d_model // config.num_heads
    least, joint, overlap = _subspaces(trained().decoder)
    *_, fresh = _subspaces(untrained().decoder)
    copies = rank(torch.cat([trained().attention(0).per_head_weights()["q"][0].detach().double()] * 2, 1))
    return [
        equal(tr("smallest rank of a head's W^Q"), least, size),
        equal(tr("smallest joint rank of two heads"), joint, 2 * size),
        at_least(tr("largest overlap of two heads of a layer, relative to random subspaces"),
                 overlap * config.num_heads, 1.5),
        at_most(tr("the same before training"), fresh * config.num_heads, 1.2).control(overlap * config.num_heads),
        equal(tr("joint rank of two equal heads"), copies, size).control(joint),
    ]  # fmt: skip


@claim
def small_heads_specialise() -> list[Check]:
    first, apart = {}, {}
    for size in (8, 32):  # d_model / h, and d_model
        both = [_patterns_apart(size, seed) for seed in SEEDS]
        first[size], apart[size] = (sum(part) / len(both) for part in zip(*both, strict=True))
    return [
        at_least(tr("distance of patterns, 4 heads of 8 relative to 4 heads of 32"), apart[8] / apart[32], 1.2),
        at_least(tr("the same before training"), first[8] / first[32], 1.2),
        at_least(tr("distance after training relative to that before, heads of 32"), apart[32] / first[32], 1.2)
        .control(),
    ]  # fmt: skip


def _patterns_apart(size: int, seed: int) -> tuple[float, float]:
    """The mean Jensen-Shannon divergence, in bits, between the patterns of four heads before and after training on
    y_i = x_π(i) − x_σ(i); d_model = 32."""
    n, content, draw = 12, 8, torch.Generator().manual_seed(0)
    orders = [torch.randperm(n, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    places = normal(n, 24, seed=5).float()
    with seeded(seed):
        module = standard(32, 4, head_dim=size)

    def drawn() -> tuple[Tensor, Tensor]:
        x = torch.randn(16, n, content, generator=draw)
        return torch.cat((x, places.expand(16, -1, -1)), -1), x[:, orders[0]] - x[:, orders[1]]

    def loss() -> Tensor:
        x, target = drawn()
        return (module(x)[..., :content] - target).square().mean()

    @torch.no_grad()
    def apart() -> float:
        p = module(drawn()[0], return_map=True)[1].to_dense()  # [b, h, n, n]
        entropy, mixed = torch.special.entr(p).sum(-1), torch.special.entr((p[:, :, None] + p[:, None]) / 2).sum(-1)
        bits = (mixed - (entropy[:, :, None] + entropy[:, None]) / 2).mean((0, 3)) / math.log(2)  # [h, h]
        return float(bits.sum() / 12)  # over pairs of different heads

    before = apart()
    list(adam(module.parameters(), loss, 120, 1e-2, last=0.05))
    return before, apart()


@claim
def outputs_are_dissimilar() -> list[Check | Plot]:
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
    return [
        at_most(tr("mean |ρ| of two heads of a layer"), mean, 0.1),
        at_least(tr("before training, relative to that"), mean_fresh / mean, 1.2),
        at_most(tr("change of the output in other bases"), max(changes), 1e-12),
        at_most(tr("mean |ρ| for the same layer in other bases"), mean_turned, 0.1).suggested(),
        at_least(tr("change of the output with V turned alone"), min(half), 0.01).control(max(changes)),
        Plot({
            tr("trained"): dict(enumerate(before, 1)),
            tr("before training"): dict(enumerate(at_first, 1)),
            tr("trained, in other bases"): dict(enumerate(after, 1)),
        }),
    ]  # fmt: skip


@claim
def heads_have_kinds() -> list[Check]:
    fresh = untrained()
    (probe, to_signs), (before, signs_before) = _probed(trained()), _probed(fresh)
    share = sum(not c.isalnum() for c in PASSAGE) / len(PASSAGE)
    best = {when: float(one.previous.mass.max()) for when, one in (("now", probe), ("before", before))}
    lift = {when: float(one.induction.lift.max()) for when, one in (("now", probe), ("before", before))}
    signs = {when: float(one.max()) / share for when, one in (("now", to_signs), ("before", signs_before))}
    return [
        at_least(tr("previous character, weight of the best head"), best["now"], 0.9),
        at_least(tr("after an equal one (induction), relative to chance"),
                 lift["now"], 10),
        at_least(tr("punctuation, relative to its share of the text"), signs["now"], 2),
        at_most(tr("previous character before training"), best["before"], 0.5).control(best["now"]),
        at_most(tr("induction before training"), lift["before"], 5).control(lift["now"]),
        at_most(tr("punctuation before training"), signs["before"], 1.8).control(signs["now"]),
    ]  # fmt: skip


@claim
def heads_learn_language() -> list[Check]:
    now, before = (max(_previous(amap) for amap in model.maps) for model in (trained(), untrained()))
    relations = roles(trained().maps, pieces=list(PASSAGE)).syntax
    return [
        at_least(tr("previous character, weight of the best head"), now, 0.5),
        at_least(tr("relations of syntax that can be counted in a passage without annotation"), len(relations), 1)
        .beyond(),
        at_most(tr("previous character before training"), before, 0.5).control(),
    ]  # fmt: skip


def _previous(amap: AttentionMap) -> float:
    """The mean weight on the character before, of the best head of a layer."""
    return float(amap.to_dense()[0].diagonal(-1, -2, -1).mean(-1).max())


@claim
def heads_can_be_pruned() -> list[Check | Plot]:
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
        Plot(lost),
    ]


def _subspaces(decoder: Decoder) -> tuple[int, int, float]:
    """Of the W^Q of all layers: the smallest rank of a head and of two neighbours, and the largest overlap of two: the
    mean squared cosine of their principal angles, 0 if orthogonal, d_k / d_model if random, 1 if equal."""
    least, joint, overlaps = [], [], []
    for block in decoder.blocks:
        attention: Any = block.attention
        w = attention.per_head_weights()["q"].detach().double()  # [h, d_model, d_k]
        least.append(min(map(rank, w)))
        joint.append(min(rank(torch.cat(pair, 1)) for pair in pairwise(w)))
        bases = torch.linalg.qr(w)[0]
        shared = torch.linalg.svdvals(bases[:, None].mT @ bases).square().mean(-1)  # [h, h]
        overlaps.append(float(shared[~torch.eye(len(w), dtype=torch.bool)].max()))
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
def easier_to_train() -> list[Check | Plot]:
    one, four = (pupils(h) for h in HEADS)
    half, end = ([a.near(at) - b.near(at) for a, b in zip(one, four, strict=True)] for at in (STEPS // 2, STEPS))
    ends = [pupil.near(STEPS) for pupil in one]
    at = range(20, STEPS + 1, 20)
    return [
        at_least(tr("training loss of one head minus four heads, halfway, mean of 3"),
                 sum(half) / len(half), 0.02),
        at_least(tr("at the end, smallest of 3"), min(end), 0.02),
        at_most(tr("largest difference between single-head trainings"), max(ends) - min(ends), 0.02).control(min(end)),
        Plot({
            trn("{count} head, mean of 3", "{count} heads, mean of 3", count=h): {
                t: sum(pupil.near(t) for pupil in pupils(h)) / len(SEEDS) for t in at
            }
            for h in HEADS
        }),
    ]  # fmt: skip


@claim
def small_heads_overfit_less() -> list[Check]:
    one, four = (sum(pupil.gap for pupil in pupils(h)) / len(SEEDS) for h in HEADS)
    narrow = sum(_taught(1, seed, d_model=16).gap for seed in SEEDS) / len(SEEDS)
    return [
        at_most(tr("held-out loss minus training loss, four heads relative to one"), four / one, 0.95),
        at_most(tr("the same with a quarter of the width, one head"), narrow / one, 0.95).control(four / one),
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

    @property
    def gap(self) -> float:
        """How much larger the held-out loss is than that of the training at its end."""
        return self.held_out - self.near(STEPS)

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


def _taught(h: int, seed: int, d_model: int = 64) -> Pupil:
    ids, draw = _text()[:-HELD_OUT], torch.Generator().manual_seed(100 + seed)
    config = DecoderConfig(
        int(_text().max()) + 1, d_model=d_model, num_layers=2, num_heads=h, d_ff=5 * d_model // 2, context=LENGTH
    )
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
