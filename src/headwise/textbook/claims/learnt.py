"""What heads become in training: on the decoder that comes with headwise, and on a small layer."""

from typing import Any

import torch
from torch import Tensor

from headwise.lm.model import Decoder
from headwise.lm.probes import frequent_characters, probe_repeats
from headwise.reports.curves import Curve
from headwise.seeds import seeded
from headwise.stats import ClassMass
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, Verdict, at_least, at_most, equal
from headwise.textbook.claims.model import PASSAGE, losses_without, observed, trained
from headwise.textbook.claims.samples import adam, layer, normal

Head = tuple[int, int]  # layer, and head in it


@claim(
    "Heads differ because they start differently: equal heads get equal gradients and stay equal, and the least noise "
    "drives them apart.",
    formula="W_1 = W_2 ⟹ ∂L/∂W_1 = ∂L/∂W_2",
    source="§5.3, symmetry of heads and random initialisation",
)
def equal_heads_stay_equal() -> list[Check | Curve]:
    """Two heads are trained on the outputs of another layer of two heads, 300 steps of Adam."""
    apart = {noise: _apart_in_training(noise) for noise in (0.0, 1e-6, 1e-3)}
    steps = (*range(0, 300, 15), 300)
    lines = {
        f"noise of {noise:g} at the start" if noise else "equal at the start": {t: way[t] for t in steps}
        for noise, way in apart.items()
    }
    return [
        at_most("distance of equal heads after training", apart[0.0][-1], 1e-9),
        at_least("after noise of 1e-6 at the start, relative to it", apart[1e-6][-1] / 1e-6, 1000),
        Curve.of("Two heads in training", "step", "relative distance", lines, log="y"),
    ]


@claim(
    "Each head works in a subspace of its own: d_k of d_model dimensions, and together they are the whole space.",
    formula="rank W_i^Q = d_k,  rank [W_1^Q | … | W_h^Q] = d_model",
    source="§5.3, subspaces",
    expected=Verdict.CONDITIONS,
)
def heads_have_subspaces() -> list[Check]:
    """For the query matrices of a trained model. If “of its own” means that subspaces do not overlap, it is false: some
    directions are read by several heads.
    """
    d = trained().decoder.config.d_model
    ranks, overlaps, size = [], [], 0
    for i in range(len(trained().heads)):
        w = trained().attention(i).per_head_weights()["q"].detach().double()  # [h, d_model, d_k]
        size = w.shape[-1]
        ranks.append((min(map(_rank, w)), _rank(torch.cat(list(w), 1))))
        bases = torch.linalg.qr(w)[0]
        angles = torch.linalg.svdvals(bases[:, None].mT @ bases)[..., 0]  # cosine of the least principal angle, [h, h]
        overlaps.append(float(angles[~torch.eye(len(w), dtype=torch.bool)].max()))
    return [
        equal("smallest rank of a head's W^Q", min(r for r, _ in ranks), size),
        equal("smallest rank of a layer's", min(r for _, r in ranks), d),
        at_most("largest cosine between directions of two heads", max(overlaps), 0.1).beyond(),
    ]


@claim(
    "Trained heads specialise: ρ_ij = ⟨head_i, head_j⟩ / (‖head_i‖ ‖head_j‖) is low.",
    formula="ρ_ij = ⟨head_i, head_j⟩ / (‖head_i‖ ‖head_j‖)",
    source="5.3.11",
    expected=Verdict.MISLEADING,
)
def outputs_are_dissimilar() -> list[Check | Curve]:
    """It is low, and lower than before training. But ρ compares numbers in unrelated bases: rotating V and W_O of a
    head changes no output, but changes ρ arbitrarily.
    """
    before, after, changes = [], [], []  # a number for each layer
    for i, heads in enumerate(trained().heads):
        found = heads.double()  # [n, h, d_v]
        before.append(_cosine(found))
        w = trained().attention(i).per_head_weights()["o"].detach().double()
        turned, w_turned = _turned(found, w)
        after.append(_cosine(turned))
        y, y_turned = (torch.einsum("nhd,hde->ne", *pair) for pair in ((found, w), (turned, w_turned)))
        changes.append(float((y - y_turned).abs().max() / y.abs().max()))
    mean, mean_turned = sum(before) / len(before), sum(after) / len(after)
    with seeded(0):
        fresh = observed(Decoder(trained().decoder.config).eval(), trained().tokenizer)
    untrained = [_cosine(heads.double()) for heads in fresh.heads]
    mean_fresh = sum(untrained) / len(untrained)
    lines = {
        name: dict(enumerate(values, 1))
        for name, values in (("trained", before), ("before training", untrained), ("trained, in other bases", after))
    }
    return [
        at_most("mean |ρ| of two heads of a layer", mean, 0.1),
        at_least("before training, relative to that", mean_fresh / mean, 1.2),
        at_most("the same for the same layer in other bases", mean_turned, 0.1).suggested(),
        at_most("change of the output", max(changes), 1e-12).control(),
        Curve.of("Cosine of two heads' outputs, mean of all pairs", "layer", "mean |ρ|", lines),
    ]


@claim(
    "Trained heads come in kinds: positional, copying, separator heads and others.",
    formula="mass on the previous token, after an equal one, on punctuation",
    source="ch. 11, kinds of heads; Clark et al. 2019, 1906.04341; Voita et al. 2019, 1905.09418",
    expected=Verdict.CONDITIONS,
    slow=True,
)
def heads_have_kinds() -> list[Check]:
    """Some heads are clearly of these kinds; most heads of our model are not. Syntactic, semantic and coreference heads
    require annotated texts and are not judged here.
    """
    model = trained()
    probe = probe_repeats(
        model.decoder, model.tokenizer, frequent_characters(PASSAGE, model.tokenizer), length=64, sequences=4
    )
    signs = ClassMass.of_tokens(list(PASSAGE), "punctuation")
    to_signs = torch.stack([amap.measure(signs)[signs.name][0] for amap in model.maps])  # [layers, heads]
    share = sum(not c.isalnum() for c in PASSAGE) / len(PASSAGE)
    kinds = torch.from_numpy(probe.previous.mass) > 0.5
    kinds |= torch.from_numpy(probe.induction.lift) > 10
    kinds |= to_signs > 0.5
    return [
        at_least("previous character, weight of the best head", float(probe.previous.mass.max()), 0.9),
        at_least("after an equal one (induction), relative to chance", float(probe.induction.lift.max()), 10),
        at_least("punctuation, relative to its share of the text", float(to_signs.max()) / share, 2),
        at_least("share of heads of any of these kinds", float(kinds.double().mean()), 0.5).beyond(),
    ]


@claim(
    "Many heads are redundant: they can be taken out with little loss.",
    formula="L(without heads) / L − 1",
    source="ch. 11, redundancy; Michel et al. 2019, 1905.10650; Voita et al. 2019, 1905.09418",
    expected=Verdict.CONDITIONS,
    slow=True,
)
def heads_can_be_pruned() -> list[Check | Curve]:
    """If the heads are selected: on one half of the passage, measured on the other, mean of both directions. Not any
    heads, and not all. Nothing was trained afterwards.
    """
    model = trained()
    every = [(i, head) for i in range(len(model.heads)) for head in range(model.decoder.config.num_heads)]
    harm: dict[Head, Tensor] = {head: losses_without(model, [head]) - model.losses for head in every}
    few, middle = len(every) // 8, len(model.losses) // 2
    halves = slice(None, middle), slice(middle, None)
    counts = sorted({0, 1, 2, few, *range(2 * few, len(every), few), len(every)})
    orders = "least important first", "in the order of the layers", "most important first"
    lost: dict[str, dict[int, float]] = {order: {} for order in orders}
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
            f"relative loss increase without the {few} least important of {len(every)} heads",
            lost["least important first"][few],
            0.05,
        ),
        at_most(f"without the {few} most important", lost["most important first"][few], 0.05).beyond(),
        at_most("without all", _lost(losses_without(model, every), model.losses), 0.05).beyond(),
        Curve.of("Heads removed from the trained model", "heads removed", "relative loss increase", lost),
    ]


def _by_harm(harm: dict[Head, Tensor], part: slice) -> list[Head]:
    """Heads in ascending order of the increase of the loss without them, on a part of the passage."""
    return sorted(harm, key=lambda head: float(harm[head][part].mean()))


def _lost(without: Tensor, whole: Tensor) -> float:
    return float(without.mean() / whole.mean()) - 1.0


def _apart_in_training(noise: float) -> list[float]:
    """Relative distance between two heads that start `noise` apart, before each step and at the end."""
    teacher = layer("multi_head", 8, 2, head_dim=6, seed=1)
    student = layer("multi_head", 8, 2, head_dim=6, seed=2)
    with torch.no_grad():
        for i, w in enumerate(student.per_head_weights().values()):
            w[1] = w[0] + noise * normal(*w[0].shape, seed=10 + i)
    x = 2.0 * normal(16, 9, 8, seed=3)
    target = teacher(x).detach()
    steps = adam(student.parameters(), lambda: (student(x) - target).square().mean(), 300, 1e-2)
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
