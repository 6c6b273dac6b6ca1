"""What is sent, what is skipped, and what happens when a rank is called wrongly or fails."""

from datetime import timedelta

import torch
import torch.distributed as dist
from compared import HOW, raises
from counted import counted
from largest_tensor import Largest
from samples import kernels_here, qkv
from torch import Tensor

import headwise as hw
from headwise import parallel
from headwise.parallel import layout as blocks
from headwise.parallel.layout import CHUNKS
from headwise.parallel.ulysses import shares


def mine(layout: str, *whole: Tensor) -> list[Tensor]:
    return [parallel.shard(x, layout).requires_grad_() for x in whole]


def total(number: int) -> int:
    """Over all ranks."""
    every = torch.tensor([number])
    dist.all_reduce(every)
    return int(every)


def bytes_of_a_ring(rank: int, ranks: int) -> None:
    """The formulas of `ring_plan`, to the byte, in both passes and all layouts."""
    n, b, h_kv, d, e = 8 * ranks, 2, 2, 8, 5
    numbers = b * h_kv * (d + e)  # of a token
    part = n // ranks
    short = hw.Causal() & hw.Window(part)
    for layout, mask, hops in (
        ("zigzag", None, n * (ranks - 1)),
        ("zigzag", hw.Causal(), part // 2 * (2 * ranks - 1) * (ranks - 1)),  # nobody else needs the last chunk
        ("contiguous", None, n * (ranks - 1)),
        ("contiguous", hw.Causal(), part * ranks * (ranks - 1) // 2),  # rank s: R − 1 − s hops
        ("contiguous", short, part * (ranks - 1)),  # one hop, and nobody needs the last rank's
        ("contiguous", hw.Documents(torch.arange(n) // part), 0),
    ):
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            q, k, v = mine(layout, *qkv(b, 4, h_kv, n, n, d, e, dtype=dtype))
            with counted() as sent:
                out = parallel.ring_attend(q, k, v, mask=mask, layout=layout)
            assert total(sent.by["send"]) == hops * numbers * size, (layout, mask)
            with counted() as sent:
                out.sum().backward()
            assert total(sent.by["send"]) == hops * numbers * (size + 4), (layout, mask)
            assert set(sent.by) <= {"send"}


def bytes_of_ulysses(rank: int, ranks: int) -> None:
    """The formulas of `ulysses_exchange`, where heads divide and where they do not."""
    for h, h_kv in ((8, 4), (6, 2), (5, 1)):
        n, b, d, e = 5 * ranks, 2, 8, 3
        q, k, v = mine("contiguous", *qkv(b, h, h_kv, n, n, d, e))
        of_ranks = shares(h, h_kv, ranks)
        held, own = n // ranks, of_ranks[rank]
        others = [one for at, one in enumerate(of_ranks) if at != rank]
        there = sum(b * held * (len(one.queries) * d + len(one.keys) * (d + e)) * 4 for one in others)
        back = len(others) * b * len(own.queries) * held * e * 4
        with counted() as sent:
            out = parallel.ulysses_attend(q, k, v, mask=hw.Causal())
        assert sent.by["all_to_all"] == there + back
        with counted() as sent:
            out.sum().backward()
        of_keys = len(others) * b * held * (len(own.queries) * d + len(own.keys) * (d + e)) * 4
        from_rows = sum(b * len(one.queries) * held * e * 4 for one in others)
        assert sent.bytes == sent.by["all_to_all"] == of_keys + from_rows


def work_is_even_in_zigzag(rank: int, ranks: int) -> None:
    """Under a causal mask every rank computes as many cells in the zigzag layout, and not in the other."""
    cells = 0
    run = blocks.run

    def counting(call, name):
        nonlocal cells
        _, _, n, m = call.rule.grid
        dense = call.rule.mask.allowed(torch.arange(n), torch.arange(m), call.rule.grid)
        cells += int(dense.expand(1, 1, n, m).sum())
        return run(call, name)

    n = 16 * ranks
    found = {}
    blocks.run = counting
    try:
        for layout in ("zigzag", "contiguous"):
            cells = 0
            parallel.ring_attend(*mine(layout, *qkv(1, 2, 2, n, n)), mask=hw.Causal(), layout=layout)
            told = torch.zeros(ranks, dtype=torch.long)
            told[rank] = cells
            dist.all_reduce(told)
            found[layout] = told
            assert int(told.sum()) == n * (n + 1) // 2  # each cell once, and no block that is empty
    finally:
        blocks.run = run
    assert int(found["zigzag"].max()) == int(found["zigzag"].min())
    assert int(found["contiguous"].max()) > int(found["contiguous"].min())


def no_rank_holds_the_whole(rank: int, ranks: int) -> None:
    """In both passes and with statistics, no tensor is larger than a rank's own queries or keys and values."""
    if "cpu" not in kernels_here():
        return  # torch_blocks works in tiles of a size of its own
    part, h, d = 512, 4, 8
    whole = qkv(1, h, 2, part * ranks, part * ranks, d, d)
    for layout in CHUNKS:
        own = mine(layout, *whole)
        for mask in (hw.Causal(), hw.Causal() & hw.Window(100), None):
            with Largest() as held:
                out, _ = parallel.ring_attend(
                    *own, mask=mask, layout=layout, return_map=True, measures=["entropy", "mean_distance"]
                )  # fmt: skip
                out.sum().backward()
            assert held.numel <= part * h * d + 64


def mistakes_are_told_on_every_rank(rank: int, ranks: int) -> None:
    last = rank == ranks - 1
    for name, attend in HOW.items():
        q, k, v = (x.detach() for x in mine("contiguous", *qkv(1, 4, 2, 4 * ranks, 4 * ranks)))

        def call(q=q, k=k, v=v, attend=attend, **options):
            return attend(q, k, v, **{"layout": "contiguous", **options})

        cut = slice(0, 2) if last else slice(None)
        held = ", ".join(["4"] * (ranks - 1) + ["2"])
        raises(hw.ShapeError, f"k: the ranks hold {held} tokens", call, k=k[:, :, cut], v=v[:, :, cut])
        raises(hw.ShapeError, f"q: the ranks hold {held} tokens", call, q=q[:, :, cut])
        raises(hw.ShapeError, "v: shape", call, v=v[:, :, cut])  # wrong by itself, on the last rank
        raises(hw.DTypeError, "v is torch.float64, but q is torch.float32", call, v=v.double() if last else v)
        raises(hw.ConfigError, "dtype differs", call, *(x.double() if last else x for x in (q, k, v)))
        raises(hw.ShapeError, "batch differs", call, *(x.repeat(2, 1, 1, 1) if last else x for x in (q, k, v)))
        raises(hw.ConfigError, "mask differs", call, mask=hw.Window(3) if last else hw.Window(2))
        ids = torch.arange(4 * ranks) // (2 if last else 3)
        raises(hw.ConfigError, "mask differs", call, mask=hw.Documents(ids))
        raises(hw.ConfigError, "scale differs", call, scale=0.5 if last else 0.4)
        raises(hw.ConfigError, "score differs", call, score=hw.SoftCap(5.0) if last else ())
        raises(hw.ConfigError, "layout differs", call, layout="zigzag" if last else "contiguous")
        raises(hw.ConfigError, "need of gradients differs", call, q=q.clone().requires_grad_(last))
        raises(hw.ConfigError, "layout='stripes': expected 'contiguous' or 'zigzag'", call, layout="stripes")
        raises(hw.ShapeError, "Documents(ids)", call, mask=hw.Documents(torch.zeros(3, dtype=torch.long)))
        raises(hw.ShapeError, "ALiBi", call, score=hw.ALiBi([0.5]))
        raises(hw.DTypeError, "mask: expected a headwise mask", call, mask=torch.ones(2, 2).bool())
        raises(hw.DTypeError, "score: expected headwise scores", call, score=3)
        raises(hw.DTypeError, "torch.Tensor", call, q="q" if last else q)
        if name == "ulysses":
            few = [x[:, : ranks - 1] for x in (q, q, q)]
            raises(hw.ShapeError, f"too few for {ranks} ranks", call, *few)
        call()  # and after all that the ranks are in step
    raises(hw.ShapeError, "x: the ranks hold", parallel.unshard, torch.zeros(1, 5 + 3 * last, 2))


def maps_of_changed_inputs_raise_on_every_rank(rank: int, ranks: int) -> None:
    """Where one rank's input, or a tensor of the mask, was changed in place since; and the ranks are then in step."""
    last, n = rank == ranks - 1, 4 * ranks
    q, k, v = (x.detach() for x in mine("zigzag", *qkv(1, 4, 2, n, n)))
    k.mul_(2.0)  # written to before: every later change still counts
    allowed = torch.ones(n, n).tril().bool()

    def made(how: str, mask=None):
        return HOW[how](q, k, v, mask=hw.Dense(allowed) if mask is None else mask, return_map=True)[1]

    reads = {
        "measure": lambda amap: amap.measure("entropy"), "pooled": lambda amap: amap.pool(3),
        "maps": lambda amap: amap.maps(), "gather": lambda amap: amap.gather(),
    }  # fmt: skip
    for x, said in ((q, "q, or a tensor"), (k, "k, or a tensor"), (allowed, "a tensor of its mask, or a tensor")):
        amap = made("ring")
        for read in reads.values():
            read(amap)
        if last:
            x[..., -1:, :] = ~x[..., -1:, :] if x is allowed else x[..., -1:, :] * 0.5
        other = "" if last else f"rank {ranks - 1} of the group raised: "
        for name, read in reads.items():
            start = other and f"RingMap.{name}: {other}"
            raises(hw.ConfigError, f"{start}this attention map cannot be read any more: {said}", read, amap)
        repr(amap)
        if last and x is allowed:
            x[..., -1:, :] = ~x[..., -1:, :]
    amap = made("ulysses")
    before = amap.measure("entropy")["entropy"]
    if last:
        q.mul_(0.5)
        raises(hw.ConfigError, "q, or a tensor that shares its memory", lambda: amap.q)
    assert torch.equal(amap.measure("entropy")["entropy"], before)  # of its own copies
    if last:
        allowed[:, 0] = True
    raises(hw.ConfigError, "a tensor of its mask", amap.measure, "entropy")
    made("ring", hw.Causal()).measure("entropy")


def a_rank_that_fails_does_not_hold_the_others_for_long(rank: int, ranks: int) -> None:
    """They get an error within the group's timeout, which says whom they waited for."""
    own = dist.new_group(timeout=timedelta(seconds=6))
    q, k, v = (x.detach() for x in mine("zigzag", *qkv(1, 4, 2, 4 * ranks, 4 * ranks)))
    parallel.ring_attend(q, k, v, group=own)  # connected now
    dist.barrier()
    meet = blocks.Rows.meet

    def fail(*_):
        raise MemoryError("no room")

    try:
        blocks.Rows.meet = fail if rank == 0 else lambda *_: None
        if rank == 0:
            raises(MemoryError, "no room", parallel.ring_attend, q, k, v, group=own)
        else:
            raises(RuntimeError, "see the first error there", _twice, q, k, v, own)
    finally:
        blocks.Rows.meet = meet


def _twice(q: Tensor, k: Tensor, v: Tensor, group) -> None:
    """The first pass may need no more of the rank that fails than it has sent already."""
    for _ in range(2):
        parallel.ring_attend(q, k, v, group=group)


CASES = {
    case.__name__: case
    for case in (
        bytes_of_a_ring, bytes_of_ulysses, work_is_even_in_zigzag, no_rank_holds_the_whole,
        mistakes_are_told_on_every_rank, maps_of_changed_inputs_raise_on_every_rank,
        a_rank_that_fails_does_not_hold_the_others_for_long,
    )
}  # fmt: skip
