"""A common small demonstration: attention trained to reconstruct its own embeddings."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.masks import Dense, Mask
from headwise.reports.curves import Curve
from headwise.seeds import seeded
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, Verdict, at_least, at_most
from headwise.textbook.claims.model import PASSAGE
from headwise.textbook.claims.samples import adam, standard
from headwise.textbook.reconstruct import DROPOUT, EMBEDDING, EPOCHS, HEADS, RATE, reconstruct

SENTENCES = [part for part in PASSAGE.replace("？", "。").replace("！", "。").split("。") if len(part) > 4][:6]


@claim(
    "Four heads trained to rebuild the 32-number embeddings of a text learn: the loss falls, and the heat maps show "
    "what they have found.",
    formula="L = ‖MultiHead(E) − E‖² / (b·n·d)",
    source="tutorial with Water Margin: 200 epochs of Adam at 1e-3, dropout 0.1, mean squared error",
    expected=Verdict.MISLEADING,
    slow=True,
)
def demo_learns_attention() -> list[Check | Curve]:
    """It trains as described. But padding is not masked and receives weight, the target changes with the embedding,
    and the loss is lower if each character attends only to itself: the maps show what hinders the reconstruction, not
    what has been found.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sentences.txt"
        file.write_text("\n".join(SENTENCES), encoding="utf-8")
        report = reconstruct(file)
    first, last = (float(x) for x in dict(report.facts)["loss, faithful (layer 0)"].split(" → "))
    padding = report.statistics.dense("padding_mass").numpy()
    losses, moved = _trained(None)
    to_itself, _ = _trained(Dense(torch.eye(_width(), dtype=torch.bool)))
    left, alone = losses[-1] / losses[0], to_itself[-1] / to_itself[0]
    epochs = (*range(0, EPOCHS, 10), EPOCHS - 1)
    lines = {
        "as described": {at + 1: losses[at] for at in epochs},
        "each character attends only to itself": {at + 1: to_itself[at] for at in epochs},
    }
    return [
        at_most("remaining share of the loss", last / first, 0.5),
        at_most("weight of characters on padding", float(padding[0].mean()), 0.01).suggested(),
        at_most("relative change of the target", moved, 0.01).suggested(),
        at_least("loss if each character attends only to itself, relative to that", alone / left, 1.0).suggested(),
        at_most("weight on padding if it is masked", float(padding[1].max()), 0.0).control(),
        at_most("remaining share of the loss, trained here", left, 0.5).control(),
        Curve.of("Loss of the demonstration", "epoch", "mean squared error", lines),
    ]


def _width() -> int:
    return max(map(len, SENTENCES))


def _trained(mask: Mask | None) -> tuple[list[float], float]:
    """Train under a mask: the loss of each epoch, and the relative change of the characters' embeddings."""
    symbols = sorted(set("".join(SENTENCES)))
    ids = torch.zeros(len(SENTENCES), _width(), dtype=torch.long)  # 0 is padding
    for row, sentence in zip(ids, SENTENCES, strict=True):
        row[: len(sentence)] = torch.tensor([symbols.index(c) + 1 for c in sentence])
    with seeded(0):
        embedding = nn.Embedding(len(symbols) + 1, EMBEDDING)
        attention = standard(EMBEDDING, HEADS, bias=True, dropout=DROPOUT)
        start = embedding.weight.detach().clone()

        def loss() -> Tensor:
            x = embedding(ids)
            return (attention(x, mask=mask) - x).square().mean()

        losses = list(adam([*embedding.parameters(), *attention.parameters()], loss, EPOCHS, RATE))
    moved = (embedding.weight.detach() - start)[1:].norm() / start[1:].norm()
    return losses, float(moved)
