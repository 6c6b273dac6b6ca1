"""What is measured: every case as data, with its goal and what limits it.

A new case is a line in `CASES`. Sizes are (b, h, n, d): batch, query heads, queries, head size.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

SIX = ("max_logit", "entropy", "sink_mass", "mean_distance", "previous_mass", "top1_mass")
ROWS = (
    "max_logit", "logsumexp", "entropy", "effective_keys", "top1_mass", "mean_distance", "distance_variance",
    "local_mass", "sink_mass", "previous_mass", "self_mass", "next_mass",
)  # fmt: skip
KEYS = (*ROWS, "received_mass")
LOSSES = ("entropy", "max_logit", "sink_mass", "previous_mass", "mean_distance")

REWRITES = ("sdpa_rows", "bmm", "bmm_keys_first")  # the same decoding step, as one would rewrite it in PyTorch


@dataclass(frozen=True)
class Goal:
    """A goal: the best kernel takes at most `ratio` times the time of a peer ("rewrite": the best of `REWRITES`)."""

    ratio: float
    of: str = "sdpa"

    def __str__(self) -> str:
        return f"≤ {self.ratio:g} × {self.of}"


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        size: (b, h, n, d) of the queries; kv_heads and keys: those of k and v, the queries' own if 0.
        mask: "full", "causal" or "window": causal, and only the last `window` keys.
        stored: "int8" for keys and values that are kept so: the kernels are given them as they are, peers restore them
            in the time that is taken, but for "plain", which has floats.
        statistics: what the kernels measure besides the output, and with `backward` have gradients of.
        pooled: also a pooled map of this size.
        teacher: the kernels compute, instead, the KL of each query from another map, and its gradients by q and k.
        peers: who takes part besides the kernels.
        goals: none if there is nothing yet to hold it to.
        timed: False where only the memory is of interest.
        patience: seconds; contestants that would take longer for one call are skipped with a message.
    """

    name: str
    family: str
    size: tuple[int, int, int, int]
    limit: str
    dtype: str = "float32"
    mask: str = "full"
    window: int = 512
    kv_heads: int = 0
    keys: int = 0
    stored: str = ""
    statistics: tuple[str, ...] = ()
    pooled: int = 0
    teacher: bool = False
    backward: bool = False
    peers: tuple[str, ...] = ("sdpa",)
    goals: tuple[Goal, ...] = ()
    timed: bool = True
    patience: float = 15.0

    @property
    def kv_size(self) -> tuple[int, int, int, int]:
        """(b, h_kv, m, d) of k and v."""
        b, h, n, d = self.size
        return b, self.kv_heads or h, self.keys or n, d

    @property
    def pairs(self) -> int:
        """Number of query-key pairs that the mask allows, over all batches and heads."""
        b, h, n, _ = self.size
        m = self.kv_size[2]
        if self.mask == "full":
            return b * h * n * m
        width = m if self.mask == "causal" else min(m, self.window)
        return b * h * sum(min(i + m - n + 1, width) for i in range(n))

    @property
    def flops(self) -> int:
        """Floating-point operations of the products alone: 4·d per pair forward, 10·d more backward (Dao 2023)."""
        return (14 if self.backward else 4) * self.size[3] * self.pairs

    @property
    def read_bytes(self) -> int:
        """Bytes that must be read at least once: q, k and v."""
        b, h, n, d = self.size
        _, h_kv, m, _ = self.kv_size
        size = 4 if self.dtype == "float32" else 2
        vector = d + 4 if self.stored == "int8" else d * size
        return b * h * n * d * size + 2 * b * h_kv * m * vector

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all weights in float32."""
        b, h, n, _ = self.size
        return 4 * b * h * n * self.kv_size[2]

    def shrunk(self, n: int) -> "Case":
        """The same case with at most n queries and proportionally many keys."""
        b, h, full, d = self.size
        if not self.keys:
            return replace(self, size=(b, h, min(full, n), d))
        return replace(self, keys=min(self.keys, n))

    def quick(self) -> "Case":
        """A small version for tests: prime sizes where possible, and as few heads as the grouping allows."""
        b, h, n, d = self.size
        heads = 2 * h // self.kv_heads if self.kv_heads else min(h, 3)
        return replace(
            self,
            size=(min(b, 2), heads, min(n, 67), min(d, 32)),
            kv_heads=2 if self.kv_heads else 0,
            keys=min(self.keys, 263),
            pooled=min(self.pooled, 5),
            window=min(self.window, 19),
        )


SHORT = {"float32": "fp32", "bfloat16": "bf16"}

# Goals hold for a CPU with AVX-512 and its bfloat16 instructions. A case without one has not been set one yet.
FORWARD = {"float32": (Goal(0.43),), "bfloat16": (Goal(0.23),)}
CAUSAL = {"float32": (Goal(0.38),), "bfloat16": (Goal(0.23),)}
SMALL = {"float32": (Goal(0.40),), "bfloat16": (Goal(0.19),)}
TINY = {"float32": (Goal(1.05),), "bfloat16": (Goal(0.5),)}
TRAIN = {"float32": (Goal(0.60),), "bfloat16": (Goal(0.45),)}
EIGHT = (Goal(0.6, "plain"), Goal(0.1, "restored"))
DECODE = {"float32": (Goal(0.2), Goal(0.45, "rewrite")), "bfloat16": (Goal(0.04), Goal(0.45, "rewrite"))}
SIX_GOALS = (Goal(0.05, "eager_statistics"),)
KL_GOALS = (Goal(1.8, "plain"),)
LOSS_GOALS = {"float32": (Goal(1.10, "plain"),), "bfloat16": (Goal(1.15, "plain"),)}
# What the statistics add to the same call without them.
ADDED = {"rows": (Goal(1.06, "plain"),), "keys": (Goal(1.12, "plain"),), "small": (Goal(1.15, "plain"),), "tiny": ()}

ARITHMETIC = "multiply-add units, then exp"
STATISTICS = "multiply-add units; the statistics add passes over tiles in cache"


def _size(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


def _cases() -> list[Case]:
    cases = []
    both = [(dtype, mask) for dtype in SHORT for mask in ("full", "causal")]
    for size in ((1, 12, 512, 64), (1, 12, 2048, 64), (1, 12, 4096, 64), (1, 32, 4096, 128)):
        for dtype, mask in both:
            name = f"forward-{_size(size)}-{mask}-{SHORT[dtype]}"
            peers = ("sdpa", "eager", "flex")
            goals = CAUSAL if mask == "causal" and size[2] == 2048 else FORWARD
            cases.append(Case(name, "forward", size, ARITHMETIC, dtype, mask, peers=peers, goals=goals[dtype]))
    for dtype, mask in both:
        name, limit = f"small-8x8x128x64-{mask}-{SHORT[dtype]}", "starting threads, then multiply-add units"
        peers = ("sdpa", "eager", "flex")
        cases.append(Case(name, "small", (8, 8, 128, 64), limit, dtype, mask, peers=peers, goals=SMALL[dtype]))
    for dtype in SHORT:
        name, limit = f"tiny-4x4x16x128-{SHORT[dtype]}", "the Python call around the kernel"
        peers = ("sdpa", "eager", "flex")
        cases.append(Case(name, "tiny", (4, 4, 16, 128), limit, dtype, peers=peers, goals=TINY[dtype]))
    at, peers = (1, 12, 4096, 64), ("sdpa", "plain", "eager_statistics")
    name = "statistics-six-4096-causal-fp32"
    cases.append(Case(name, "statistics", at, STATISTICS, mask="causal", statistics=SIX, peers=peers, goals=SIX_GOALS))
    for what, names, at in (("rows", ROWS, (1, 12, 2048, 64)), ("keys", KEYS, (1, 12, 2048, 64)),
                            ("small", ROWS, (8, 8, 128, 64)), ("tiny", ROWS, (4, 4, 16, 128))):  # fmt: skip
        for dtype, mask in both:
            name = f"statistics-{what}-{at[2]}-{mask}-{SHORT[dtype]}"
            cases.append(
                Case(name, "statistics", at, STATISTICS, dtype, mask, statistics=names, peers=("sdpa", "plain"),
                     goals=ADDED[what])
            )  # fmt: skip
    limit = "multiply-add units: seven products, q·k twice among them"
    for what, at in (("2048", (1, 12, 2048, 64)), ("small-128", (8, 8, 128, 64))):
        for dtype, mask in both:
            name, peers, goals = f"train-{what}-{mask}-{SHORT[dtype]}", ("sdpa", "eager", "flex"), TRAIN[dtype]
            cases.append(Case(name, "train", at, limit, dtype, mask, backward=True, peers=peers, goals=goals))
    at, limit = (1, 12, 2048, 64), "the products of training; statistics share both passes"
    for dtype, mask in both:
        case = Case(
            f"losses-2048-{mask}-{SHORT[dtype]}", "losses", at, limit, dtype, mask, statistics=LOSSES, backward=True,
            peers=("plain",), goals=LOSS_GOALS[dtype],
        )  # fmt: skip
        of_two = replace(
            case, name=f"losses-kl-2048-{mask}-{SHORT[dtype]}", limit="nine products, of which q·k is five",
            statistics=(), teacher=True, goals=KL_GOALS,
        )  # fmt: skip
        cases += [case, of_two]
    eager = ("eager_statistics",)
    at, goals = (1, 2, 4096, 64), (Goal(0.1, *eager),)
    cases.append(replace(case, name="losses-4096-causal-fp32", size=at, dtype="float32", peers=eager, goals=goals))
    for dtype in SHORT:
        name, limit = f"decode-16k-{SHORT[dtype]}", "reading keys and values from memory"
        cases.append(
            Case(
                name, "decode", (1, 32, 1, 128), limit, dtype, "causal", kv_heads=8, keys=16_384,
                peers=("sdpa", *REWRITES, "eager", "flex"), goals=DECODE[dtype],
            )
        )  # fmt: skip
        cases.append(
            Case(
                f"decode-16k-int8-{SHORT[dtype]}", "decode", (1, 32, 1, 128), limit, dtype, "causal", kv_heads=8,
                keys=16_384, stored="int8", peers=("plain", "restored"), goals=EIGHT,
            )
        )  # fmt: skip
    long = Case(
        "long-131072", "long", (1, 1, 131_072, 64), "multiply-add units; memory would end it if the matrix were kept",
        mask="causal", statistics=KEYS, pooled=1024, patience=900.0,
    )  # fmt: skip
    cases.append(long)
    at = (1, 12, 32_768, 64)
    limit = "O(n) of state a row, and the tiles of each thread"
    room = Case("memory-32768-causal", "memory", at, limit, mask="causal", timed=False, patience=120.0)
    cases += [
        room,
        replace(room, name="memory-32768-statistics", statistics=ROWS),
        replace(room, name="memory-32768-window", mask="window", peers=()),
    ]
    at = (1, 4, 16_384, 64)
    cases.append(replace(room, name="losses-16384-memory", size=at, statistics=LOSSES, backward=True, peers=("plain",)))
    return cases


CASES: dict[str, Case] = {case.name: case for case in _cases()}
FAMILIES = tuple(dict.fromkeys(case.family for case in CASES.values()))


def select(wanted: list[str]) -> list[Case]:
    """Cases by name, family or pattern, in the order of the table; all if nothing is given. Raises KeyError."""
    for word in wanted:
        if not any(_matches(case, word) for case in CASES.values()):
            raise KeyError(word)
    return [case for case in CASES.values() if not wanted or any(_matches(case, word) for word in wanted)]


def _matches(case: Case, word: str) -> bool:
    return word == case.family or fnmatchcase(case.name, word)
