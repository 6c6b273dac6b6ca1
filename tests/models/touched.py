"""Attention whose scores or weights the code reads or changes."""

import torch
from ways import N, Way, lower


class Change(Way):
    """Attention with one thing between its steps."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = self.scores(q @ k.mT / 2)
        return self.merge(self.used(scores.softmax(-1)) @ v)

    def scores(self, scores):
        return scores

    def used(self, weights):
        return weights


class DetachedWeights(Change):
    def used(self, weights):
        return weights.detach()


class ScoresWithoutGradients(Change):
    def scores(self, scores):
        with torch.no_grad():
            return scores * 2


class HookedWeights(Change):
    def used(self, weights):
        if weights.requires_grad:
            weights.register_hook(lambda grad: grad * 3)
        return weights


class KeptGradient(Change):
    def used(self, weights):
        if weights.requires_grad:
            weights.retain_grad()
        self.kept = weights
        return weights


class DroppedHeads(Change):
    def used(self, weights):
        torch.manual_seed(0)
        return torch.feature_dropout(weights, 0.5, True)


class WrittenWeights(Change):
    def used(self, weights):
        weights = weights.clone()
        weights[..., 0] = 0
        return weights


class WrittenView(Change):
    def scores(self, scores):
        scores.flatten(1)[:, :3] *= 2
        return scores


class Quantised(Change):
    def used(self, weights):
        return (weights * 255).round() / 255


class Sharpened(Change):
    def scores(self, scores):
        return scores + scores.detach().std()


class SumOfAll(Change):
    def scores(self, scores):
        return scores * (1 + scores.mean(-1, keepdim=True).sigmoid())


class LargestOfQueries(Change):
    def scores(self, scores):
        return scores - scores.amax(-2, keepdim=True)


class DependsOnWeights(Change):
    def used(self, weights):
        return weights if weights.max() < 2 else weights * 0


class NumPyWeights(Change):
    def used(self, weights):
        self.kept = weights.detach().numpy().copy()
        return weights


class MaskLikeScores(Change):
    """The mask is converted to the dtype of the scores, of which it reads no numbers."""

    def scores(self, scores):
        mask = torch.zeros(N, N).masked_fill(~lower(N), -torch.inf)
        return scores + mask.type_as(scores) + mask.to(scores)


class ReadLikeUnread(Change):
    """Scores that were read are converted to the dtype of others, of which nothing was read."""

    def scores(self, scores):
        half = 0.5 * scores
        scores.max().item()
        return half + 0.5 * scores.type_as(half)


class Penalised(Change):
    """A penalty of the weights' entropy is added to the output."""

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.mT / 2).softmax(-1)
        return self.merge(weights @ v) - 0.01 * (weights * weights.log()).sum()


class TwoValues(Change):
    """The same weights for two kinds of values."""

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.mT / 2).softmax(-1)
        return self.merge(weights @ v + weights @ v.square())


class ChangedMask(Change):
    """The mask is changed in place after it was added; `late` only after the model was attached."""

    late = False

    def forward(self, x):
        q, k, v = self.heads(x)
        mask = torch.zeros(N, N, dtype=x.dtype).masked_fill(~lower(N), -torch.inf)
        scores = q @ k.mT / 2 + mask
        if self.late:
            mask.zero_()
        return self.merge(scores.softmax(-1) @ v)


class ChangedKeys(Change):
    """The keys are changed in place after the product."""

    late = False

    def forward(self, x):
        q, k, v = self.heads(x)
        k = k.detach().clone()
        scores = q @ k.mT / 2
        if self.late:
            k.mul_(2)
            k[:, :, 0] = 3
        return self.merge(scores.detach().clone().softmax(-1) @ v + 0 * q)
