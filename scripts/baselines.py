"""Unigram and bigram models of texts: a decoder that is no better than the bigram model has learned nothing that
requires attention."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from headwise.errors import ConfigError


class Unigram:
    """p(w) = (c(w) + T / V) / (N + T) for N tokens of T kinds, V in the vocabulary (Witten & Bell 1991)."""

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
    """p(w | u) = (c(u, w) + T(u) p(w)) / (c(u) + T(u)) with the unigram p(w) and T(u) kinds seen after u, inside a
    stream: interpolated Witten–Bell (Witten & Bell 1991; Chen & Goodman 1999, §2.5)."""

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
        counts = np.zeros(token.shape, np.int64)
        if len(self._codes):
            codes = before * self.vocab_size + token
            at = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
            counts = np.where(self._codes[at] == codes, self._counts[at], 0)
        # For a token that was never followed by another one, use the unigram alone.
        mixed = (counts + self._kinds[before] * single) / np.maximum(total, 1)
        return np.where(total > 0, mixed, single)


def baseline_losses(train: Sequence[Tensor], windows: Sequence[Tensor], vocab_size: int) -> dict[str, list[float]]:
    """Held-out loss of "unigram" and "bigram" in nats per token, one number for each tensor [w, context + 1] of
    windows; as in `train.heldout_loss`, the first token of each window is not predicted."""
    bigram = Bigram(train, vocab_size)
    models: dict[str, Unigram | Bigram] = {"unigram": bigram.unigram, "bigram": bigram}
    ids = [_array(each, vocab_size) for each in windows]
    return {
        name: [float(-np.log(model.probability(x[:, :-1], x[:, 1:])).mean()) for x in ids]
        for name, model in models.items()
    }


def _array(ids: Tensor, vocab_size: int) -> np.ndarray:
    array = ids.numpy()
    if array.size and not 0 <= array.min() <= array.max() < vocab_size:
        raise ConfigError(f"tokens {array.min()} to {array.max()} do not fit vocab_size={vocab_size}")
    return array
