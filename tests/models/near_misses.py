"""Modules that come close to softmax attention and are none, or change its weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import D, E, H, N, Way, lower


class LinearAttention(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return self.merge(q @ (k.mT @ v) / (q @ k.sum(-2)[..., None]))


class CausalLinearAttention(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT * lower(N)) @ v)


class EfficientAttention(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge(q.softmax(-1) @ (k.softmax(-2).mT @ v))


class SigmoidAttention(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge(torch.sigmoid(q @ k.mT / 2 - math.log(N)) @ v)


class SquaredReluAttention(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge(F.relu(q @ k.mT / N).square() @ v)


class OverQueries(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT / 2).softmax(-2) @ v)


class OverHeads(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT / 2).softmax(1) @ v)


class SlotAttention(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.mT / 2).softmax(-2) + 1e-8
        return self.merge(weights / weights.sum(-1, keepdim=True) @ v)


class TiedClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, E)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ self.embedding.weight.T, -1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(E, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).softmax(-1)


class Mixture(nn.Module):
    """Experts that see every token, weighted by a router."""

    def __init__(self, learned: bool = False) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(E, 7))
        self.experts = nn.Parameter(torch.randn(7, E, E))

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.softmax(x @ self.router, -1)
        return torch.einsum("bne,bneo->bno", gates, torch.einsum("bnd,edo->bneo", x, self.experts))


class Memory(nn.Module):
    """Learned keys and values: a layer with softmax as its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Parameter(torch.randn(7, E)), nn.Parameter(torch.randn(7, E))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ self.keys.T, -1) @ self.values


class Similarity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(x, dim=-1)
        return x @ x.mT


class Gating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(-1) * self.up(x)


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(E, D), nn.Linear(E, D)

    def forward(self, x: Tensor) -> Tensor:
        logits = 3 * F.normalize(self.text(x[:, 0])) @ F.normalize(self.image(x[:, 1])).T
        return F.softmax(logits, -1).diagonal().log().mean()


class MixedHeads(Way):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.mT / 2).softmax(-1)
        return self.merge(torch.einsum("bhnm,hg->bgnm", weights, self.mix) @ v)


class MaskedWeights(Way):
    """A causal mask on the weights, which are not normalised again."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge(((q @ k.mT / 2).softmax(-1) * lower(N)) @ v)


class NormalizedWeights(Way):
    """The weights of two heads' sum, normalised."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.mT / 2).softmax(-1).square()
        return self.merge(weights / weights.sum(-1, keepdim=True) @ v)


class LargestWeights(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.mT / 2).softmax(-1)
        top, index = weights.topk(2, -1)
        return self.merge(torch.zeros_like(weights).scatter(-1, index, top) @ v)


class AddedOne(Way):
    """exp / (1 + Σ exp), after the largest score is subtracted: no learned sink."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT / 2
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        return self.merge(e / (1 + e.sum(-1, keepdim=True)) @ v)


class KeptColumn(Way):
    """A column of zeros is appended, and one more value takes its weight."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.cat((q @ k.mT / 2, torch.zeros(*q.shape[:3], 1, dtype=x.dtype)), -1)
        return self.merge(scores.softmax(-1) @ torch.cat((v, v[:, :, :1]), 2))


class AdditiveAttention(Way):
    """Scores of a small network instead of a product."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)).sum(-1)
        return self.merge(scores.softmax(-1) @ v)


class ClampedScores(Way):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT).clamp(-0.1, 0.1).softmax(-1) @ v)


class WeakMask(Way):
    """Masked scores are set to −3, which lets some weight through."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT / 2).masked_fill(~lower(N), -3.0).softmax(-1) @ v)


class ExpertsOfTheBatch(Way):
    """A value of each query and key, weighted by a softmax of products."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_proj(x), self.k_proj(x)
        values = self.v_proj(x)[:, :, None] * x[:, None]
        return torch.einsum("bnm,bnme->bne", torch.softmax(q @ k.mT, -1), values)


class BiasInsideCap(Way):
    """A bias of each key, inside a soft cap."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(E, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT * D**-0.5 + self.bias(x).transpose(1, 2)[:, :, None]
        return self.merge((5 * torch.tanh(scores / 5)).softmax(-1) @ v)
