"""Outputs and gradients of many ranks against those of one process."""

import random

import torch
import torch.distributed as dist
from compared import HOW, close, compare, nothing, raises
from samples import GAPS, MASKS, SCORES, kernels_here, qkv
from torch.distributed.device_mesh import init_device_mesh

import headwise as hw
from headwise import parallel
from headwise.parallel.layout import CHUNKS


def every_mask(rank: int, ranks: int) -> None:
    q, k, v = qkv(2, 4, 2, 37, 37)
    for how in HOW:
        for at, (name, mask) in enumerate(MASKS.items()):
            layout = ("zigzag", "contiguous")[(at + (how == "ring")) % 2]
            compare(how, q, k, v, mask=mask(2, 37, 37), layout=layout)
            assert name


def every_score(rank: int, ranks: int) -> None:
    """Soft caps, biases, sinks: with the gradients of their tensors, each rank's share added up."""
    q, k, v = qkv(2, 4, 2, 29, 29)
    for how in HOW:
        for at, scores in enumerate(SCORES.values()):
            mask = hw.Causal() if at % 2 else hw.Window(9, 4)
            compare(how, q, k, v, mask=mask, scores=scores, layout=("contiguous", "zigzag")[at % 2])
        for at, scores in enumerate(GAPS.values()):
            compare(
                how, *qkv(2, 4, 2, 23, 31), mask=hw.Causal(), scores=scores, layout=("zigzag", "contiguous")[at % 2]
            )


def random_shapes(rank: int, ranks: int) -> None:
    """Odd lengths, fewer tokens than ranks, cross attention, grouped keys, with whatever mask and scores."""
    chance = random.Random(11)
    for trial in range(14):
        b, h_kv, group = chance.choice([1, 2, 3]), chance.choice([1, 2, 3]), chance.choice([1, 2, 5])
        m = chance.choice([1, 2, 3, 5, 7, 11, 13, 31, 67])
        n = chance.choice([m, m, max(1, m // 2), max(1, m - 1)])
        d, e = chance.choice([1, 3, 8]), chance.choice([1, 5, 8])
        mask = chance.choice(list(MASKS.values()))(b, n, m) if m > 30 else chance.choice([hw.Causal(), None])
        scores = chance.choice([nothing, *SCORES.values()])
        layout = chance.choice(list(CHUNKS))
        q, k, v = qkv(b, h_kv * group, h_kv, n, m, d, e, seed=trial)
        for how in HOW:
            if how == "ring" or h_kv * group >= ranks:
                compare(how, q, k, v, mask=mask, scores=scores, layout=layout)


def heads_that_ranks_cut_unevenly(rank: int, ranks: int) -> None:
    """Six heads over four ranks, five over two; key heads that several ranks read, and groups cut within."""
    for h, h_kv in ((6, 3), (6, 2), (6, 1), (5, 1), (5, 5), (12, 4)):
        q, k, v = qkv(2, h, h_kv, 19, 19)
        dense = torch.rand(2, h, 19, 19, generator=torch.Generator().manual_seed(2)) > 0.5
        own, _ = compare(
            "ulysses", q, k, v, mask=hw.Causal() & hw.Dense(dense), scores=SCORES["all"], layout="contiguous",
            measures=["entropy", "received_mass"],
        )  # fmt: skip
        assert own.own.k.shape[1] <= own.own.q.shape[1]


def dark_rows_and_large_scores(rank: int, ranks: int) -> None:
    """A batch entry that sees nothing, rows that see nothing, logits of some thousands."""
    q, k, v = qkv(2, 4, 2, 23, 23)
    for how in HOW:
        compare(how, q, k, v, mask=hw.Lengths([0, 23]) & hw.Causal())
        compare(how, q, k, v, mask=hw.Documents(torch.full((23,), -1)), scores=SCORES["sinks"])
        compare(how, 100.0 * q, 10.0 * k, v, mask=hw.Causal(), near=5e-3)  # 2⁻²⁴ of a logit of thousands
        own, _ = compare(how, q, k, v, mask=hw.Lengths([0, 7]), measures=["entropy", "max_logit", "mean_distance"])
        assert bool(own.measured["entropy"][0].eq(0.0).all())


def numbers_that_are_none(rank: int, ranks: int) -> None:
    """NaN and infinity show where one process shows them, and are counted."""
    q, k, v = qkv(1, 4, 2, 17, 17)
    v[0, 1, 5, 2], k[0, 0, 9, 1] = torch.nan, torch.inf
    for how in HOW:
        layout = "zigzag"
        out, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True, measures=["entropy"])
        parts = [parallel.shard(x, layout) for x in (q, k, v)]
        found, own = HOW[how](*parts, mask=hw.Causal(), layout=layout, return_map=True, measures=["entropy"])
        assert torch.equal(found.isnan(), parallel.shard(out, layout).isnan())
        assert torch.equal(own.measured.nonfinite, amap.measured.nonfinite)
        assert own.measured.nonfinite_values.tolist() == [[0, 1]]
        if how == "ring":
            for one in (own.gather(), *own.maps()):
                assert one.nonfinite_values.tolist() == [[0, 1]]


def half_precision(rank: int, ranks: int) -> None:
    """At most twice the error of one process in the same dtype, against float64."""
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = qkv(2, 4, 2, 61, 61, 16, 16, dtype=dtype)
        exact = hw.attend(*(x.double() for x in (q, k, v)), mask=hw.Causal())
        alone = float((hw.attend(q, k, v, mask=hw.Causal()).double() - exact).abs().max())
        for how in HOW:
            own = [parallel.shard(x).requires_grad_() for x in (q, k, v)]
            out = HOW[how](*own, mask=hw.Causal(), layout="zigzag")
            assert out.dtype == dtype
            error = (out.double() - parallel.shard(exact)).abs().max().detach()
            assert float(error) <= 2.0 * alone
        compare("ring", q, k, v, mask=hw.Causal(), near=0.02)
        compare("ulysses", q, k, v, mask=hw.Causal(), near=0.02)


def float64_and_kernels_by_name(rank: int, ranks: int) -> None:
    q, k, v = qkv(2, 4, 2, 31, 31, dtype=torch.float64)
    for how in HOW:
        compare(how, q, k, v, mask=hw.Causal(), scores=SCORES["all"], near=1e-12)
        for kernel in ("torch_blocks", "reference"):
            own, _ = compare(how, q.float(), k.float(), v.float(), mask=hw.Causal(), kernel=kernel)
            assert (own.kernels if how == "ring" else (own.own.kernel,)) == (kernel,)


def the_kernel_that_is_named_reads_the_map(rank: int, ranks: int) -> None:
    """Or raises on every rank; `using` gives the map to another."""
    q, k, v = qkv(1, 4, 2, 32, 32)
    parts = [parallel.shard(x, "contiguous") for x in (q, k, v)]
    even = hw.stats.row_measure("even", lambda tile: tile.weights[..., tile.keys % 2 == 0].sum(-1))
    _, whole = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
    for how, attention in (("ring", parallel.ring_attend), ("ulysses", parallel.ulysses_attend)):
        for kernel in ("reference", "torch_blocks"):
            _, own = attention(*parts, mask=hw.Causal(), layout="contiguous", kernel=kernel, return_map=True)
            assert own.named == kernel
            close("even", own.measure(even)["even"], whole.measure(even)["even"], 1e-5)
            if how == "ring":
                close("picture", own.pool(5), whole.pool(5), 1e-5)
            for one in own.maps() if how == "ring" else (own.own,):
                one.row(0)
                assert (one.named, one.read_by["weights"]) == (kernel, kernel)
        if "cpu" in kernels_here():
            _, own = attention(*parts, mask=hw.Causal(), layout="contiguous", kernel="cpu", return_map=True)
            raises(hw.KernelError, "kernel='cpu' cannot read this map", own.measure, even)
            close("even", own.using("auto").measure(even)["even"], whole.measure(even)["even"], 1e-5)


def what_is_changed_between_the_passes_is_noticed(rank: int, ranks: int) -> None:
    """The tensors of masks and scores too; and second derivatives are refused."""
    q, k, v = (parallel.shard(x, "contiguous").requires_grad_() for x in qkv(1, 4, 2, 32, 32))
    seen, bias = torch.ones(32, 32, dtype=torch.bool).tril(), torch.zeros(1, 4, 32, 32)
    for given in (seen, bias):
        mask, score = (hw.Dense(seen), ()) if given is seen else (None, hw.Bias(bias))
        out = parallel.ring_attend(q, k, v, mask=mask, score=score, layout="contiguous")
        given.copy_(given.roll(1, -1))
        raises(RuntimeError, "modified by an inplace operation", out.sum().backward)
    out = parallel.ring_attend(q, k, v, mask=hw.Causal(), layout="contiguous")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    raises(hw.KernelError, "ring_attend has no second derivative", dq.square().sum().backward)


def plain_blocks_know_no_place(rank: int, ranks: int) -> None:
    """Blocks of a causal call are full or stand on the diagonal, which PyTorch's own operator can do."""
    q, k, v = qkv(1, 4, 4, 32, 32, 8, 8)
    own, _ = compare("ring", q, k, v, mask=hw.Causal(), kernel="torch_fused")
    assert own.kernels == ("torch_fused",)
    compare("ring", q, k, v, kernel="torch_fused", layout="contiguous")


def dropout(rank: int, ranks: int) -> None:
    """The backward pass drops what the forward pass dropped: out is linear in v, so ⟨dOut, out⟩ = ⟨dV, v⟩."""
    q, k, v = qkv(2, 4, 2, 33, 33)
    for how in HOW:
        for scores in (nothing, SCORES["relative"]):
            own = [parallel.shard(x).requires_grad_() for x in (q, k, v)]
            asked = {"mask": hw.Causal(), "score": scores(2, 4, 33, 33), "layout": "zigzag"}
            torch.manual_seed(7)
            out = HOW[how](*own, dropout_p=0.4, **asked)
            torch.manual_seed(7)
            assert torch.equal(out, HOW[how](*own, dropout_p=0.4, **asked))
            assert not torch.allclose(out, HOW[how](*own, **asked))
            toward = torch.randn_like(out)
            (dv,) = torch.autograd.grad((out * toward).sum(), own[2:])
            sides = torch.stack([(out * toward).sum(), (dv * own[2]).sum()]).double()
            dist.all_reduce(sides)
            close("⟨dV, v⟩", sides[1], sides[0], 1e-4)
    own = [parallel.shard(torch.zeros(1, 4, 2000, 1)), parallel.shard(torch.zeros(1, 4, 2000, 1))]
    values = parallel.shard(torch.ones(1, 4, 2000, 1))
    for how in HOW:
        kept = HOW[how](*own, values, dropout_p=0.25, layout="zigzag")
        assert abs(float(kept.mean()) - 1.0) < 0.01  # on the mean nothing is lost


def groups_and_meshes(rank: int, ranks: int) -> None:
    """A mesh, a dimension of a larger mesh, and a group that not all are in."""
    q, k, v = qkv(1, 4, 2, 21, 21)
    compare("ring", q, k, v, mask=hw.Causal(), group=init_device_mesh("cpu", (ranks,)).get_group())
    compare("ulysses", q, k, v, mask=hw.Causal(), group=init_device_mesh("cpu", (ranks,)).get_group())
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "sequence"))
    q, k, v = qkv(1, 4, 2, 21, 21, seed=rank // 2)  # another text in each row of the mesh
    for how in HOW:
        part = [parallel.shard(x, group=mesh["sequence"]) for x in (q, k, v)]
        out = HOW[how](*part, mask=hw.Causal(), layout="zigzag", group=mesh["sequence"])
        whole = parallel.unshard(out, group=mesh["sequence"])
        close("out", whole, hw.attend(q, k, v, mask=hw.Causal()), 1e-5)
    last = dist.new_group([ranks - 1])
    if rank == ranks - 1:
        compare("ring", q, k, v, mask=hw.Causal(), group=last)  # one rank alone, in two chunks


def there_and_back(rank: int, ranks: int) -> None:
    """unshard(shard(x)) is x, whatever the length; its gradient is the sum of what all ranks ask."""
    for layout in CHUNKS:
        for length in (0, 1, ranks, 2 * ranks + 1, 37):
            x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(length), requires_grad=True)
            part = parallel.shard(x, layout)
            whole = parallel.unshard(part, layout)
            assert torch.equal(whole, x)
            (gradient,) = torch.autograd.grad(((rank + 1) * whole).sum(), x)
            wanted = torch.zeros_like(x)
            for piece in parallel.Layout(layout, length, ranks).pieces(rank):
                wanted[:, piece.start : piece.stop] = ranks * (ranks + 1) / 2
            assert torch.equal(gradient, wanted)
    ids = torch.arange(11)
    assert torch.equal(parallel.unshard(parallel.shard(ids, dim=-1), dim=-1), ids)


def between_graphs(rank: int, ranks: int) -> None:
    """In torch.compile the call stands between two graphs."""
    q, k, v = (parallel.shard(x) for x in qkv(1, 4, 2, 13, 13))
    for attend in HOW.values():

        def call(q, k, v, attend=attend):
            return attend(q + 1.0, k, v, mask=hw.Causal(), layout="zigzag") * 2.0

        close("out", torch.compile(call, backend="eager")(q, k, v), call(q, k, v), 1e-6)


CASES = {
    case.__name__: case
    for case in (
        every_mask, every_score, random_shapes, heads_that_ranks_cut_unevenly, dark_rows_and_large_scores,
        numbers_that_are_none, half_precision, float64_and_kernels_by_name,
        the_kernel_that_is_named_reads_the_map, what_is_changed_between_the_passes_is_noticed,
        plain_blocks_know_no_place, dropout,
        groups_and_meshes, there_and_back, between_graphs,
    )
}  # fmt: skip
