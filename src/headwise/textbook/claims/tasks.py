"""What heads can be trained to do: with too few heads, with heads that are too small, and with enough heads."""

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.reports.curves import Curve
from headwise.seeds import seeded
from headwise.textbook.claims.claim import claim
from headwise.textbook.claims.evidence import Check, Verdict, at_least, at_most
from headwise.textbook.claims.samples import adam, normal, standard

STEPS = 300


@claim(
    "A head with d_k < n cannot learn to look where it should.",
    formula="min over W^Q, W^K of ‖softmax(Q Kᵀ / √d_k) X − X_π‖² / ‖X‖²",
    source="§5.3, why not more heads; Bhojanapalli et al. 2020, 2002.07028 (low-rank bottleneck)",
    expected=Verdict.CONDITIONS,
)
def low_rank_bottleneck() -> list[Check | Curve]:
    """A head is trained to copy one of 12 tokens to each position, from the positions alone. With d_k = 1 all scores
    of a row increase or decrease along one line, so only two keys can have the largest. But a few dimensions are
    sufficient for sharp patterns; an arbitrary matrix P is not required.
    """
    missed = {d: _copying_missed(d) for d in (1, 2, 3, 4, 12)}
    return [
        at_least("d_k = 1: share of the target missed", missed[1], 0.5),
        at_least("d_k = 4, still below n = 12", missed[4], 0.5).beyond(),
        at_most("d_k = 12", missed[12], 0.05).control(),
        Curve.of("A head trained to copy one of 12 tokens", "d_k", "share of the target missed", {
            "after 400 steps": missed}, log="y"),
    ]  # fmt: skip


@claim(
    "In one and the same layer of d_model = h·d_k, more heads learn what fewer cannot.",
    formula="min ‖MultiHead(X) − Y‖² / ‖Y‖² over h, 4·d_model² parameters each",
    source="ch. 11, single head against multi-head, why not more heads; Bhojanapalli et al. 2020, 2002.07028",
    expected=Verdict.CONDITIONS,
)
def more_heads_learn_more() -> list[Check | Curve]:
    """Layers of d_model = 32 are trained on y_i = x_π(i) − x_σ(i), with new x at each step: each of 16 tokens must
    attend to two positions. One head misses half of the target, two heads find all of it, and 32 heads with d_k = 1
    miss it again.
    """
    missed = {h: _trained_missed(h) for h in (1, 2, 4, 8, 16, 32)}
    steps = (*range(0, STEPS, 25), STEPS)
    ends = {h: way[-1] for h, way in missed.items()}
    ways = {f"h = {h}, d_k = {32 // h}": {t: missed[h][t] for t in steps} for h in (1, 2, 4, 32)}
    return [
        at_least("h = 1, d_k = 32: share missed", ends[1], 0.4),
        at_most("h = 2, d_k = 16", ends[2], 0.03),
        at_most("h = 4, d_k = 8", ends[4], 0.03),
        at_most("h = 32, d_k = 1", ends[32], 0.03).beyond(),
        Curve.of("Trained on y_i = x_π(i) − x_σ(i), d_model = 32", "heads h", "share of the target missed", {
            f"after {STEPS} steps": ends}, log="xy"),
        Curve.of("The same in training", "step", "share of the target missed", ways, log="y"),
    ]  # fmt: skip


def _trained_missed(h: int) -> list[float]:
    """The share of y_i = x_π(i) − x_σ(i) that a layer of h heads misses: at each step on new sequences, and finally on
    256 others.

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
        return _share(y, x[:, first] - x[:, second])

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
