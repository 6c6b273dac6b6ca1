"""How each part of an attention layer is spread over the ranks of a mesh: `ParallelStyle`s beside PyTorch's own."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, SequenceParallel

from headwise.fields import Section
from headwise.masks import Mask
from headwise.nn.base import AttentionLayer
from headwise.parallel.heads_held import HeldHeads, hold
from headwise.scores import Score


class Heads(ParallelStyle):
    """The layer itself: it counts its own heads alone, takes x and masks and scores of all heads, and gives y.

    x enters as a replicated DTensor, once for all projections, so that their parts of its gradient are added up by one
    all-reduce (the operator f of Shoeybi et al. 2019, §3).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, AttentionLayer)
        held = hold(module, device_mesh)

        def enter(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            args = tuple(_replicated(x, device_mesh) for x in args)
            for name in kwargs.keys() & {"x", "context"}:
                kwargs = {**kwargs, name: _replicated(kwargs[name], device_mesh)}
            return args, _of_held_heads(kwargs, held)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(_waited)
        if module.dropout:
            own_randomness(module, device_mesh)
        return module


class KeyHeads(ColwiseParallel):
    """W^K or W^V: `ColwiseParallel`, and where several ranks share a key head, each computes some of its channels and
    all of them gather the head; gradients are scattered back as sums."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        sharing = device_mesh.size() // self.num_kv_heads
        if sharing > 1:
            group = _sharing_group(device_mesh, sharing)
            module.register_forward_hook(
                lambda _, __, y: waited(all_gather_tensor_autograd(y, y.ndim - 1, group))  # of d
            )
        return module


class HeadNorm(SequenceParallel):
    """A norm of each head, [b, h, n, d]: `SequenceParallel` along the heads. Its weight's gradient is added up over the
    ranks, so that an optimiser finds it whole."""

    def __init__(self) -> None:
        super().__init__(sequence_dim=1, use_local_output=True)

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, value in module.named_parameters(recurse=False):
            whole = distribute_tensor(value, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            parameter = nn.Parameter(whole, requires_grad=value.requires_grad)
            if value.requires_grad:
                parameter.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))
            module.register_parameter(key, parameter)


class OwnRandomness(ParallelStyle):
    """A dropout of what ranks hold different parts of: each draws for itself, and afterwards all generators are where
    they would be on each of the others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own_randomness(module, device_mesh)
        return module


def own_randomness(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a module's forward in training draw other numbers on each rank of the mesh."""
    forks: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        if module.training:
            seed = int(torch.randint(1 << 40, (), device="cpu"))  # the same on every rank: all have come to here alike
            fork = torch.random.fork_rng(device_type=mesh.device_type) if mesh.device_type != "cpu" else _cpu_fork()
            fork.__enter__()
            forks.append(fork)
            torch.manual_seed(seed + 1 + mesh.get_local_rank())

    def after(module: nn.Module, args: Any, y: Any) -> None:
        if forks:
            forks.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _cpu_fork() -> Any:
    return torch.random.fork_rng(devices=[])


def _waited(layer: nn.Module, args: Any, result: Any) -> Any:
    """The result with y as a plain tensor."""
    y, *rest = result if isinstance(result, tuple) else (result,)
    return (waited(y), *rest) if rest else waited(y)


def waited(x: Tensor) -> Tensor:
    """x, once its collective is done, as a plain tensor: views of one that waits for its first use would wait too."""
    return cast(Tensor, _Wait.apply(x)) if isinstance(x, AsyncCollectiveTensor) else x


class _Wait(torch.autograd.Function):
    """The identity on a tensor of PyTorch's functional collectives: what it holds, when that has arrived."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.trigger_wait().view_as(x.elem)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _replicated(x: Any, mesh: DeviceMesh) -> Any:
    """A tensor that is the same on all ranks as a DTensor that says so; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DTensor):
        return x.redistribute(placements=[Replicate()])
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _of_held_heads(kwargs: dict[str, Any], held: HeldHeads) -> dict[str, Any]:
    """The arguments of a call, masks and scores as the heads held see them."""
    found, enter = dict(kwargs), adding_up(held.mesh)
    cuts = {"h": Section(held.heads.start, held.heads.stop, held.num_heads)}
    if isinstance(kwargs.get("mask"), Mask):
        found["mask"] = kwargs["mask"].cut(cuts)
    if kwargs.get("score"):
        given = kwargs["score"]
        scores = (given,) if isinstance(given, Score) else given
        found["score"] = tuple(score.mapped(enter).cut(cuts) for score in scores)
    return found


def adding_up(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """The identity, for a tensor that is the same on all ranks, whose gradient is the sum of those of all ranks."""

    def enter(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    return enter


_groups: dict[tuple[int, ...], Any] = {}


def _sharing_group(mesh: DeviceMesh, sharing: int) -> Any:
    """The process group of the ranks that hold the same key head as this one: neighbours in the mesh."""
    at = mesh.get_local_rank() // sharing * sharing
    ranks = tuple(mesh.mesh.flatten()[at : at + sharing].tolist())
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _groups[ranks]
