"""The size of an attention call: numbers of queries and keys, the mask, and the dtypes.

>>> allowed_pairs(4, 4), allowed_pairs(1, 4), allowed_pairs(4, 4, window=2)
(10, 4, 7)
"""

from dataclasses import dataclass

from headwise.errors import ConfigError, check_choice

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_BYTES = {**BYTES, "int8": 1}


@dataclass(frozen=True)
class Work:
    """b sequences of n queries, aligned to the end of m keys.

    causal: queries do not attend to later keys. window: number of keys per query, its own included, in addition to the
        `sinks` first keys; both require causal. projected: keys that are computed in this call, while the others come
        from a cache; n if None.
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
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ConfigError(
                f"window={self.window}: expected at least 1, and causal attention",
                f"window={self.window}：应不小于 1，并且使用因果注意力",
            )
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise ConfigError(
                f"sinks={self.sinks}: expected at least 0, and a window",
                f"sinks={self.sinks}：应不小于 0，并且给出窗口",
            )
        for name, value, known in (("dtype", self.dtype, BYTES), ("cache", self.cache, CACHE_BYTES)):
            if value is not None:
                check_choice(name, value, known)

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one sequence and head that are computed: those allowed by the mask, or all n·m."""
        n, m = self.queries, self.keys
        return n * m if self.materialised or not self.causal else allowed_pairs(n, m, self.window, self.sinks)

    @property
    def new_keys(self) -> int:
        """Keys of one sequence that are computed in this call."""
        return self.queries if self.projected is None else self.projected

    @property
    def seen_keys(self) -> int:
        """Keys of one sequence that any query may attend to."""
        return self.keys if self.window is None else min(self.keys, self.window + self.queries - 1 + self.sinks)

    @property
    def size(self) -> int:
        """Bytes per weight or activation."""
        return BYTES[self.dtype]


def allowed_pairs(queries: int, keys: int, window: int | None = None, sinks: int = 0) -> int:
    """Pairs under a causal mask: the sum of min(t, window + sinks) over the positions t of the queries, the last
    n of 1 … m; `Causal() & (Window(window) | Sinks(sinks))` as masks."""
    most = keys if window is None else min(keys, window + sinks)
    return _triangle(keys, most) - _triangle(keys - queries, most)


def _triangle(positions: int, most: int) -> int:
    """Σ min(t, most) for t = 1 … positions."""
    small = min(positions, most)
    return small * (small + 1) // 2 + (positions - small) * most


def kept_tokens(tokens: int, window: int | None = None, sinks: int = 0) -> int:
    """Tokens in a cache after `tokens` tokens: all, or sinks + window − 1, since the next token adds its own key."""
    return tokens if window is None else min(tokens, sinks + window - 1)
