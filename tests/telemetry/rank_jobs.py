"""What each rank of small distributed jobs does, job after job; run by test_ranks.py in processes of their own."""

import json
import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched_models import mixed, x

import headwise as hw


def ddp(rank: int) -> dict[str, Any]:
    """Every rank its part of a batch of 5, in two micro-batches of which the second is smaller."""
    model = DistributedDataParallel(mixed().train())
    part = x(b=5)[:3] if rank == 0 else x(b=5)[3:]
    with hw.watch(model, steps="manual") as record:
        for _ in range(2):
            for piece in part.chunk(2):
                model(piece).sum().backward()
            record.step()
        reduced = record.reduce()
    result = hw.telemetry.qk_clip(model, reduced, tau=0.5)
    return {
        "own": record.latest["max_logit"].nan_to_num(0.0).tolist(), "clipped": len(result),
        "latest": reduced.latest.numbers.tolist(), "totals": reduced.totals.numbers.tolist(),
        "weight": float(model.module.blocks[0].attention.q_proj.weight.double().sum()),
    }  # fmt: skip


def fsdp(rank: int) -> dict[str, Any]:
    """Sharded weights: watched, and clipped in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    model = nn.ModuleList([hw.MultiHeadAttention(24, 4, num_kv_heads=2, bias=True)])[0]
    whole = nn.Sequential(model)
    mesh = init_device_mesh("cpu", (2,))
    for module in (model, whole):
        fully_shard(module, mesh=mesh)
    with hw.watch(whole, measures=["max_logit"]) as record:
        whole(x()).sum().backward()
        before = record.reduce().latest["max_logit"][0]
        tau = float(before.sort().values[1:3].mean())
        hw.telemetry.qk_clip(whole, record.reduce(), tau=tau)
        whole(x())
        after = record.reduce().latest["max_logit"][0]
    return {"before": before.tolist(), "tau": tau, "after": after.tolist()}


def apart(rank: int) -> dict[str, Any]:
    """Ranks that have measured different layers cannot be added up."""
    model = mixed()
    with hw.watch(model, layers=[rank]) as record:
        model(x())
    try:
        record.reduce()
    except hw.ConfigError as error:
        return {"error": str(error)}
    return {}


def losses(rank: int) -> dict[str, Any]:
    """Gradients of losses on attention: of each rank's half of a batch, and of compiled models on one rank."""
    whole, half = x(b=4), x(b=4).chunk(2)[rank]
    found = {"ddp": _trained(DistributedDataParallel(mixed().train()), half)}
    if rank == 0:  # own layers, and attention that is recognised
        found |= {kind: _trained(_compiled(make()), whole) for kind, make in KINDS.items()}
        found |= {f"{kind}, eager": _trained(make(), whole) for kind, make in KINDS.items()}
    return found


def _compiled(model: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(model, backend="aot_eager"))


def _trained(model: nn.Module, given: torch.Tensor) -> list[list[float]]:
    with hw.watch(model, measures=["entropy"], differentiable=True) as record:
        loss = model(given).square().mean() + hw.losses.class_mass(record) + hw.losses.z_loss(record)
        loss = loss + sum(amap.measured["entropy"].mean() for amap in record.maps.values())
        loss.backward()
    return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]


class Recognised(nn.Module):
    """Attention that is written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(24, 24) for _ in "qkv")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (4, 6)).transpose(1, 2) for one in self.projections)
        return ((q @ k.mT / 6**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def _recognised() -> nn.Module:
    torch.manual_seed(6)
    return Recognised()


KINDS = {"own": mixed, "recognised": _recognised}

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    answers = {job.__name__: job(rank) for job in (ddp, fsdp, apart, losses)}
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()
