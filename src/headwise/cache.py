"""Keys and values kept from earlier steps, so that decoding computes only what is new."""

from typing import Protocol

import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError


class Cache(Protocol):
    """What a module asks of a cache: one object a layer, given as `cache=` at every step."""

    @property
    def seen(self) -> int:
        """Tokens taken in so far: the position of the next one."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take in new keys and values [b, h_kv, n, d]; return all that the new queries may look at."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are in use."""


class KVCache:
    """Keeps every key and value. Room grows by doubling, so a step copies O(1) tokens on average."""

    def __init__(self) -> None:
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self.seen = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns all keys and values so far, [b, h_kv, seen, d]."""
        _check(k, v, self._k)
        end = self.seen + k.shape[2]
        self._k, self._v = self._room(self._k, k, end), self._room(self._v, v, end)
        self._k[:, :, self.seen : end], self._v[:, :, self.seen : end] = k.detach(), v.detach()
        self.seen = end
        return self._k[:, :, :end], self._v[:, :, :end]

    @property
    def nbytes(self) -> int:
        """2 · batch · num_kv_heads · tokens · head_dim · bytes an element (if values are as wide as keys)."""
        if self._k is None or self._v is None:
            return 0
        return sum(x[:, :, : self.seen].numel() * x.element_size() for x in (self._k, self._v))

    def _room(self, old: Tensor | None, new: Tensor, end: int) -> Tensor:
        if old is not None and old.shape[2] >= end:
            return old
        b, h, _, d = new.shape
        room = new.new_empty(b, h, max(end, 64, 2 * self.seen), d)
        if old is not None:
            room[:, :, : self.seen] = old[:, :, : self.seen]
        return room


class SlidingCache:
    """Keeps the last `window` tokens, and the first `sinks` (StreamingLLM, Xiao et al. 2023, 2309.17453).

    Equals a full pass with `Causal() & (Window(window) | Sinks(sinks))` when the module is given that mask at
    every step: memory is O(window), whatever the length.
    """

    def __init__(self, window: int, sinks: int = 0) -> None:
        if window < 1 or sinks < 0:
            raise ConfigError(f"SlidingCache(window={window}, sinks={sinks}): expected window >= 1 and sinks >= 0")
        self.window, self.sinks = window, sinks
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self.seen = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the new queries may look at: sinks, the last window − 1 tokens before them, and them."""
        _check(k, v, self._k)
        k, v = k.detach(), v.detach()
        if self._k is not None and self._v is not None:
            k, v = torch.cat((self._k, k), 2), torch.cat((self._v, v), 2)
        self.seen += k.shape[2] - (0 if self._k is None else self._k.shape[2])
        self._k, self._v = self._kept(k), self._kept(v)
        return k, v

    @property
    def nbytes(self) -> int:
        """Bytes held: those of at most sinks + window − 1 tokens (the next token is its own last key)."""
        return sum(x.numel() * x.element_size() for x in (self._k, self._v) if x is not None)

    def _kept(self, x: Tensor) -> Tensor:
        if x.shape[2] <= self.sinks + self.window - 1:
            return x
        recent = x[:, :, max(self.sinks, x.shape[2] - self.window + 1) :]
        return torch.cat((x[:, :, : self.sinks], recent), 2)


def _check(k: Tensor, v: Tensor, held: Tensor | None) -> None:
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(f"cache: k {tuple(k.shape)} and v {tuple(v.shape)} differ in batch, heads or tokens")
    if held is not None and (k.shape[:2] != held.shape[:2] or k.shape[3] != held.shape[3]):
        raise ShapeError(
            f"cache: new keys {tuple(k.shape)} do not fit those held {tuple(held.shape)}; use a new cache for each "
            f"layer and each batch"
        )
