"""What heads can be trained to do: with too few heads, with heads that are too small, and with enough heads."""

import torch
from torch import Tensor, nn

from headwise import attend
from headwise.wording import Bilingual
from headwise_textbook.claims.claim import claim
from headwise_textbook.claims.evidence import Check, at_least, at_most
from headwise_textbook.claims.samples import adam, normal, standard
from headwise_textbook.curves import Curve
from headwise_textbook.seeds import seeded

STEPS = 300
MISSED = Bilingual("share of the target missed", "目标中未学到的比例")


@claim
def low_rank_bottleneck() -> list[Check | Curve]:
    missed = {d: _copying_missed(d) for d in (1, 2, 3, 4, 12)}
    return [
        at_least(("d_k = 1: share of the target missed", "d_k = 1：目标中未学到的比例"), missed[1], 0.5),
        at_least(("d_k = 4, still below n = 12", "d_k = 4，仍小于 n = 12"), missed[4], 0.5).beyond(),
        at_most("d_k = 12", missed[12], 0.05).control(missed[1]),
        Curve.of(Bilingual("A head trained to copy one of 12 tokens", "训练一个头复制 12 个词元之一"), "d_k", MISSED, {
            Bilingual("after 400 steps", "400 步之后"): missed}, log="y"),
    ]  # fmt: skip


@claim
def more_heads_learn_more() -> list[Check | Curve]:
    missed = {h: _trained_missed(h) for h in (1, 2, 4, 8, 16, 32)}
    steps = (*range(0, STEPS, 25), STEPS)
    ends = {h: way[-1] for h, way in missed.items()}
    ways = {f"h = {h}, d_k = {32 // h}": {t: missed[h][t] for t in steps} for h in (1, 2, 4, 32)}
    title = Bilingual("Trained on y_i = x_π(i) − x_σ(i), d_model = 32", "以 y_i = x_π(i) − x_σ(i) 训练，d_model = 32")
    return [
        at_least(("h = 1, d_k = 32: share missed", "h = 1，d_k = 32：未学到的比例"), ends[1], 0.4),
        at_most("h = 2, d_k = 16", ends[2], 0.03),
        at_most("h = 4, d_k = 8", ends[4], 0.03),
        at_most("h = 32, d_k = 1", ends[32], 0.03).beyond(),
        at_most(("one head on y_i = x_π(i)",
                 "一个头，目标 y_i = x_π(i)"), _trained_missed(1, patterns=1)[-1], 0.03).control(ends[1]),
        Curve.of(title, Bilingual("heads h", "头数 h"), MISSED, {
            Bilingual(f"after {STEPS} steps", f"{STEPS} 步之后"): ends}, log="xy"),
        Curve.of(Bilingual("The same in training", "训练过程"), Bilingual("step", "步"), MISSED, ways, log="y"),
    ]  # fmt: skip


def _trained_missed(h: int, patterns: int = 2) -> list[float]:
    """The share of y_i = x_π(i) − x_σ(i), or of its first term, that a layer of h heads misses: at each step on new
    sequences, and finally on 256 others.

    Tokens are [x | position]: 8 random numbers, and a random vector of 24 numbers for each of 16 positions.
    """
    n, content, d_model = 16, 8, 32
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randperm(n, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    places = normal(n, d_model - content, seed=5).float()
    with seeded(0):
        module = standard(d_model, h)

    def missed(sequences: int = 16) -> Tensor:
        x = torch.randn(sequences, n, content, generator=draw)
        y = module(torch.cat((x, places.expand(sequences, -1, -1)), -1))[..., :content]
        return _share(y, x[:, first] - (x[:, second] if patterns == 2 else 0.0))

    losses = list(adam(module.parameters(), missed, STEPS, 1e-2, last=0.02))
    with torch.no_grad():
        return [*losses, missed(256).item()]


def _share(found: Tensor, target: Tensor) -> Tensor:
    """The share of the target's energy that is missed."""
    return (found - target).square().sum() / target.square().sum()


def _copying_missed(d: int) -> float:
    """The share of y_i = x_π(i) that a trained head of size d misses; positions are one-hot vectors."""
    n = 12
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    x = normal(16, 1, n, 5)
    weights = [nn.Parameter(normal(n, d, seed=s)) for s in (1, 2)]  # a one-hot position times W is a row of W

    def missed() -> Tensor:
        q, k = (w.expand(len(x), 1, n, d) for w in weights)
        return _share(attend(q, k, x), x[:, :, order])

    return [*adam(weights, missed, 400, 0.1)][-1]
