"""What heads become in training: on the decoder that comes with headwise, and on a small layer."""

import unicodedata
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from headwise.analysis import probe_induction
from headwise.lm import Decoder
from headwise.stats import ClassMass
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, at_most, equal
from headwise_textbook.claims.model import PASSAGE, Trained, losses_without, observed, trained
from headwise_textbook.claims.samples import adam, layer, normal
from headwise_textbook.curves import Curve
from headwise_textbook.seeds import seeded

Head = tuple[int, int]  # layer, and head in it


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
    with seeded(0):
        fresh = Decoder(config)
    least, joint, overlap = _subspaces(trained().decoder)
    least_fresh, joint_fresh, _ = _subspaces(fresh)
    copies = _rank(
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
    with seeded(0):
        fresh = observed(Decoder(trained().decoder.config).eval(), trained().tokenizer)
    untrained = [_cosine(heads.double()) for heads in fresh.heads]
    mean_fresh = sum(untrained) / len(untrained)
    lines = {
        Bilingual("trained", "训练后"): dict(enumerate(before, 1)),
        Bilingual("before training", "训练前"): dict(enumerate(untrained, 1)),
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
    with seeded(0):
        fresh = observed(Decoder(trained().decoder.config).eval(), trained().tokenizer)
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
    model = trained()
    every = [(i, head) for i in range(len(model.heads)) for head in range(model.decoder.config.num_heads)]
    harm: dict[Head, Tensor] = {head: losses_without(model, [head]) - model.losses for head in every}
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
            order = _by_harm(harm, chosen_on)
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
        least.append(min(map(_rank, w)))
        joint.append(_rank(torch.cat(list(w), 1)))
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


def _by_harm(harm: dict[Head, Tensor], part: slice) -> list[Head]:
    """Heads in ascending order of the increase of the loss without them, on a part of the passage."""
    return sorted(harm, key=lambda head: float(harm[head][part].mean()))


def _lost(without: Tensor, whole: Tensor) -> float:
    return float(without.mean() / whole.mean()) - 1.0


def _apart_in_training(noise: float, *, batch: int = 16, dropout: float = 0.0) -> list[float]:
    """Relative distance between two heads that start `noise` apart, before each step and at the end.

    Args:
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
    pairs = [w.detach() for w in module.per_head_weights().values()]
    apart = torch.cat([(w[1] - w[0]).flatten() for w in pairs]).norm()
    return float(apart / torch.cat([w[0].flatten() for w in pairs]).norm())


def _rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-6))


def _cosine(heads: Tensor) -> float:
    """Mean |ρ_ij| over all pairs of heads [n, h, d_v], each head flattened to one vector."""
    flat = heads.transpose(0, 1).flatten(1)
    flat = flat / flat.norm(dim=-1, keepdim=True)
    rho = flat @ flat.mT
    return float(rho[~torch.eye(len(rho), dtype=torch.bool)].abs().mean())


def _turned(heads: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Heads [n, h, d_v] and their W_i^O [h, d_v, d] in other bases: each head rotated towards the first."""
    products = torch.einsum("nhd,ne->hde", heads, heads[:, 0])
    u, _, vh = torch.linalg.svd(products)
    turn = u @ vh  # [h, d_v, d_v], the rotation of head h that brings it closest to head 0
    return torch.einsum("nhd,hde->nhe", heads, turn), turn.mT @ w
