"""Unigram and bigram baselines on the tokens that the decoder is evaluated on.

A decoder that is no better than the bigram model has learned nothing that requires attention.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from headwise.errors import ConfigError


class Unigram:
    """p(w) = (c(w) + T / V) / (N + T): counts, mixed with the uniform distribution (Witten & Bell 1991).

    N tokens of T kinds were counted; V is the size of the vocabulary.
    """

    def __init__(self, streams: Sequence[Tensor], vocab_size: int) -> None:
        counts = np.zeros(vocab_size, np.int64)
        for stream in streams:
            counts += np.bincount(_array(stream, vocab_size), minlength=vocab_size)
        if not counts.any():
            raise ConfigError("streams: contain no tokens; give the training part of a corpus")
        kinds = np.count_nonzero(counts)
        self.probabilities = (counts + kinds / vocab_size) / (counts.sum() + kinds)  # [vocab], sums to 1

    def probability(self, before: np.ndarray, token: np.ndarray) -> np.ndarray:
        """p(token); `before` has no effect."""
        return self.probabilities[token]


class Bigram:
    """p(w | u) = (c(u, w) + T(u) p(w)) / (c(u) + T(u)), with the unigram p(w) and the number T(u) of kinds seen after
    u: interpolated Witten–Bell (Witten & Bell 1991; Chen & Goodman 1999, §2.5). Pairs are counted inside a stream."""

    def __init__(self, streams: Sequence[Tensor], vocab_size: int) -> None:
        self.vocab_size, self.unigram = vocab_size, Unigram(streams, vocab_size)
        arrays = [_array(stream, vocab_size) for stream in streams]
        codes = np.concatenate([x[:-1] * vocab_size + x[1:] for x in arrays])
        self._codes, self._counts = np.unique(codes, return_counts=True)  # sorted: looked up by bisection
        first = self._codes // vocab_size
        self._after = np.bincount(first, weights=self._counts, minlength=vocab_size)  # c(u)
        self._kinds = np.bincount(first, minlength=vocab_size)  # T(u)

    def probability(self, before: np.ndarray, token: np.ndarray) -> np.ndarray:
        """p(token | before), for two arrays of one shape."""
        single = self.unigram.probabilities[token]
        total = self._after[before] + self._kinds[before]
        # For a token that was never followed by another one, use the unigram alone.
        mixed = (self._count(before, token) + self._kinds[before] * single) / np.maximum(total, 1)
        return np.where(total > 0, mixed, single)

    def _count(self, before: np.ndarray, token: np.ndarray) -> np.ndarray:
        if not len(self._codes):
            return np.zeros(token.shape, np.int64)
        codes = before * self.vocab_size + token
        at = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        return np.where(self._codes[at] == codes, self._counts[at], 0)


def baseline_losses(train: Sequence[Tensor], windows: Sequence[Tensor], vocab_size: int) -> dict[str, list[float]]:
    """Compute the held-out loss of both models in nats per token, one number for each tensor of windows.

    Args:
        train: token streams to count, such as `corpus.train`.
        windows: [w, context + 1] each, such as `corpus.heldout_windows(context)`. As in `train.heldout_loss`, every
            token except the first of each window is predicted.
    Returns:
        {"unigram": [...], "bigram": [...]}
    """
    bigram = Bigram(train, vocab_size)
    models: dict[str, Unigram | Bigram] = {"unigram": bigram.unigram, "bigram": bigram}
    return {name: [_loss(model, x, vocab_size) for x in windows] for name, model in models.items()}


def _loss(model: Unigram | Bigram, windows: Tensor, vocab_size: int) -> float:
    ids = _array(windows, vocab_size)
    return float(-np.log(model.probability(ids[:, :-1], ids[:, 1:])).mean())


def _array(ids: Tensor, vocab_size: int) -> np.ndarray:
    array = ids.numpy()
    if array.size and not 0 <= array.min() <= array.max() < vocab_size:
        raise ConfigError(f"tokens {array.min()} to {array.max()} do not fit vocab_size={vocab_size}")
    return array
