"""All keys and values."""

from collections.abc import Sequence

from torch import Tensor

from headwise.cache.base import Kind, kind_of, told
from headwise.cache.storage import Rows, storages
from headwise.errors import ShapeError, check_whole
from headwise.kernels.eight_bits import Vectors, decoded


class KVCache:
    """Keeps every key and value. Room grows by doubling, so a step copies O(1) tokens on average.

    Whatever way the tokens are cut into calls, every query sees the same keys and values: those that were stored. So
    prefill and decoding give what one call for all tokens gives.

    Args:
        stored: None, as they come, without a copy; or "float32", "bfloat16", "float16" or "int8". From the half
            precisions each call restores them, which saves memory and costs time. int8 is read as it lies where the
            compiled kernel decodes (on a CPU, without gradients), which saves both; elsewhere it is restored too. It
            has a float32 scale a vector: a number x of a vector changes by at most s = max|x| / 254, a logit so by at
            most scale·‖q‖₁·s_k =: ε, and an output by at most (e^(2ε) − 1)·max|v| + s_v. That is so in float32, and
            where it is read as it lies; what is restored in half precision is rounded once more, in bfloat16 by up to
            |x| / 256.
        key_parts: with "int8", widths of the parts of a key that get a scale each, such as (latent_dim, rope_dim) of
            `LatentAttention`.
        capacity: room for so many tokens is made at once, and more are refused.
    """

    def __init__(
        self, *, stored: str | None = None, key_parts: Sequence[int] | None = None, capacity: int | None = None
    ) -> None:
        self.capacity = None if capacity is None else check_whole("KVCache", "capacity", capacity, 1)
        k, v = storages(stored, key_parts)
        self._k, self._v = Rows(k, spare=True, capacity=capacity), Rows(v, spare=True, capacity=capacity)
        self._kind: Kind | None = None
        self.seen = 0

    def limits(self, n: int, num_heads: int) -> None:
        """Nothing: every query may see all keys before it."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns all keys and values so far, [b, h_kv, seen, d]."""
        found_k, found_v = self.take(k, v)
        return decoded(found_k), decoded(found_v)

    def take(self, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
        """The same as `attend` takes them: eight bits stay as they are."""
        kind, n = kind_of(k, v, self._kind), k.shape[2]
        if self.capacity is not None and self.seen + n > self.capacity:
            raise ShapeError(
                f"KVCache(capacity={self.capacity}): holds {self.seen} tokens, and {n} more do not fit; give a larger "
                f"capacity, or SlidingCache"
            )
        new_k, new_v = self._k.encoded(k), self._v.encoded(v)  # both, before anything changes
        self._k.add(new_k)
        self._v.add(new_v)
        self._kind, self.seen = kind, self.seen + n
        return self._k.stored(), self._v.stored()

    def __repr__(self) -> str:
        return told(self, capacity=self.capacity)

    @property
    def nbytes(self) -> int:
        """2 · batch · num_kv_heads · tokens · head_dim · bytes an element (if values are as wide as keys), and with
        int8 4 bytes more for each vector: `headwise plan`'s formula."""
        return self._k.nbytes + self._v.nbytes
