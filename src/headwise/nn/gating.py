"""The heads that a router selects for a token or a sequence, and their weights."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gates:
    """A router's selection among h heads, g selections in each of b sequences: g = n tokens, or 1 for the sequence.

    Attributes:
        weights: [b, g, h] factor of each head, 0 where it was not selected; differentiable.
        chosen: boolean [b, g, h], whether each head was selected.
        probabilities: [b, g, h_r] the router's softmax over the routed heads, which come last; float32 or wider.
    """

    weights: Tensor
    chosen: Tensor
    probabilities: Tensor

    @property
    def shared(self) -> int:
        """The number of heads that are always selected; they come first."""
        return self.chosen.shape[-1] - self.probabilities.shape[-1]

    def balance_loss(self) -> Tensor:
        """Return h_r / k · Σ_i f_i P_i, a differentiable scalar: 1 if the load of the routed heads is even.

        f_i is the share of selections with head i, P_i its mean probability (Fedus et al. 2021, 2101.03961,
        eq. 4, for k of h_r; Jin et al. 2024, 2410.11842, without the factor h_r / k). Add a small multiple of it,
        such as 0.01, to a training loss.
        """
        routed = self.chosen[..., self.shared :].to(self.probabilities.dtype)
        f, p = routed.mean((0, 1)), self.probabilities.mean((0, 1))
        return len(p) / f.sum() * (f * p).sum()

    def load(self) -> Tensor:
        """Return the share of selections with each head, [h]."""
        return self.chosen.float().mean((0, 1))

    def importance(self) -> Tensor:
        """Return the mean weight of each head, [h]; detached."""
        return self.weights.detach().float().mean((0, 1))

    def entropy(self) -> Tensor:
        """Return the mean entropy of the router's probabilities in nats, a scalar between 0 and ln h_r; detached."""
        return torch.special.entr(self.probabilities.detach()).sum(-1).mean()


def choose_heads(
    probabilities: Tensor, top_k: int, shared: int, *, top_p: float | None = None, threshold: float | None = None
) -> Tensor:
    """Return boolean [b, g, shared + h_r]: the shared heads and the top_k of probabilities [b, g, h_r].

    With `top_p`, only as many of these as it takes for their probabilities to sum to at least top_p; with `threshold`,
    only those with at least this probability. The most probable head is always selected.
    """
    found = probabilities.topk(top_k, -1)
    kept = torch.ones_like(found.values, dtype=torch.bool)
    if top_p is not None:
        kept &= found.values.cumsum(-1) - found.values < top_p
    if threshold is not None:
        kept &= found.values >= threshold
    kept[..., 0] = True
    routed = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(-1, found.indices, kept)
    return torch.cat((routed.new_ones(*routed.shape[:2], shared), routed), -1)
