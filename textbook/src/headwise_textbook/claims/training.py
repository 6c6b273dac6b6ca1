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
from headwise.wording import Bilingual
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
        Bilingual("equal at the start", "起点相同"): _apart_in_training(0.0),
        Bilingual("noise of 1e-06 at the start", "起点相差 1e-06"): _apart_in_training(1e-6),
        Bilingual("noise of 0.001 at the start", "起点相差 0.001"): _apart_in_training(1e-3),
        Bilingual("equal, minibatches of 4", "起点相同，小批量 4"): _apart_in_training(0.0, batch=4),
        Bilingual("equal, dropout 0.1", "起点相同，dropout 0.1"): _apart_in_training(0.0, dropout=0.1),
    }
    steps = (*range(0, 300, 15), 300)
    lines = {name: {t: way[t] for t in steps} for name, way in apart.items()}
    same, noisy, _, batches, dropped = (way[-1] for way in apart.values())
    return [
        at_most(("distance of equal heads after training", "相同的头训练后的距离"), same, 1e-9),
        at_least(("after noise of 1e-6 at the start, relative to it",
                  "起点相差 1e-6 时，训练后的距离与之比"), noisy / 1e-6, 1000),
        at_least(("distance of equal heads after training on minibatches",
                  "相同的头用小批量训练后的距离"), batches, 1e-3).beyond(),
        at_least(("after training with dropout", "用 dropout 训练后"), dropped, 1e-3).control(batches),
        Curve.of(Bilingual("Two heads in training", "训练中的两个头"), Bilingual("step", "步"),
                 Bilingual("relative distance", "相对距离"), lines, log="y"),
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
        equal(("smallest rank of a head's W^Q", "一个头的 W^Q 的最小秩"), least, size),
        equal(("smallest rank of a layer's", "一层的最小秩"), joint, config.d_model),
        at_least(("the same ranks, above those of matrices as initialised", "同样的秩，比随机初始化的矩阵高出"),
                 least - least_fresh + joint - joint_fresh, 1).suggested(),
        at_most(("largest cosine between directions of two heads",
                 "两个头的方向之间的最大余弦"), overlap, 0.1).suggested(),
        equal(("joint rank of equal heads", "相同的头合起来的秩"), copies, size).control(joint),
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
        Bilingual("trained", "训练后"): dict(enumerate(before, 1)),
        Bilingual("before training", "训练前"): dict(enumerate(at_first, 1)),
        Bilingual("trained, in other bases", "训练后，换一组基"): dict(enumerate(after, 1)),
    }
    return [
        at_most(("mean |ρ| of two heads of a layer", "同层两个头的 |ρ| 平均"), mean, 0.1),
        at_least(("before training, relative to that", "训练前，与之比"), mean_fresh / mean, 1.2),
        at_most(("change of the output in other bases", "换基后输出的改变"), max(changes), 1e-12),
        at_most(("mean |ρ| for the same layer in other bases",
                 "换基后同一层的 |ρ| 平均"), mean_turned, 0.1).suggested(),
        at_least(("change of the output with V turned alone",
                  "只旋转 V 时输出的改变"), min(half), 0.01).control(max(changes)),
        Curve.of(Bilingual("Cosine of two heads' outputs, mean of all pairs", "两个头输出的余弦，所有配对的平均"),
                 Bilingual("layer", "层"), Bilingual("mean |ρ|", "|ρ| 平均"), lines),
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
        at_least(("previous character, weight of the best head", "前一个字，最强的头的权重"), best["now"], 0.9),
        at_least(("after an equal one (induction), relative to chance", "相同的字之后（归纳），与随机之比"),
                 lift["now"], 10),
        at_least(("punctuation, relative to its share of the text", "标点，与其在文中的比例之比"), signs["now"], 2),
        at_least(("share of heads of any of these kinds",
                  "属于任一种的头的比例"), float(kinds.double().mean()), 0.5).beyond(),
        at_most(("previous character before training", "训练前，前一个字"), best["before"], 0.5).control(best["now"]),
        at_most(("induction before training", "训练前，归纳"), lift["before"], 5).control(lift["now"]),
        at_most(("punctuation before training", "训练前，标点"), signs["before"], 1.8).control(signs["now"]),
    ]  # fmt: skip


@claim
def heads_can_be_pruned() -> list[Check | Curve]:
    model, every = trained(), trained().every
    harm = {head: losses_without(model, [head]) - model.losses for head in every}
    few, middle = len(every) // 8, len(model.losses) // 2
    halves = slice(None, middle), slice(middle, None)
    counts = sorted({0, 1, 2, few, *range(2 * few, len(every), few), len(every)})
    least, layers, most = (
        Bilingual("least important first", "先去掉最不重要的"), Bilingual("in the order of the layers", "按层的次序"),
        Bilingual("most important first", "先去掉最重要的"),
    )  # fmt: skip
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
            (f"relative loss increase without the {few} least important of {len(every)} heads",
             f"去掉 {len(every)} 个头中最不重要的 {few} 个，损失的相对增加"), lost[least][few], 0.05),
        at_most((f"without the {few} most important", f"去掉最重要的 {few} 个"), lost[most][few], 0.05).beyond(),
        at_most(("without all", "全部去掉"), _lost(losses_without(model, every), model.losses), 0.05).beyond(),
        at_least((f"without the {7 * few} least important", f"去掉最不重要的 {7 * few} 个"), lost[least][7 * few], 0.05)
        .control(lost[least][few]),
        Curve.of(Bilingual("Heads removed from the trained model", "从训练好的模型中去掉头"), Bilingual("heads removed",
                                                                                             "去掉的头数"),
                 Bilingual("relative loss increase", "损失的相对增加"), lost),
    ]  # fmt: skip


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
        at_least(("BLEU of 8 heads minus one, as published",
                  "公布的 BLEU，8 个头减单头"), PUBLISHED_BLEU[8] - PUBLISHED_BLEU[1], 0.5),
        at_least(("held-out loss of one head minus four heads, mean of 3 seeds",
                  "未见文本上的损失，1 个头减 4 个头，3 个种子平均"),
                 sum(gain) / len(gain), 0.02).beyond(),
        at_least(("share of 9 pairs of trainings in which four heads are better", "9 对训练中 4 个头较好的比例"),
                 sum(better) / len(better), 0.5).beyond(),
        at_least(("loss without any head minus that with all",
                  "去掉所有头的损失减去保留时的"), without, 0.1).control(sum(gain) / len(gain)),
    ]  # fmt: skip


@claim
def easier_to_train() -> list[Check | Curve]:
    one, four = (pupils(h) for h in HEADS)
    half, end = ([a.near(at) - b.near(at) for a, b in zip(one, four, strict=True)] for at in (STEPS // 2, STEPS))
    ends = [pupil.near(STEPS) for pupil in one]
    at = range(20, STEPS + 1, 20)
    lines = {
        Bilingual(f"{h} head{'s' * (h > 1)}, mean of 3", f"{h} 个头，3 次平均"): {
            t: sum(pupil.near(t) for pupil in pupils(h)) / len(SEEDS) for t in at
        }
        for h in HEADS
    }
    return [
        at_least(("training loss of one head minus four heads, halfway, mean of 3",
                  "训练损失，1 个头减 4 个头，中途，3 次平均"),
                 sum(half) / len(half), 0.02),
        at_least(("at the end, smallest of 3", "结束时，3 次中最小"), min(end), 0.02),
        at_most(("largest difference between single-head trainings",
                 "单头训练之间的最大差别"), max(ends) - min(ends), 0.02).control(min(end)),
        Curve.of(Bilingual("Training loss, d_model = 64", "训练损失，d_model = 64"), Bilingual("step", "步"),
                 Bilingual("nats per character", "奈特每字符"), lines),
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
        at_least(("share of the gain with one head per layer, mean of 8",
                  "每层只留一个头所得收益的比例，8 种平均"), sum(alone) / len(alone), 0.5),
        at_least(("the best of 8", "8 种中最好的"), max(alone), 0.5),
        at_least(("share of the gain of an ensemble of three models with one of them",
                  "三个模型的集成中，单个成员所得收益的比例"),
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
        at_least(("increase of the loss without 8 of 32 heads relative to all",
                  "去掉 32 个头中的 8 个，损失增加量与保留全部之比"),
                 without / whole, 1.2),
        at_least(("increase with one head relative to four heads, mean of 3 trainings",
                  "1 个头与 4 个头的损失增加量之比，3 次训练平均"),
                 one / four, 1.2),
        at_least(("increase with a fifth instead of a tenth replaced",
                  "替换五分之一与十分之一的损失增加量之比"), twice / whole, 1.2)
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
PAIRS = "天子", "鳳閣"
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
        Bilingual("as described", "如所述"): {at + 1: losses[at] for at in epochs},
        Bilingual("each character attends only to itself", "每个字只关注自己"): {
            at + 1: to_itself[at] for at in epochs
        },
    }
    on_padding = float(padding[0].mean())
    return [
        at_most(("remaining share of the loss", "损失剩余的比例"), last / first, 0.5),
        at_most(("remaining share of the loss, trained here", "损失剩余的比例，在此训练"), left, 0.5),
        at_most(("weight of characters on padding", "字落在填充上的权重"), on_padding, 0.01).suggested(),
        at_most(("relative change of the target", "目标的相对变化"), moved, 0.01).suggested(),
        at_least(("loss if each character attends only to itself, relative to that",
                  "每个字只关注自己时的损失，与之比"),
                 alone / left, 1.0).suggested(),
        at_most(("weight on padding if it is masked",
                 "屏蔽填充后落在其上的权重"), float(padding[1].max()), 0.0).control(on_padding),
        Curve.of(Bilingual("Loss of the demonstration", "演示的损失"), Bilingual("epoch", "轮"),
                 Bilingual("mean squared error", "均方误差"), lines),
    ]  # fmt: skip


@claim
def phrases_attend() -> list[Check]:
    text, found = PARAGRAPHS[0], []
    places = [text.index(pair) for pair in PAIRS]
    for seed in range(3):
        weights = len(text) * _weights_after(seed)  # relative to uniform, [heads, n, n]
        found.append(torch.stack([weights[:, i, j] for at in places for i, j in ((at, at + 1), (at + 1, at))]))
    mean = torch.stack(found).mean((0, 2))  # 天 → 子, 子 → 天, 鳳 → 閣, 閣 → 鳳
    model = trained()
    with torch.no_grad():
        maps = model.decoder(torch.from_numpy(model.tokenizer.encode(text))[None], return_maps=True)[1]
    back = torch.stack([amap.to_dense()[0][:, at + 1, at] for amap in maps for at in places])
    known = len(text) * float(back.unflatten(0, (len(maps), len(places))).mean(1).max())
    return [
        at_least(("天 and 子, mean weight relative to uniform",
                  "天与子，平均权重与均匀之比"), float(mean[:2].mean()), 2),
        at_least(("鳳 and 閣", "鳳与閣"), float(mean[2:].mean()), 2),
        at_least(("子 → 天 and 閣 → 鳳 in the best head of the language model",
                  "子 → 天、閣 → 鳳，语言模型中最强的头"), known, 2)
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
