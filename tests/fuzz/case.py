"""What a case is, and how one is drawn from a seed and a number."""

import random
from dataclasses import dataclass
from typing import Any

Tree = tuple[Any, ...]
DTYPES = ("float32", "bfloat16", "float16", "float64")
KERNELS = ("auto", "cpu", "torch_blocks", "torch_fused", "reference", "triton_gpu")
EDGES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 23, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129)
LAYOUTS = (
    "bnhd",
    "column",
    "step",
    "step in a row",
    "offset",
    "negative",
    "one batch",
    "one head",
    "one row",
    "one number",
)
MEASURES = (
    "max_logit", "logsumexp", "entropy", "normalized_entropy", "effective_keys", "squared_weights", "top1_mass",
    "topk_mass", "learned_sink_mass", "mean_distance", "distance_variance", "local_mass", "sink_mass", "previous_mass",
    "self_mass", "next_mass", "received_mass",
)  # fmt: skip
READS = (
    "tile", "times", "transposed", "pool", "pooled", "topk", "received", "diagonals", "row", "dense", "measure", "save",
    "head", "operator", "given", "merge",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A call, plain enough to be made smaller field by field; what is random in it comes from `seed`.

    Attributes:
        group: query heads to a KV head.
        data: what q and k hold: "normal", "zeros", "whole" (many ties), "alike" (keys that differ by 1e-6), "denormal".
            loud, loud_v: factors on q and v.
        bad: (tensor, place as four fractions, value) of numbers that are not finite.
        layouts: of q, k and v. alias: which of them are one object.
        mask: a tree of ("and" | "or", left, right) over leaves. scores: of each its kind and numbers.
        eight: which of k and v come in eight bits, "" or "k", "v", "kv"; parts: with two scales a vector.
        way: "map", "plain", "twice", "threads" or "vmap".
        learn: whether the tensors of the scores require gradients, too.
        reads: kinds of reads of the map, each with four fractions.
    """

    seed: int = 0
    b: int = 1
    kv: int = 1
    group: int = 1
    n: int = 1
    m: int = 1
    d: int = 1
    e: int = 1
    dtype: str = "float32"
    scale: float | None = None
    data: str = "normal"
    loud: float = 1.0
    loud_v: float = 1.0
    bad: tuple[tuple[str, tuple[float, ...], str], ...] = ()
    layouts: tuple[str, str, str] = ("", "", "")
    alias: str = ""
    mask: Tree = ()
    scores: tuple[Tree, ...] = ()
    eight: str = ""
    parts: bool = False
    dropout: float = 0.0
    kernel: str = "auto"
    target: str = ""
    threads: int = 1
    context: str = ""
    way: str = "map"
    grad: bool = False
    learn: bool = False
    measures: bool = False
    progress: bool = False
    reads: tuple[tuple[str, tuple[float, ...]], ...] = ()

    @property
    def h(self) -> int:
        """Query heads."""
        return self.kv * self.group

    def features(self) -> set[str]:
        """What the case has, by name: for `--skip`, and to be counted."""
        found = {f"dtype:{self.dtype}", f"kernel:{self.kernel}", f"way:{self.way}", f"data:{self.data}"}
        found |= {f"mask:{kind}" for kind in leaves(self.mask)} or {"mask:none"}
        found |= {f"score:{score[0]}" for score in self.scores} or {"score:none"}
        found |= {f"read:{kind}" for kind, _ in self.reads}
        found |= {f"layout:{layout}" for layout in self.layouts if layout}
        found |= {f"bad:{name}" for name, _, _ in self.bad}
        flags = {
            f"target:{self.target}": self.target, f"alias:{self.alias}": self.alias, f"eight:{self.eight}": self.eight,
            f"context:{self.context}": self.context, "dropout": self.dropout, "grad": self.grad, "learn": self.learn,
            "progress": self.progress, "measures": self.measures, "scale<=0": (self.scale or 1) < 0 or self.scale == 0,
            "loud": self.loud > 100, "tiny v": self.loud_v < 1e-6,
            "threads": self.threads > 1, "n=0": self.n == 0, "m=0": self.m == 0,
            "b=0": self.b == 0, "h=0": self.h == 0, "n>m": self.n > self.m, "n=1": self.n == 1, "long": self.m > 1000,
            "grouped": self.group > 1,
        }  # fmt: skip
        return found | {name for name, there in flags.items() if there}


def leaves(mask: Tree) -> list[str]:
    """The kinds of a mask's parts."""
    if not mask:
        return []
    return [mask[0], *leaves(mask[1]), *leaves(mask[2])] if mask[0] in ("and", "or") else [mask[0]]


def draw(seed: int, number: int, targets: tuple[str, ...] = ()) -> Case:
    """Case `number` of a seed; always the same one on a machine with these targets."""
    rng = random.Random(f"{seed}/{number}")
    dtype = rng.choices(DTYPES, (6, 3, 2, 1))[0]
    way = rng.choices(("map", "plain", "twice", "threads", "vmap"), (12, 3, 2, 2, 1))[0]
    grad = rng.random() < 0.3 and way != "twice"
    scores = _scores(rng)
    sizes = _sizes(rng)
    eight = rng.choice(("k", "v", "kv", "kv")) if rng.random() < 0.08 else ""
    dropout = rng.choice((0.1, 0.5, 0.9)) if rng.random() < 0.04 and way in ("map", "plain", "threads") else 0.0
    if dropout:
        sizes["e"] = sizes["m"] = min(sizes["m"], 200)
    mask = _mask(rng, 3) if rng.random() < 0.75 else ()
    if way == "vmap":  # of one batch entry at a time
        scores, eight, sizes["b"] = (), "", max(1, sizes["b"])
        mask = mask if {*leaves(mask)} <= {"causal", "window", "sinks", "everything"} else ()
    # The CPU's products of bfloat16 take what is below the least normal number for 0; docs/precision.md has the bound.
    small = 0.0 if dtype == "bfloat16" or eight else 1.0  # and steps of eight bits have few digits there
    odd = rng.random() < 0.06 and not eight and not dropout
    names = rng.choices(("q", "k", "v"), k=rng.randint(1, 3)) if odd else ()
    return Case(
        seed=rng.randrange(1 << 30),
        **sizes,
        dtype=dtype,
        scale=rng.choices((None, 0.0, -1.0, -0.3, 1.0, 7.0, 1e-6, 0.125), (12, 1, 1, 1, 2, 1, 1, 1))[0],
        data=rng.choices(("normal", "whole", "alike", "zeros", "denormal"), (20, 3, 2, 1, small))[0],
        loud=rng.choices((1.0, 0.01, 10.0, 100.0, 3e3, 1e5, 1e9), (16, 2, 3, 2, 2, 1, 1))[0]
        if dtype != "float16"
        else 1.0,
        loud_v=rng.choices((1.0, 1e-3, 1e3, 1e-40), (20, 1, 1, small / 2))[0],
        bad=tuple((name, _four(rng), rng.choice(("torch.nan", "torch.inf", "-torch.inf"))) for name in names),
        layouts=tuple(rng.choice(LAYOUTS) if rng.random() < 0.25 else "" for _ in range(3)),  # type: ignore[arg-type]
        alias=rng.choice(("q is k", "k is v", "all")) if rng.random() < 0.05 and not eight and not dropout else "",
        mask=mask,
        scores=scores,
        eight=eight,
        parts=rng.random() < 0.3,
        dropout=dropout,
        kernel="cpu" if way == "threads" else rng.choices(KERNELS, (6, 3, 3, 2, 1, 0.02))[0],
        target=rng.choice(targets) if targets and rng.random() < 0.7 else "",
        threads=rng.choices((1, 2, 3), (6, 1, 1))[0] if way != "threads" else rng.choice((2, 3)),
        context=rng.choice(("no_grad", "inference", "autocast", "float64")) if rng.random() < 0.12 else "",
        way=way,
        grad=grad,
        learn=grad and rng.random() < 0.6,
        measures=rng.random() < 0.25,
        progress=rng.random() < 0.15,
        reads=tuple((kind, _four(rng)) for kind in rng.sample(READS, rng.randint(0, 4))),
    )  # fmt: skip


def _sizes(rng: random.Random) -> dict[str, int]:
    def size(most: int) -> int:
        return rng.choice([x for x in EDGES if x <= most]) if rng.random() < 0.6 else rng.randint(1, most)

    def rarely_none(x: int) -> int:
        return 0 if rng.random() < 0.015 else x

    kv, group = rng.choice((1, 1, 1, 2, 2, 3, 4)), rng.choice((1, 1, 2, 2, 3, 4))
    group = rarely_none(group if kv * group <= 8 else 1)
    b = rarely_none(rng.choice((1, 1, 1, 2, 2, 3)))
    wide = rng.random()
    if wide < 0.12:
        n, m = 1, size(200)
    elif wide < 0.15:
        n, m = rng.choice((1, 1, 2, 5)), rng.choice((1023, 1025, 2047, 3001, 5000))
        kv = 1
    else:
        most = rng.choice((9, 20, 20, 40, 40, 70, 130, 200))
        if most > 100:
            b, kv = min(b, 1), 1
        n = size(most)
        m = n if rng.random() < 0.4 else size(most)
        if n > m and rng.random() < 0.7:
            n, m = m, n
    d = size(rng.choice((8, 16, 33, 64, 70, 130)))
    e = d if rng.random() < 0.5 else size(rng.choice((8, 16, 33, 70, 130)))
    return {"b": b, "kv": kv, "group": group, "n": rarely_none(n), "m": rarely_none(m), "d": d, "e": e}


def _mask(rng: random.Random, depth: int) -> Tree:
    if depth > 1 and rng.random() < 0.35:
        return rng.choice(("and", "and", "or")), _mask(rng, depth - 1), _mask(rng, depth - 1)
    kind = rng.choices(
        ("causal", "window", "sinks", "lengths", "documents", "dense", "everything", "head windows", "forbidden"),
        (8, 4, 2, 4, 3, 3, 1, 2, 2),
    )[0]
    match kind:
        case "window":
            return kind, rng.choice((1, 2, 3, 7, 16, 17, 64, 1000)), rng.choice((0, 0, 1, 5, 64))
        case "sinks":
            return kind, rng.choice((0, 1, 2, 4, 500))
        case "head windows":
            return kind, rng.randrange(1 << 20), rng.choice((0, 0, 1, 4))
        case "forbidden":
            return kind, rng.randrange(1 << 20), rng.random() < 0.3, rng.random() < 0.5, rng.choice((0.03, 0.3, 0.9))
        case "lengths":
            return kind, rng.randrange(1 << 20), rng.random() < 0.3, rng.choice(("left", "right"))
        case "documents":
            return kind, rng.randrange(1 << 20), rng.random() < 0.3, rng.choice(("runs", "runs", "padded", "mixed"))
        case "dense":
            return kind, rng.randrange(1 << 20), rng.choice((2, 3, 4)), rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    return (kind,)


def _scores(rng: random.Random) -> tuple[Tree, ...]:
    if rng.random() < 0.6:
        return ()
    dtype = rng.choice(("float32", "float32", "float64", "bfloat16"))
    seed = rng.randrange(1 << 20)
    made: list[Tree] = [
        ("cap", rng.choice((0.5, 5.0, 30.0))),
        ("alibi", rng.random() < 0.5, seed),
        ("relative", rng.random() < 0.5, rng.choice((1, 4, 9, 40)), rng.choice((-20, -6, 0, 2)), dtype, seed),
        ("t5", rng.random() < 0.5, dtype, seed),
        ("bias", tuple(rng.random() < 0.5 for _ in range(4)), rng.choice((0.0, 0.0, 0.2, 1.0)), dtype, seed),
        ("bias", tuple(rng.random() < 0.5 for _ in range(4)), 0.0, dtype, seed + 1),
        ("sinks", rng.choice((0.0, 0.0, 3.0, 40.0, -40.0, 9e3)), dtype, seed),
    ]
    return tuple(rng.sample(made, rng.choices((1, 2, 3), (6, 3, 1))[0]))


def _four(rng: random.Random) -> tuple[float, ...]:
    return tuple(rng.randrange(1000) / 1000 for _ in range(4))
