"""Models of transformers and accelerate's and torchtitan's calls, split over two ranks."""

import importlib.util
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental import _attention as context, context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

import headwise as hw
from headwise.kernels.spread import held_by

HEADS, SIZE, EXPLODES = 8, 6, 6
IDS = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(3))


def llama(kv_heads: int = 4) -> Any:
    import transformers

    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=97, hidden_size=56, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=kv_heads,
        head_dim=SIZE, intermediate_size=88, initializer_range=0.2,
    )).eval()  # fmt: skip
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[EXPLODES * SIZE : (EXPLODES + 1) * SIZE] *= 40
    return model


def parallelized(model: Any, mesh: Any) -> Any:
    names = ("q_proj", "k_proj", "v_proj")
    plan: dict[str, Any] = {f"self_attn.{name}": ColwiseParallel() for name in names}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def same_numbers(one: Any, many: Any, layer: int = 0) -> None:
    """Statistics, and what `qk_clip` does, are those of one process."""
    with hw.watch(one) as alone, hw.watch(many) as record:
        one(IDS), many(IDS)
    reduced = record.reduce()
    assert reduced.latest.places == alone.latest.places
    assert_close(reduced.latest.numbers, alone.latest.numbers, rtol=1e-4, atol=1e-4, equal_nan=True)
    tau = float(alone.latest["max_logit"][0].sort().values[-2:].mean())
    clipped = hw.telemetry.qk_clip(one, alone, tau=tau), hw.telemetry.qk_clip(many, reduced, tau=tau)
    heads = [[entry[:2] for entry in result.heads] for result in clipped]
    assert heads[0] == heads[1] != []
    with hw.watch(one) as alone, hw.watch(many) as record:
        one(IDS), many(IDS)
    assert_close(record.reduce().latest.numbers, alone.latest.numbers, rtol=1e-4, atol=1e-4, equal_nan=True)


def a_model_under_parallelize_module(rank: int, ranks: int) -> None:
    mesh = dist.init_device_mesh("cpu", (ranks,))
    for kv_heads in (HEADS, 4):
        same_numbers(llama(kv_heads), parallelized(llama(kv_heads), mesh))


class Failing(hw.stats.RowMeasure):
    """Fails on its first tile."""

    name, unit, range, source = "failing", "share", "0 to 1", "none"

    def partial(self, tile: Any) -> Any:
        raise ZeroDivisionError


def calls_that_are_not_measured(rank: int, ranks: int) -> None:
    """They are of the heads of their rank."""
    many = parallelized(llama(), dist.init_device_mesh("cpu", (ranks,)))
    with pytest.warns(UserWarning, match="could not be measured"), hw.watch(many, measures=[Failing()]) as record:
        many(IDS)
    reduced = record.reduce().latest
    assert [head for _, head in reduced.places] == [*range(HEADS)] * 2
    assert reduced.numbers.isnan().all()


class FailingOnOneRank(Failing):
    """Fails on rank 0."""

    def partial(self, tile: Any) -> Any:
        return super().partial(tile) if dist.get_rank() == 0 else tile.weights.sum(-1)


def a_measure_that_fails_on_one_rank(rank: int, ranks: int) -> None:
    """It is unknown to all ranks, for the heads of that one."""
    many = parallelized(llama(), dist.init_device_mesh("cpu", (ranks,)))
    record = hw.watch(many, measures=["entropy", FailingOnOneRank()])
    with warnings.catch_warnings(), record:
        warnings.simplefilter("ignore")
        many(IDS)
    unknown = record.reduce().latest["failing"].isnan()
    assert unknown.tolist() == [[head < HEADS // ranks for head in range(HEADS)]] * 2
    assert not record.reduce().latest["entropy"].isnan().any()
    reduced = hw.watch(llama(), measures=["entropy", FailingOnOneRank()])  # the same heads on all ranks
    with warnings.catch_warnings(), reduced:
        warnings.simplefilter("ignore")
        reduced.model(IDS)
    assert reduced.reduce().latest["failing"].isnan().all()


class Narrow(nn.Module):
    """Heads of one channel, of which ranks may have different numbers."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, heads) for _ in range(3))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [map_(x).transpose(1, 2)[..., None] for map_ in (self.q, self.k, self.v)]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*self.heads(x))


def heads_that_are_split_unevenly(rank: int, ranks: int) -> None:
    mesh, x = dist.init_device_mesh("cpu", (ranks,)), torch.randn(2, 5, 6)
    plan: dict[str, Any] = dict.fromkeys("qkv", ColwiseParallel())
    many = parallelize_module(Narrow(3), mesh, plan)
    with hw.watch(many, measures=["entropy"]) as record:
        many(x)
    with pytest.raises(hw.ConfigError, match=r"the ranks have 2, 1 heads of a layer: .* a number of ranks"):
        record.reduce()
    one = parallelize_module(Narrow(1), mesh, plan)
    with pytest.raises(hw.ConfigError, match="this rank has no heads") if rank else nullcontext():
        assert held_by(one, *one.heads(x)) is None or rank == 0


def a_model_whose_weights_are_sharded_too(rank: int, ranks: int) -> None:
    """FSDP2 beside tensor parallelism, on a mesh of two dimensions."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    many = parallelized(llama(), mesh["tp"])
    for part in (*many.model.layers, many):
        fully_shard(part, mesh=mesh["dp"])
    same_numbers(llama(), many)


def a_model_under_transformers_own_plan(rank: int, ranks: int) -> None:
    if importlib.util.find_spec("accelerate") is None:
        return  # the test says so
    import transformers
    from transformers.distributed import DistributedConfig

    one = llama()
    paths = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(paths)
    if rank == 0:
        one.save_pretrained(Path(paths[0]))
    dist.barrier()
    plan = DistributedConfig(tp_size=ranks)
    same_numbers(one, transformers.AutoModelForCausalLM.from_pretrained(paths[0], distributed_config=plan).eval())


def refused_in(sequence: Any, model: Any) -> None:
    positions = torch.arange(IDS.shape[1])[None]
    for change in (hw.attach, hw.watch):
        ids, places = IDS.clone(), positions.clone()
        part, refused = sequence(buffers=[ids, places], buffer_seq_dims=[1, 1]), "context_parallel is active"
        with pytest.raises(hw.ConfigError, match=refused), change(model), torch.no_grad(), part:
            model(ids, position_ids=places, use_cache=False)


def a_model_under_context_parallel(rank: int, ranks: int) -> None:
    mesh = dist.init_device_mesh("cpu", (ranks,))
    refused_in(lambda **buffers: context_parallel(mesh, **buffers), llama())


def a_model_under_accelerates_context_parallel(rank: int, ranks: int) -> None:
    """As accelerate prepares it, which hides the masks of layers."""
    if importlib.util.find_spec("accelerate") is None:
        return
    accelerate = importlib.import_module("accelerate")
    config = accelerate.parallelism_config.ParallelismConfig(cp_size=ranks)
    type(config)._validate_accelerator = lambda *_: None  # it asks for GPUs
    runs = accelerate.Accelerator(cpu=True, parallelism_config=config)
    model = llama()
    runs._prepare_cp(model)
    refused_in(runs.maybe_context_parallel, model)


def a_compiled_call_under_context_parallel(rank: int, ranks: int) -> None:
    x = torch.randn(1, 4, 8, 6)
    compiled = torch.compile(lambda q: hw.attend(q, q, q), backend="eager")
    compiled(x)
    part = context_parallel(dist.init_device_mesh("cpu", (ranks,)), buffers=[torch.ones(1, 16)], buffer_seq_dims=[1])
    with pytest.raises(hw.ConfigError, match="context_parallel is active"), part:
        compiled(x)


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attend(q, k, v, mask=hw.Causal())


class Flex(nn.Module):
    mask: Any = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Any = flex_attention(q, k, v, block_mask=self.mask)
        return found


class Attention(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.qkv, self.o, self.inner = nn.Linear(24, 72), nn.Linear(24, 24), inner

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return self.o(self.inner(q, k, v).transpose(1, 2).flatten(2))


def inner_modules_under_torchtitans_plan(rank: int, ranks: int) -> None:
    mesh = dist.init_device_mesh("cpu", (ranks,))
    x = context._context_parallel_shard(mesh, [torch.randn(1, 16, 24)], [1])[0]
    kinds = context._ContextParallel.AttentionType
    for kind, error in ((kinds.SDPA, "got a DTensor"), (kinds.FLEX, "context_parallel is active")):
        model = Attention(Inner())
        parallelize_module(model.inner, mesh, context._ContextParallel(seq_dim=2, attention_type=kind))
        with pytest.raises(hw.HeadwiseError, match=error):
            model(x)
    model = Attention(Flex())
    parallelize_module(model.inner, mesh, context._ContextParallel(seq_dim=2, attention_type=kinds.FLEX))
    n = 16 // ranks
    model.inner.mask = create_block_mask(lambda b, h, i, j: i + n * rank >= j, 1, 1, n, 16, device="cpu")
    with torch.no_grad():
        model(x)  # as its own code computes it
        for change in (hw.watch, hw.attach):
            with pytest.raises(hw.ConfigError), change(model):
                model(x)
    context._enable_context_parallel_dispatcher()
    try:
        with pytest.raises(hw.ConfigError, match="context_parallel is active"):
            hw.MultiHeadAttention(24, 4)(x)
    finally:
        context._disable_context_parallel_dispatcher()
    hw.MultiHeadAttention(24, 4)(x)


WITH_ACCELERATE = ("a_model_under_transformers_own_plan", "a_model_under_accelerates_context_parallel")
CASES = {
    case.__name__: case
    for case in (
        a_model_under_parallelize_module, calls_that_are_not_measured,
        a_measure_that_fails_on_one_rank, heads_that_are_split_unevenly,
        a_model_whose_weights_are_sharded_too, a_model_under_transformers_own_plan,
        a_model_under_context_parallel, a_compiled_call_under_context_parallel,
        inner_modules_under_torchtitans_plan,
        a_model_under_accelerates_context_parallel,
    )
}  # fmt: skip
