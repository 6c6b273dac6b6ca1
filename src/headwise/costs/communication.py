"""Communication of one attention layer on several devices, by three methods and combinations of two.

    head-parallel   heads split over devices; two all-reduces of activations      Shoeybi et al. 2019, 1909.08053
    Ulysses         from sequence to heads and back, by all-to-alls               Jacobs et al. 2023, 2309.14509
    ring            keys and values are passed around in a ring                   Liu et al. 2023, 2310.01889
    hybrid          Ulysses inside of groups, a ring between them                 Fang & Zhao 2024, 2405.07719
    heads by ring   head-parallel inside of groups, a ring between them

>>> from headwise.costs import Work
>>> from headwise.nn.registry import counts_of
>>> counts, work = counts_of("gqa", {"d_model": 4096, "num_heads": 32, "num_kv_heads": 8}), Work(1, 8192, 8192)
>>> [(way.name, way.forward, way.backward) for way in ways(counts, work, 8)]
[('head-parallel', 117440512, 117440512), ('Ulysses', 18350080, 18350080), ('ring', 27525120, 82575360)]

Symbols: b sequences of n tokens, width d, h query heads and h_kv KV heads of sizes d_k and d_v, P devices, e bytes per
number. All numbers are for one layer and one device, and self attention over n tokens, or cross attention of n tokens
to m others, the context, whose keys and values the layer computes. If P does not divide n, devices differ, and the
numbers are their mean. An all-reduce of S bytes sends 2·S·(P − 1)/P: it is a reduce-scatter and an all-gather, and this
is a lower bound for any algorithm (Patarasuk & Yuan 2009, 10.1016/j.jpdc.2008.09.002).
"""

from dataclasses import dataclass
from itertools import pairwise

from headwise.costs.work import LSE_BYTES, Counts, Work, positive
from headwise.errors import ConfigError, check_choice

SUM_BYTES = 4  # gradients of keys and values are accumulated in float32 in a ring
BACKWARD = 2.5  # FLOPs of blockwise attention's backward pass, in forward passes, if d_k = d_v


@dataclass(frozen=True)
class Way:
    """How one layer is computed by P devices: "head-parallel", "Ulysses", "ring", "hybrid U × R", "heads H × R"."""

    name: str
    forward: int  # bytes of activations that a device sends
    backward: int  # bytes of activations' gradients
    gradients: int  # bytes of weight gradients that it sends per step; each has all weights if the sequence is split
    rounds: int  # sequential transfers in a forward pass; each takes one latency
    hops: int  # the transfers that overlap with computation
    passed: int  # the bytes sent in them
    weights: int  # bytes of the layer's weights on a device
    kept: int  # bytes that the forward saves for the backward pass, without the context that all layers share
    buffers: int  # bytes of communication buffers in a forward pass

    @property
    def step(self) -> int:
        """Bytes that a device sends in a training step: both passes, and the gradients of weights."""
        return self.forward + self.backward + self.gradients


def ways(counts: Counts, work: Work, devices: int) -> list[Way]:
    """Those of head-parallel, Ulysses and ring that support this number of devices; a ring supports any number."""
    found = []
    for way in (head_parallel, ulysses, ring):
        try:
            found.append(way(counts, work, devices))
        except ConfigError:
            continue
    return found


def head_parallel(counts: Counts, work: Work, devices: int) -> Way:
    """An all-reduce of y, and of the gradient of x (and the context): 2·b·n·d·e·(P − 1)/P each. P divides h; if h_kv <
    P, P / h_kv devices share a KV head, and gather and scatter b·n·(d_k + d_v)·e·(1 − h_kv/P)."""
    return heads_by_ring(counts, work, devices, devices)


def heads_by_ring(counts: Counts, work: Work, devices: int, heads: int) -> Way:
    """A mesh of H × R devices: heads split over H, as in training large models on long texts (Llama 3, 2407.21783,
    §3.3.2); a ring of R, each sending its own h_kv/H KV heads. All-reduces of n/R tokens over H devices."""
    _check(counts, work, devices, heads)
    h, h_kv = counts.heads, counts.key_vectors
    if h % heads:
        raise ConfigError(
            "head-parallel: num_heads={h} cannot be divided evenly between {heads} devices", h=h, heads=heads
        )
    if h_kv % heads and heads % h_kv:
        raise ConfigError(
            "head-parallel: num_kv_heads={h_kv} and {heads} devices: one has to divide the other",
            h_kv=h_kv,
            heads=heads,
        )
    around, size = devices // heads, work.size
    tokens, others = work.batch * work.queries // around, work.batch * work.keys // around
    reduced = 2 * tokens * counts.width * size * (heads - 1) // heads
    of_context = 2 * others * counts.width * size * (heads - 1) // heads if work.cross else 0
    shared = others * _head(counts) * size * (heads - h_kv) // heads if heads > h_kv else 0
    part = others * max(1, h_kv // heads) * _head(counts)  # numbers in the keys and values of a device
    pieces, hops = _hops(work, around, "zigzag")
    passed = part * hops // pieces
    kept = (tokens * (counts.width + (counts.query + counts.concat) // heads) + part) * size
    return Way(
        "ring" if heads == 1 else "head-parallel" if around == 1 else f"heads {heads} × {around}",
        reduced + shared + passed * size,
        reduced + of_context + shared + passed * (size + SUM_BYTES),
        2 * (counts.parameters // heads) * size * (around - 1) // around,
        rounds=2 * (heads - 1) + (1 if shared else 0) + around - 1, hops=around - 1,
        passed=passed * size, weights=counts.parameters * size // heads, kept=kept + _lse(counts, work) // devices,
        buffers=(tokens * counts.width if heads > 1 else 0) * size + (2 * part if around > 1 else 0) * size,
    )  # fmt: skip


def ulysses(counts: Counts, work: Work, devices: int) -> Way:
    """Four all-to-alls, of q, k, v and the result: b·n/P·(h + h_kv)·(d_k + d_v)·e·(P − 1)/P in each pass, backward
    their gradients. If h_kv < P, P KV heads are sent: each to every device whose query heads read it."""
    return hybrid(counts, work, devices, devices)


def ring(counts: Counts, work: Work, devices: int, *, layout: str = "zigzag") -> Way:
    """P − 1 times keys and values of n/P tokens, b·n/P·h_kv·(d_k + d_v)·e; backward, their float32 gradients too. If
    causal, "zigzag" balances the work (Brandon et al. 2023, 2311.09431): (2P − 1)/2P of that; "contiguous": half."""
    _check(counts, work, devices)
    check_choice("layout", layout, ("zigzag", "contiguous"))
    return _hybrid(counts, work, 1, devices, layout)


def hybrid(counts: Counts, work: Work, devices: int, heads: int) -> Way:
    """A mesh of U × R devices (Fang & Zhao 2024, 2405.07719): Ulysses over U, for fast links within a machine, with the
    heads of n/R tokens; a ring of R, for slower ones between them, with the keys of h_kv/U heads."""
    _check(counts, work, devices, heads)
    if counts.heads < heads:
        raise ConfigError(
            "Ulysses: num_heads={num_heads} is too small for {devices} devices", num_heads=counts.heads, devices=heads
        )
    return _hybrid(counts, work, heads, devices // heads, "zigzag")


def hiding_tokens(counts: Counts, work: Work, peak: float, link: float, *, backward: bool = False) -> float:
    """The least tokens n/P for which computation hides a ring's communication: n/P ≥ e·h_kv/(2·h) · peak/link, twice if
    causal (Liu et al. 2023, §3, for one head); backward, 2.5 times the FLOPs, (e + 4)/e the bytes."""
    _rates(peak=peak, link=link)
    size, work_share = work.size, 0.5 if work.causal else 1.0
    bytes_a_token = counts.key_vectors * _head(counts) * (size + SUM_BYTES if backward else size)
    flops_a_pair = 2 * (counts.scores + counts.weighted_sum) * work_share * (BACKWARD if backward else 1.0)
    return bytes_a_token / flops_a_pair * peak / link


def exposed_seconds(
    way: Way, counts: Counts, work: Work, devices: int, *, peak: float, link: float, latency: float = 0.0
) -> float:
    """Seconds of a forward pass that a device waits for communication, hops of a ring only beyond the overlapping
    computation. peak, link: as in `hiding_tokens`; latency: seconds of overhead per transfer."""
    _rates(peak=peak, link=link)
    around = way.passed
    waiting = (way.forward - around) / link + (way.rounds - way.hops) * latency
    if not way.hops:
        return waiting
    computed = attention_flops(counts, work) / devices / (way.hops + 1) / peak
    return waiting + way.hops * max(0.0, around / way.hops / link + latency - computed)


def attention_flops(counts: Counts, work: Work) -> int:
    """FLOPs of scores and weighted sum in a forward pass, summed over all devices."""
    return 2 * work.batch * work.pairs * (counts.scores + counts.weighted_sum)


def _hybrid(counts: Counts, work: Work, heads: int, around: int, layout: str) -> Way:
    """Ulysses over `heads` devices and a ring over `around`."""
    devices, size = heads * around, work.size
    tokens = work.batch * work.queries
    keys = work.batch * work.keys * _read(counts, heads) * _head(counts)  # of all devices
    part = keys // devices
    pieces, hops = _hops(work, around, layout)
    passed = keys // heads * hops // (pieces * around)  # numbers that a device sends on, on average
    # Bytes that all-to-alls over `heads` of the devices send: queries, keys, values and results of n/P tokens.
    numbers = work.batch * work.queries * (counts.query + counts.concat) + keys
    shuffled = numbers * work.size // devices * (heads - 1) // heads
    own = tokens * (counts.width + counts.query + counts.concat) // devices
    name = "ring" if heads == 1 else "Ulysses" if around == 1 else f"hybrid {heads} × {around}"
    return Way(
        name,
        shuffled + passed * size,
        shuffled + passed * (size + SUM_BYTES),
        2 * counts.parameters * size * (devices - 1) // devices,
        rounds=(2 if heads > 1 else 0) + around - 1, hops=around - 1, passed=passed * size,
        weights=counts.parameters * size,
        kept=(own + part) * size + _lse(counts, work) // devices,
        buffers=(2 * part if around > 1 else 0) * size + (own * size if heads > 1 else 0),
    )  # fmt: skip


def _hops(work: Work, around: int, layout: str) -> tuple[int, int]:
    """The chunks of the keys, and all their hops: as far as a device has a query that attends to one of the keys."""
    if not work.causal and work.window is None:
        return around, around * (around - 1)
    pieces = around if layout == "contiguous" else 2 * around
    length = -(-work.queries // pieces)
    if not work.causal:  # the device before has such a query, R − 1 hops away, but for a chunk at an end of the text
        far = min(around - 1, _ahead(work, 0, pieces, length))
        return pieces, pieces // around * ((around - 1) ** 2 + far) if far else 0
    seen = [_ahead(work, piece, pieces, length) for piece in range(pieces)]
    if layout == "contiguous":
        return pieces, sum(min(around - 1 - s, seen[s]) for s in range(around))
    # Device s holds the chunks s and 2R − 1 − s. The chunks after the first are on devices s + 1 … R − 1, then back to
    # s, and finally on s − 1, which is R − 1 hops away; the chunks after the second begin there.
    total = 0
    for s in range(around):
        total += around - 1 if s and seen[s] >= 2 * (around - s) else min(around - 1 - s, seen[s])
        total += around - 1 if s and seen[2 * around - 1 - s] else 0
    return pieces, total


def _ahead(work: Work, piece: int, pieces: int, length: int) -> int:
    """The number of chunks after one of the keys that have a query which attends to it; more than there are if all."""
    if work.window is None or piece * length < work.sinks:
        return pieces
    if work.chunked:
        last = (piece + 1) * length - 1
        return (last // work.window * work.window + work.window - 1) // length - piece
    return 0 if work.window == 1 else 1 + (work.window - 2) // length


def _read(counts: Counts, devices: int) -> int:
    """The number of KV heads that the query heads of each device read, summed over all devices."""
    h, group = counts.heads, counts.heads // counts.key_vectors
    cuts = [device * h // devices for device in range(devices + 1)]
    return sum((stop - 1) // group - start // group + 1 for start, stop in pairwise(cuts))


def _head(counts: Counts) -> int:
    """d_k + d_v."""
    return (counts.keys + counts.values) // counts.key_vectors


def _lse(counts: Counts, work: Work) -> int:
    return work.batch * work.queries * counts.heads * LSE_BYTES


def _check(counts: Counts, work: Work, devices: int, heads: int = 1) -> None:
    positive(devices=devices)
    if work.new_keys != work.keys or (work.queries != work.keys and not work.cross):
        raise ConfigError(
            f"queries={work.queries}, keys={work.keys}: expected self attention of all tokens, or cross attention to "
            "keys that the layer computes"
        )
    apart = counts.scores * counts.key_vectors == counts.heads * counts.keys and counts.used is None
    if not apart or counts.mixing:
        raise ConfigError(
            "counts: expected a design in which each query head uses one KV head, such as multi_head or gqa"
        )
    positive(heads=heads)
    if devices % heads:
        raise ConfigError(f"heads={heads}: does not divide devices={devices}")


def _rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0 < rate < float("inf"):
            raise ConfigError(f"{name}={rate}: expected a finite number above 0")
