"""What one attention layer sends when many devices compute it together, in three ways and mixtures of two.

    head-parallel   each device its heads; two all-reduces of the activations     Shoeybi et al. 2019, 1909.08053
    Ulysses         sequence to heads and back, by all-to-alls                    Jacobs et al. 2023, 2309.14509
    ring            keys and values go round                                      Liu et al. 2023, 2310.01889
    hybrid          Ulysses inside of groups, a ring between them                 Fang & Zhao 2024, 2405.07719
    heads by ring   head-parallel inside of groups, a ring between them

>>> from headwise.costs import Work
>>> from headwise.nn.counts import counts_of
>>> counts, work = counts_of("gqa", {"d_model": 4096, "num_heads": 32, "num_kv_heads": 8}), Work(1, 8192, 8192)
>>> [(way.name, way.forward, way.backward) for way in ways(counts, work, 8)]
[('head-parallel', 117440512, 117440512), ('Ulysses', 18350080, 18350080), ('ring', 27525120, 82575360)]

Letters: b sequences of n tokens, width d, h query heads and h_kv key heads of sizes d_k and d_v, P devices, e bytes a
number. All is for one layer and one device, self attention over n tokens that P divides; where it does not, devices
differ, and the numbers are their mean. An all-reduce of S bytes sends 2·S·(P − 1)/P, as the reduce-scatter and the
all-gather that it is (Patarasuk & Yuan 2009, 10.1016/j.jpdc.2008.09.002): what no algorithm undercuts.
"""

from dataclasses import dataclass
from itertools import pairwise

from headwise.costs.counts import Counts, positive
from headwise.costs.stages import LSE_BYTES
from headwise.costs.work import Work
from headwise.errors import ConfigError, check_choice

SUM_BYTES = 4  # gradients of keys and values that a ring adds up are float32
BACKWARD = 2.5  # FLOPs of blockwise attention's backward pass, in forward passes, if d_k = d_v


@dataclass(frozen=True)
class Way:
    """How one layer is computed by P devices.

    Attributes:
        name: "head-parallel", "Ulysses", "ring", "hybrid U × R" or "heads H × R".
        forward, backward: bytes of activations and their gradients that a device sends in each pass.
        gradients: bytes of weight gradients that it sends a step, to add them up: with the sequence cut, every device
            has all weights; with the heads cut, each has its own.
        rounds: transfers that follow one another in a forward pass, each of which waits a latency.
        hops: those of them that run while the device computes with what it has; passed: the bytes sent in them.
        weights: bytes of the layer's weights on a device. kept: of what its backward pass needs of the forward.
        buffers: of what is under way in a forward pass.
    """

    name: str
    forward: int
    backward: int
    gradients: int
    rounds: int
    hops: int
    passed: int
    weights: int
    kept: int
    buffers: int

    @property
    def step(self) -> int:
        """Bytes that a device sends in a training step: both passes, and the gradients of weights."""
        return self.forward + self.backward + self.gradients


def ways(counts: Counts, work: Work, devices: int) -> list[Way]:
    """Those of head-parallel, Ulysses and ring that so many devices allow; a ring allows any."""
    found = []
    for way in (head_parallel, ulysses, ring):
        try:
            found.append(way(counts, work, devices))
        except ConfigError:
            continue
    return found


def head_parallel(counts: Counts, work: Work, devices: int) -> Way:
    """Forward an all-reduce of y, backward one of the gradient of x: 2·b·n·d·e·(P − 1)/P each.

    P divides h. With h_kv < P, P / h_kv devices share a key head: each computes some of its channels, and they gather
    it, b·n·(d_k + d_v)·e·(1 − h_kv/P), and scatter its gradient back.

    Raises:
        ConfigError: naming both numbers, if the heads cannot be divided evenly.
    """
    return heads_by_ring(counts, work, devices, devices)


def heads_by_ring(counts: Counts, work: Work, devices: int, heads: int) -> Way:
    """A mesh of H × R devices: the heads over H of them, and a ring of R for the sequence, as large models are trained
    on long texts (with an all-gather in the place of the ring: Llama 3, 2407.21783, §3.3.2).

    The all-reduces are of n/R tokens, over H devices; a device sends its own h_kv/H key heads round; weights and the
    sums of their gradients are an H-th.

    Args:
        heads: H; it divides the devices and h, and h_kv or is a multiple of it.
    Raises:
        ConfigError: naming both numbers, if not.
    """
    _check(counts, work, devices)
    positive(heads=heads)
    h, h_kv = counts.heads, _kv(counts)
    if devices % heads:
        raise ConfigError(f"heads={heads}: does not divide devices={devices}")
    if h % heads:
        raise ConfigError(f"head-parallel: num_heads={h} cannot be divided evenly between {heads} devices")
    if h_kv % heads and heads % h_kv:
        raise ConfigError(f"head-parallel: num_kv_heads={h_kv} and {heads} devices: one has to divide the other")
    around, size = devices // heads, work.size
    tokens = work.batch * work.queries // around
    reduced = 2 * tokens * counts.width * size * (heads - 1) // heads
    shared = tokens * _head(counts) * size * (heads - h_kv) // heads if heads > h_kv else 0
    part = tokens * max(1, h_kv // heads) * _head(counts)  # numbers of a device's keys and values
    pieces, hops = _hops(work, around, "zigzag")
    passed = part * hops // pieces
    kept = (tokens * (counts.width + (counts.query + counts.concat) // heads) + part) * size
    return Way(
        "ring" if heads == 1 else "head-parallel" if around == 1 else f"heads {heads} × {around}",
        reduced + shared + passed * size,
        reduced + shared + passed * (size + SUM_BYTES),
        2 * (counts.parameters // heads) * size * (around - 1) // around,
        rounds=2 * (heads - 1) + (1 if shared else 0) + around - 1, hops=around - 1,
        passed=passed * size, weights=counts.parameters * size // heads, kept=kept + _lse(counts, work) // devices,
        buffers=(tokens * counts.width if heads > 1 else 0) * size + (2 * part if around > 1 else 0) * size,
    )  # fmt: skip


def ulysses(counts: Counts, work: Work, devices: int) -> Way:
    """Four all-to-alls, of q, k, v and the result: b·n/P·(h + h_kv)·(d_k + d_v)·e·(P − 1)/P in each pass, the backward
    one with their gradients.

    A key head goes to every device whose query heads read it: with h_kv < P, which divides h, P of them go instead of
    h_kv.

    Raises:
        ConfigError: naming both numbers, if there are fewer heads than devices.
    """
    return hybrid(counts, work, devices, devices)


def ring(counts: Counts, work: Work, devices: int, *, layout: str = "zigzag") -> Way:
    """P − 1 times the keys and values of n/P tokens, b·n/P·h_kv·(d_k + d_v)·e; backward the same again, and with them
    their gradients in float32.

    Any P, any heads. Each piece of keys goes as far as a query sees it. layout: under a causal mask "zigzag" shares the
    work evenly (Striped Attention, Brandon et al. 2023, 2311.09431, by chunks), and all keys but the last chunk go all
    the way: (2P − 1)/2P of the above. "contiguous" sends half, and the last device computes 2P − 1 times what the first
    does; under a window its keys go no farther than that reaches.
    """
    _check(counts, work, devices)
    check_choice("layout", layout, ("zigzag", "contiguous"))
    return _hybrid(counts, work, 1, devices, layout)


def hybrid(counts: Counts, work: Work, devices: int, heads: int) -> Way:
    """A mesh of U × R devices: Ulysses over U of them, which share the heads of n/R tokens, and a ring of R.

    Each all-to-all stays within U devices, and each device sends the keys of h_kv/U heads round: so U fits the fast
    links of a machine, and R the slow ones between machines (Fang & Zhao 2024, 2405.07719).

    Args:
        heads: U; it divides the devices, and there are as many heads.
    Raises:
        ConfigError: naming both numbers, if not.
    """
    _check(counts, work, devices)
    positive(heads=heads)
    if devices % heads:
        raise ConfigError(f"heads={heads}: does not divide devices={devices}")
    if counts.heads < heads:
        raise ConfigError(f"Ulysses: num_heads={counts.heads} is too small for {heads} devices")
    return _hybrid(counts, work, heads, devices // heads, "zigzag")


def hiding_tokens(counts: Counts, work: Work, peak: float, link: float, *, backward: bool = False) -> float:
    """Tokens n/P of each device from which on a ring hides what it sends behind what it computes.

    A hop takes 2·b·(n/P)²·h·(d_k + d_v) FLOPs, half of that under a causal mask, and b·(n/P)·h_kv·(d_k + d_v)·e bytes:
    n/P ≥ e·h_kv/(2·h) · peak/link, twice that if causal (Liu et al. 2023, §3, of one head). Backward there are 2.5
    times the FLOPs and (e + 4)/e times the bytes. It depends neither on P nor on the size of a head.

    Args:
        peak: FLOP/s of a device. link: bytes/s that it sends.
    """
    _rates(peak=peak, link=link)
    size, work_share = work.size, 0.5 if work.causal else 1.0
    bytes_a_token = _kv(counts) * _head(counts) * (size + SUM_BYTES if backward else size)
    flops_a_pair = 2 * (counts.scores + counts.weighted_sum) * work_share * (BACKWARD if backward else 1.0)
    return bytes_a_token / flops_a_pair * peak / link


def exposed_seconds(
    way: Way, counts: Counts, work: Work, devices: int, *, peak: float, link: float, latency: float = 0.0
) -> float:
    """Seconds of a forward pass in which a device waits for others: all that it sends, but of a ring's hops only what
    outlasts the computation beside it.

    Args:
        peak, link: as in `hiding_tokens`. latency: seconds before a transfer begins.
    """
    _rates(peak=peak, link=link)
    around = way.passed
    waiting = (way.forward - around) / link + (way.rounds - way.hops) * latency
    if not way.hops:
        return waiting
    computed = attention_flops(counts, work) / devices / (way.hops + 1) / peak
    return waiting + way.hops * max(0.0, around / way.hops / link + latency - computed)


def attention_flops(counts: Counts, work: Work) -> int:
    """FLOPs of scores and weighted sum of a forward pass, all devices together."""
    return 2 * work.batch * work.pairs * (counts.scores + counts.weighted_sum)


def _hybrid(counts: Counts, work: Work, heads: int, around: int, layout: str) -> Way:
    """Ulysses over `heads` devices, a ring over `around`."""
    devices, size = heads * around, work.size
    tokens = work.batch * work.queries
    keys = tokens * _read(counts, heads) * _head(counts)  # of all devices
    part = keys // devices
    pieces, hops = _hops(work, around, layout)
    passed = keys // heads * hops // (pieces * around)  # numbers that a device passes on, in the mean
    shuffled = _shuffled(counts, work, devices, heads)
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
    """Into how many pieces the keys are cut, and how many hops they travel, all together: each as far as a query of
    some device sees a key of it."""
    if not work.causal:
        return around, around * (around - 1)
    pieces = around if layout == "contiguous" else 2 * around
    length = -(-work.queries // pieces)
    ahead = pieces if work.window is None else 0 if work.window == 1 else 1 + (work.window - 2) // length
    seen = [pieces if piece * length < work.sinks else ahead for piece in range(pieces)]  # by so many pieces after it
    if layout == "contiguous":
        return pieces, sum(min(around - 1 - s, seen[s]) for s in range(around))
    # Device s holds the pieces s and 2R − 1 − s. What comes after the first lies on devices s + 1 … R − 1, then back to
    # s, and at last on s − 1, which is R − 1 hops away; what comes after the second begins there.
    total = 0
    for s in range(around):
        total += around - 1 if s and seen[s] >= 2 * (around - s) else min(around - 1 - s, seen[s])
        total += around - 1 if s and seen[2 * around - 1 - s] else 0
    return pieces, total


def _shuffled(counts: Counts, work: Work, devices: int, heads: int) -> int:
    """Bytes that all-to-alls over `heads` of the devices send: queries, keys, values and results of n/P tokens."""
    numbers = counts.query + counts.concat + _read(counts, heads) * _head(counts)
    return work.batch * work.queries * numbers * work.size // devices * (heads - 1) // heads


def _read(counts: Counts, devices: int) -> int:
    """Key heads that the query heads of each device read, all devices together."""
    h, group = counts.heads, counts.heads // _kv(counts)
    cuts = [device * h // devices for device in range(devices + 1)]
    return sum((stop - 1) // group - start // group + 1 for start, stop in pairwise(cuts))


def _kv(counts: Counts) -> int:
    return counts.key_vectors


def _head(counts: Counts) -> int:
    """d_k + d_v."""
    return (counts.keys + counts.values) // counts.key_vectors


def _lse(counts: Counts, work: Work) -> int:
    return work.batch * work.queries * counts.heads * LSE_BYTES


def _check(counts: Counts, work: Work, devices: int) -> None:
    positive(devices=devices)
    if work.cross or work.queries != work.keys:
        raise ConfigError(f"queries={work.queries}, keys={work.keys}: expected self attention of all tokens")
    apart = counts.scores * counts.key_vectors == counts.heads * counts.keys and counts.used is None
    if not apart or counts.mixing:
        raise ConfigError(
            "counts: expected a design in which each query head uses one KV head, such as multi_head or gqa"
        )


def _rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0 < rate < float("inf"):
            raise ConfigError(f"{name}={rate}: expected a finite number above 0")
