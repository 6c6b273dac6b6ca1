"""The size of an attention call: numbers of queries and keys, the mask, and the dtypes.

>>> allowed_pairs(4, 4), allowed_pairs(1, 4), allowed_pairs(4, 4, window=2), chunked_pairs(4, 4, 3), near_pairs(4, 2)
(10, 4, 7, 7, 10)
"""

from dataclasses import dataclass

from headwise.errors import ConfigError, check_choice

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_BYTES = {**BYTES, "int8": 1}


@dataclass(frozen=True)
class Work:
    """b sequences of n queries, aligned to the end of m keys.

    batch: b. queries: n. keys: m.
    causal: queries do not attend to later keys. window: queries attend to keys at a distance below it, to both sides if
        not causal. sinks: first keys that all queries attend to in addition to the window. chunked: the keys are
        divided into chunks of `window` instead, and queries attend to keys of their own chunk. Sinks and chunks require
        causal and a window.
    projected: keys that are computed in this call, while the others come from a cache; n if None.
    cross: the projected keys come from another sequence than the queries.
    materialised: whether all n×m scores are written to memory, regardless of the mask.
    dtype: of weights and activations. cache: of cached keys and values, the same by default; int8 has a float32
        scale per vector.
    """

    batch: int
    queries: int
    keys: int
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    chunked: bool = False
    projected: int | None = None
    cross: bool = False
    materialised: bool = False
    dtype: str = "bfloat16"
    cache: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "queries", "keys"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: expected at least 1", f"{name}={getattr(self, name)}：应不小于 1"
                )
        if self.causal and self.queries > self.keys:
            raise ConfigError(
                f"queries={self.queries}, keys={self.keys}: causal attention requires queries <= keys, as "
                f"queries are aligned to the end of the keys"
            )
        both_sides = self.window is not None and not self.causal
        if both_sides and self.queries != self.keys:
            raise ConfigError(
                f"window={self.window}, queries={self.queries}, keys={self.keys}: a window that is not causal requires "
                f"queries = keys"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window}: expected at least 1", f"window={self.window}：应不小于 1")
        windowed = self.causal and self.window is not None
        if self.sinks < 0 or (self.sinks and not windowed):
            raise ConfigError(
                f"sinks={self.sinks}: expected at least 0, and causal attention with a window",
                f"sinks={self.sinks}：应不小于 0，并且使用带窗口的因果注意力",
            )
        if self.chunked and (not windowed or self.sinks):
            raise ConfigError("chunked=True: expected causal attention with a window, and no sinks")
        for name, value, known in (("dtype", self.dtype, BYTES), ("cache", self.cache, CACHE_BYTES)):
            if value is not None:
                check_choice(name, value, known)

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one sequence and head that are computed: those allowed by the mask, or all n·m."""
        n, m, window = self.queries, self.keys, self.window
        if self.materialised or (window is None and not self.causal):
            return n * m
        if window is not None and self.chunked:
            return chunked_pairs(n, m, window)
        return allowed_pairs(n, m, window, self.sinks) if self.causal else near_pairs(n, window or n)

    @property
    def new_keys(self) -> int:
        """Keys of one sequence that are computed in this call."""
        return self.queries if self.projected is None else self.projected

    @property
    def seen_keys(self) -> int:
        """Keys of one sequence that any query may attend to."""
        if self.window is None or not self.causal:
            return self.keys
        reach = self.window - 1
        if self.chunked:  # of the first query
            reach = (self.keys - self.queries) % self.window
        return min(self.keys, reach + self.queries + self.sinks)

    @property
    def size(self) -> int:
        """Bytes per weight or activation."""
        return BYTES[self.dtype]


def allowed_pairs(queries: int, keys: int, window: int | None = None, sinks: int = 0) -> int:
    """Pairs under a causal mask: the sum of min(t, window + sinks) over the positions t of the queries, the last
    n of 1 … m; `Causal() & (Window(window) | Sinks(sinks))` as masks.

    Args:
        queries: n. keys: m. window: keys that a query sees; None for all. sinks: first keys beside the window.
    Returns:
        The number of pairs.
    """
    most = keys if window is None else min(keys, window + sinks)
    return _triangle(keys, most) - _triangle(keys - queries, most)


def chunked_pairs(queries: int, keys: int, chunk: int) -> int:
    """Pairs under a causal mask within chunks: the sum of (t − 1) mod chunk + 1 over the positions of the queries."""
    return _triangles(keys, chunk) - _triangles(keys - queries, chunk)


def near_pairs(tokens: int, window: int) -> int:
    """Pairs of n tokens at a distance below the window, to both sides."""
    return 2 * allowed_pairs(tokens, tokens, window) - tokens


def _triangle(positions: int, most: int) -> int:
    """Σ min(t, most) for t = 1 … positions."""
    small = min(positions, most)
    return small * (small + 1) // 2 + (positions - small) * most


def _triangles(positions: int, chunk: int) -> int:
    """Σ ((t − 1) mod chunk + 1) for t = 1 … positions."""
    whole, rest = divmod(positions, chunk)
    return whole * _triangle(chunk, chunk) + _triangle(rest, chunk)


def kept_tokens(tokens: int, window: int | None = None, sinks: int = 0) -> int:
    """Tokens in a cache after `tokens` tokens: all, or sinks + window − 1, since the next token adds its own key.

    Args:
        tokens: seen so far. window: keys that a query sees; None for all. sinks: first keys beside the window.
    Returns:
        The number of tokens.
    """
    return tokens if window is None else min(tokens, sinks + window - 1)
