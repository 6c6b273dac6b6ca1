"""Copying from context needs two layers: train attention-only models on repeated random tokens and analyze their heads.

    python scripts/induction_study.py --seeds 5

A sequence repeats distinct random tokens with a random period. Two layers learn to copy: a head in the first attends to
the previous token, and one in the second to the token that followed an earlier occurrence of the current token (Elhage
et al. 2021; Olsson et al. 2022, 2209.11895). A single layer cannot combine the two. Prints, for each seed, the loss in
the first and in the second copy, the heads found from their attention alone, and the loss in the second copy with the
heads of each kind, and with all other heads, ablated.
"""

import argparse
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.analysis.checks import head_name
from headwise.analysis.importance.ablation import losses_without
from headwise.analysis.importance.losses import Head
from headwise.map import AttentionMap
from headwise.masks import Causal
from headwise.nn.multi_head import MultiHeadAttention
from headwise.stats import InductionMass

VOCAB, LONGEST, SHORTEST = 64, 32, 8
FOUND = 0.3  # the least mean weight on the key in question for a head of that kind


class AttentionOnly(nn.Module):
    """Embedding, attention layers with residual connections and norms, logits; no feed-forward networks."""

    def __init__(self, layers: int, d_model: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, d_model)
        self.norms = nn.ModuleList(nn.RMSNorm(d_model) for _ in range(layers))
        self.layers = nn.ModuleList(MultiHeadAttention(d_model, heads, rotary=True) for _ in range(layers))
        self.norm = nn.RMSNorm(d_model)
        self.logits = nn.Linear(d_model, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [b, n, vocab] of the next token."""
        return self.run(ids)[0]

    def run(self, ids: Tensor, maps: bool = False) -> tuple[Tensor, list[AttentionMap]]:
        """The logits, and the layers' maps if requested."""
        x, found = self.embedding(ids), []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = layer(norm(x), mask=Causal(), return_map=maps)
            if maps:
                y, amap = y
                found.append(amap)
            x = x + y
        return self.logits(self.norm(x)), found


def sequences(count: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Repeating tokens [count, 2·longest], and the period of each sequence [count, 1]."""
    tokens = torch.rand(count, VOCAB, generator=generator).argsort(1)
    period = torch.randint(shortest, longest + 1, (count, 1), generator=generator)
    return tokens.gather(1, torch.arange(2 * longest) % period), period


def trained(layers: int, seed: int, steps: int) -> AttentionOnly:
    """Return a model trained on `steps` batches of 32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AttentionOnly(layers)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50)
        ids, _ = sequences(32, SHORTEST, LONGEST, generator)
        loss = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def first_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Nats per token in the first of two copies, without its first token, which is not predicted."""
    half = ids.shape[1] // 2
    return F.cross_entropy(model(ids[:, : half - 1]).mT, ids[:, 1:half])


def second_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Nats per token in the second copy, from its second token on."""
    half = ids.shape[1] // 2
    return F.cross_entropy(model(ids[:, :-1])[:, half:].mT, ids[:, half + 1 :])


@dataclass(frozen=True)
class Study:
    """One model: losses, heads by their attention [layers, heads], and losses of the second copy with heads ablated."""

    layers: int
    seed: int
    first: float
    second: float
    previous_mass: Tensor
    induction_mass: Tensor
    previous: list[Head]
    induction: list[Head]
    without_previous: float
    without_induction: float
    without_others: float
    seconds: float


def study(layers: int, seed: int, steps: int) -> Study:
    """Train a model, find heads from their attention, and ablate them."""
    begun = time.perf_counter()
    model = trained(layers, seed, steps)
    seconds = time.perf_counter() - begun
    generator = torch.Generator().manual_seed(1_000_000 + seed)
    batches = [sequences(16, LONGEST, LONGEST, generator)[0] for _ in range(4)]  # two copies, not seen in training
    with torch.no_grad():
        ids = torch.cat(batches)
        _, maps = model.run(ids, maps=True)
        measured = [amap.measure("previous_mass", InductionMass(ids)) for amap in maps]
        previous, induction = (
            torch.stack([t[name].mean(0) for t in measured]) for name in ("previous_mass", "induction_mass")
        )
        first = sum(float(first_loss(model, b)) for b in batches) / len(batches)
    # Copying composes heads across layers: previous-token heads in any layer but the last, induction heads above.
    early = [(i, h) for i, h in _above(previous) if i < layers - 1]
    late = [(i, h) for i, h in _above(induction) if i > 0]
    others = [(i, h) for i in range(layers) for h in range(previous.shape[1]) if (i, h) not in early + late]

    def without(heads: list[Head]) -> float:
        return float(losses_without(model, batches, second_loss, heads).mean())

    return Study(
        layers, seed, first, without([]), previous, induction, early, late, without(early), without(late),
        without(others), seconds,
    )  # fmt: skip


def _above(mass: Tensor) -> list[Head]:
    return [(int(i), int(h)) for i, h in (mass >= FOUND).nonzero()]


def _heads(heads: list[Head], mass: Tensor) -> str:
    named = " ".join(f"{head_name(*head)} {float(mass[head]):.2f}" for head in heads)
    return named or f"none (most {float(mass.max()):.2f})"


def row(one: Study) -> str:
    """Format a study as a row of the table."""
    numbers = (one.first, one.second, one.without_previous, one.without_induction, one.without_others)
    cells = [str(one.layers), str(one.seed), *(f"{x:.3f}" for x in numbers), f"{one.seconds:.0f} s"]
    heads = [_heads(one.previous, one.previous_mass), _heads(one.induction, one.induction_mass)]
    return "| " + " | ".join([*cells, *heads]) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    print(f"Loss by chance: {math.log(VOCAB):.3f} nats per token. Losses without heads are those of the second copy.\n")
    print(
        "| layers | seed | first copy | second copy | without previous-token heads | without induction heads | "
        "without all others | training | previous token | induction |\n" + "| ---: " * 8 + "| --- | --- |"
    )
    for layers in (2, 1):
        for seed in range(args.seeds):
            print(row(study(layers, seed, args.steps)), flush=True)


if __name__ == "__main__":
    main()
