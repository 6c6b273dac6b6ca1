"""The full KV cache."""

from collections.abc import Sequence

from torch import Tensor

from headwise.cache.base import Kind, StoredCache, described
from headwise.cache.rows import Encoded, Rows, added, encoded
from headwise.cache.storage import storages
from headwise.errors import ShapeError, check_whole
from headwise.kernels.quantized import Vectors, decoded
from headwise.masks import Span
from headwise.masks.grid import NO_GAP


class KVCache(StoredCache):
    """Keeps all keys and values. Capacity doubles as needed, so a step copies O(1) tokens on average.

    However tokens are split into calls, every query attends to the stored keys and values, so prefill and decoding
    return the same as one call for all tokens.

    Args:
        stored: None keeps the dtype of the keys; or "float32", "bfloat16", "float16" or "int8". Half precision is
            converted back in each call, which saves memory and costs time. int8 is read directly where the compiled
            kernel decodes (on a CPU, without gradients), which saves both; elsewhere it is dequantized. It has one
            float32 scale per vector: an element x changes by at most s = max|x| / 254, a logit by at most
            scale·‖q‖₁·s_k =: ε, and an output by at most (e^(2ε) − 1)·max|v| + s_v. This holds in float32 and where
            int8 is read directly; dequantizing to half precision rounds once more, in bfloat16 by up to |x| / 256.
        key_parts: with "int8", widths of the parts of a key with a scale each, such as (latent_dim, rope_dim) of
            `LatentAttention`.
        capacity: number of tokens to allocate at once; more raise ShapeError.
    """

    only_appends = True

    def __init__(
        self, *, stored: str | None = None, key_parts: Sequence[int] | None = None, capacity: int | None = None
    ) -> None:
        super().__init__()
        self.capacity = None if capacity is None else check_whole("KVCache", "capacity", capacity, 1)
        k, v = storages(stored, key_parts)
        self._k, self._v = Rows(k, capacity=capacity), Rows(v, capacity=capacity)

    def limits(self, n: int, num_heads: int) -> None:
        """Return None: every query may attend to all cached keys."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append and return all keys and values so far, [b, h_kv, seen, d]."""
        found_k, found_v = self.take(k, v)
        return decoded(found_k), decoded(found_v)

    def take(self, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
        """As `append`, but quantized keys and values stay quantized, as `attend` supports them."""
        kind, n = self._kind_of(k, v), k.shape[2]
        if self.capacity is not None and self.seen + n > self.capacity:
            raise ShapeError(
                f"KVCache(capacity={self.capacity}): holds {self.seen} tokens, and {n} more do not fit; give a larger "
                f"capacity, or SlidingCache"
            )
        return self.put(kind, *self.encoded(k, v))

    def put(self, kind: Kind, k: Encoded, v: Encoded) -> tuple[Vectors, Vectors]:
        """`take`, of keys and values as they are stored."""
        found = added(self._k, self._v, k, v)
        self._kind, self._seen = kind, self.seen + k.parts[0].shape[2]
        return found

    def encoded(self, k: Tensor, v: Tensor) -> tuple[Encoded, Encoded]:
        """Keys and values as they are stored; nothing is changed."""
        return encoded(self._k, self._v, k, v)

    def __repr__(self) -> str:
        return described(self, capacity=self.capacity)

    @property
    def gap(self) -> Span:
        """Empty: all tokens are held."""
        return NO_GAP

    @property
    def nbytes(self) -> int:
        """2 · batch · num_kv_heads · tokens · head_dim · bytes per element (if values are as wide as keys), and with
        int8 4 bytes more per vector: the formula of `headwise plan`."""
        return self._k.nbytes + self._v.nbytes

    def _crop(self, length: int) -> None:
        for rows in (self._k, self._v):
            rows.crop(length)

    def _select(self, indices: Tensor) -> None:
        for rows in (self._k, self._v):
            rows.select(indices)
