"""Heads and sequences that PyTorch's own parallelism has split, on two ranks: read right, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import qkv
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

import headwise as hw
from headwise import parallel
from headwise.fields import Array, Number
from headwise.masks import Grid
from headwise.scores import Score
from headwise.scores.base import Terms

WIDTH, HEADS, KV_HEADS, SIZE, EXPLODES = 44, 8, 4, 5, 6
X = torch.randn(2, 13, WIDTH, generator=torch.Generator().manual_seed(3))
SPLIT = {
    "q_proj": ColwiseParallel(),
    "k_proj": ColwiseParallel(),
    "v_proj": ColwiseParallel(),
    "o_proj": RowwiseParallel(),
}
GATHERED = {"q_proj": ColwiseParallel(output_layouts=Replicate())}


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Grouped queries, with keys repeated, by a module without parameters, as torchtitan has it."""

    head_dim, num_key_value_groups = SIZE, HEADS // KV_HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KV_HEADS * SIZE) for _ in "kv")
        self.inner: Any = Inner()

    def forward(self, x: Tensor) -> Tensor:
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (linear(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for linear in maps)
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        return self.o_proj(self.inner(q, k, v).transpose(1, 2).flatten(2))


class Inline(Attention):
    """The same by its own code."""

    def __init__(self) -> None:
        super().__init__()
        del self.inner
        self.inner = Inner().forward


class Fused(nn.Module):
    """Queries, keys and values of one map, [head, 3, d] of each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, SIZE)).permute(3, 0, 2, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def model(kind: type[nn.Module] = Attention) -> nn.Sequential:
    torch.manual_seed(2)
    made = nn.Sequential(kind(), kind())
    with torch.no_grad():
        first: Any = made[0]
        if isinstance(first, Attention):
            first.q_proj.weight[EXPLODES * SIZE : (EXPLODES + 1) * SIZE] *= 60
    return made


def mesh_of(ranks: int) -> Any:
    return dist.init_device_mesh("cpu", (ranks,))


def split(plan: dict[str, Any], ranks: int, kind: type[nn.Module] = Attention) -> nn.Sequential:
    made = model(kind)
    for layer in made:
        parallelize_module(layer, mesh_of(ranks), plan)
    return made


def gates_of(one: nn.Module) -> hw.telemetry.GateGradients:
    with hw.telemetry.gate_gradients(one) as gates:
        one(X).square().mean().backward()
    return gates


def records_have_all_heads_once_by_their_own_numbers(rank: int, ranks: int) -> None:
    of_rank = HEADS // ranks
    for kind, plan, own in (
        (Attention, SPLIT, range(rank * of_rank, (rank + 1) * of_rank)),
        (Fused, {"qkv": ColwiseParallel(), "o": RowwiseParallel()}, range(rank * of_rank, (rank + 1) * of_rank)),
        (Attention, GATHERED, range(HEADS)),
        (Attention, {}, range(HEADS)),
    ):
        one, many = model(kind), split(plan, ranks, kind)
        with hw.watch(one) as alone, hw.watch(many) as record:
            one(X), many(X)
        assert [head for _, head in record.latest.places] == [*own, *own]
        reduced = record.reduce()
        assert reduced.latest.places == alone.latest.places
        assert_close(reduced.latest.numbers, alone.latest.numbers, rtol=1e-4, atol=1e-5, equal_nan=True)
        for found, want in zip(gates_of(many).importance().column, gates_of(one).importance().column, strict=True):
            assert torch.as_tensor(found).isnan().sum() == HEADS - len(own)
            assert_close(found[own], want[own], rtol=1e-4, atol=1e-9)


def the_head_that_explodes_is_clipped_alone(rank: int, ranks: int) -> None:
    one, many = model(Inline), split(SPLIT, ranks, Inline)
    with hw.watch(one) as alone, hw.watch(many) as record:
        one(X), many(X)
    tau = 0.2 * float(alone.latest["max_logit"][0, EXPLODES])
    with pytest.raises(hw.ConfigError, match=r"record\.reduce\(\)"):
        hw.telemetry.qk_clip(many, record, tau=tau)
    clipped = [hw.telemetry.qk_clip(one, alone, tau=tau), hw.telemetry.qk_clip(many, record.reduce(), tau=tau)]
    assert [head for _, head, *_ in clipped[1].heads] == [EXPLODES]
    for want, found in zip(one.parameters(), many.parameters(), strict=True):
        assert_close(found.full_tensor() if isinstance(found, DTensor) else found, want, rtol=1e-5, atol=1e-6)


def what_cannot_be_read_is_refused_by_name(rank: int, ranks: int) -> None:
    many = split({"qkv": ColwiseParallel()}, ranks, Fused)
    for layer in many:
        layer.o = nn.Linear(HEADS * SIZE // ranks, WIDTH)
    refused = r"Fused: qkv\.weight is split over ranks"
    with pytest.raises(hw.ConfigError, match=refused), hw.watch(many, on_error="raise"):
        many(X)
    with pytest.warns(UserWarning, match=refused), hw.watch(many) as record:
        many(X)
    assert record.latest.numbers.isnan().all()


def heads_that_are_split_without_dtensors_are_not_added_up(rank: int, ranks: int) -> None:
    """As in Megatron-LM: each rank has its rows, and no parameter says so."""
    own: Any = model(Inline)
    for layer in own:
        layer.num_heads = HEADS
        for linear, axis in ((layer.q_proj, 0), (layer.k_proj, 0), (layer.v_proj, 0), (layer.o_proj, 1)):
            linear.weight = nn.Parameter(linear.weight.chunk(ranks, axis)[rank])
            if axis == 0:
                linear.bias = nn.Parameter(linear.bias.chunk(ranks)[rank])
    with hw.watch(own) as record:
        own(X)
    with pytest.raises(hw.ConfigError, match="split without DTensors"):
        record.reduce()


def edits_of_split_heads_are_refused(rank: int, ranks: int) -> None:
    many = split(SPLIT, ranks)
    own = parallel.parallelize_heads(hw.MultiHeadAttention(WIDTH, 4, bias=False), mesh_of(ranks))
    sites, gates = hw.find_heads(many), [torch.ones(HEADS)] * 2
    with pytest.raises(hw.ConfigError, match=r"0: .* DTensor"):
        hw.edit.prune(many, {0: [0, 1]})
    with pytest.raises(hw.ConfigError, match=r"0: .* DTensor"):
        hw.edit.merge_kv(many, 2)
    with pytest.raises(hw.ConfigError, match="split over ranks"):
        sites[0].weights()
    with pytest.raises(hw.ConfigError, match="split over ranks"), hw.models.scale_heads(sites, gates):
        many(X)
    with pytest.raises(hw.ConfigError, match="split over ranks"), hw.models.record_heads(sites):
        many(X)
    with pytest.raises(hw.ConfigError, match="split over ranks"):
        hw.analysis.gradient_importance(many, [X], lambda net, x: net(x).square().mean())
    with (
        pytest.raises(hw.ConfigError, match="split over ranks"),
        hw.intervene(own, hw.interventions.Scale(0, heads=[1])),
    ):
        own(X)


def attention_to_a_part_of_a_sequence_is_refused(rank: int, ranks: int) -> None:
    q, k, v = qkv(1, 4, 2, 8, 8, 6, 6)
    layer, theirs = hw.MultiHeadAttention(WIDTH, 4), nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def attached(x: Tensor) -> Any:
        with hw.attach(theirs):
            return theirs(x, x, x)

    calls: list[Callable[[Tensor], Any]] = [
        lambda _: hw.attend(q, k, v), lambda _: hw.attend(q, k, v, return_map=True), layer, attached,
    ]  # fmt: skip
    x = torch.randn(1, 16, WIDTH)
    for call in calls:
        part = context_parallel(mesh_of(ranks), buffers=[x], buffer_seq_dims=[1])
        with pytest.raises(hw.ConfigError, match="context_parallel is active"), part, torch.no_grad():
            call(x)
    assert len(x[0]) == 16
    for call in calls:  # it is over
        call(x)
    with context_parallel(mesh_of(ranks), buffers=[x], buffer_seq_dims=[1]):
        parallel.ring_attend(q, k, v)


def dtensors_are_refused(rank: int, ranks: int) -> None:
    whole = qkv(1, 4, 4, 8, 8, 6, 6)
    for placement in (Shard(1), Shard(2), Replicate()):
        q, k, v = (distribute_tensor(x, mesh_of(ranks), [placement]) for x in whole)
        assert isinstance(q, DTensor)
        for call in (hw.attend, parallel.ring_attend, parallel.ulysses_attend):
            with pytest.raises(hw.DTypeError, match="q: expected a plain tensor, got a DTensor"):
                call(q, k, v)


class Slope(Score):
    """A bias that falls with the distance, by a rate of each head; without a `__repr__`."""

    holds = {"rates": Array("h"), "factor": Number()}
    placed = True
    __repr__ = object.__repr__

    def __init__(self, rates: Tensor, factor: float) -> None:
        self.rates, self.factor = rates, factor

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        return hw.ALiBi(self.rates * self.factor).terms(grid, like)


def ranks_compare_what_scores_hold(rank: int, ranks: int) -> None:
    whole, rates = qkv(1, 4, 2, 8 * ranks, 8 * ranks, 6, 6), torch.rand(4).bfloat16()
    mine = [parallel.shard(x) for x in whole]
    out = parallel.ring_attend(*mine, mask=hw.Causal(), score=Slope(rates, 0.5))
    want = hw.attend(*whole, mask=hw.Causal(), score=Slope(rates, 0.5))
    assert_close(out, parallel.shard(want), rtol=1e-5, atol=1e-5)
    for other in (Slope(rates + rank, 0.5), Slope(rates, 0.5 + rank), hw.ALiBi(rates.float() + rank)):
        with pytest.raises(hw.ConfigError, match="score differs between the ranks"):
            parallel.ring_attend(*mine, score=other)


CASES = {
    case.__name__: case
    for case in (
        records_have_all_heads_once_by_their_own_numbers, the_head_that_explodes_is_clipped_alone,
        what_cannot_be_read_is_refused_by_name, heads_that_are_split_without_dtensors_are_not_added_up,
        edits_of_split_heads_are_refused,
        attention_to_a_part_of_a_sequence_is_refused, dtensors_are_refused, ranks_compare_what_scores_hold,
    )
}  # fmt: skip
