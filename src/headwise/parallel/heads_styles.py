"""`ParallelStyle`s for the parts of an attention layer, in addition to PyTorch's."""

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
    """The layer itself: it is resized to this rank's heads, and masks and scores for all heads are cut to them.

    x becomes a replicated DTensor, once for all projections, so that one all-reduce sums their contributions to its
    gradient (the operator f of Shoeybi et al. 2019, §3).
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
    """W^K or W^V: `ColwiseParallel`; ranks that share a KV head each compute some of its channels and gather the rest.
    Gradients are summed and scattered."""

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
    """A norm of each head, [b, h, n, d]: `SequenceParallel` along the heads. The gradient of its weight is summed over
    the ranks."""

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
    """Dropout of a partitioned tensor: each rank draws different numbers; afterwards all generators are in the same
    state again."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own_randomness(module, device_mesh)
        return module


def own_randomness(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the forward pass of a module draw different random numbers on each rank in training."""
    forks: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        if module.training:
            seed = int(torch.randint(1 << 40, (), device="cpu"))  # equal on all ranks
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
    """Wait for the collective that computes x, and return x as a plain tensor."""
    return cast(Tensor, _Wait.apply(x)) if isinstance(x, AsyncCollectiveTensor) else x


class _Wait(torch.autograd.Function):
    """The identity on the result of a functional collective, after waiting for it."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.trigger_wait().view_as(x.elem)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _replicated(x: Any, mesh: DeviceMesh) -> Any:
    """Wrap a tensor that is equal on all ranks as a replicated DTensor; return anything else unchanged."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DTensor):
        return x.redistribute(placements=[Replicate()])
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _of_held_heads(kwargs: dict[str, Any], held: HeldHeads) -> dict[str, Any]:
    """The arguments of a call with masks and scores cut to the heads of this rank."""
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
    """The identity on a tensor that is equal on all ranks; its gradient is the sum over all ranks."""

    def enter(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    return enter


_groups: dict[tuple[int, ...], Any] = {}


def _sharing_group(mesh: DeviceMesh, sharing: int) -> Any:
    """The process group of the ranks that share a KV head with this one: neighbours in the mesh."""
    at = mesh.get_local_rank() // sharing * sharing
    ranks = tuple(mesh.mesh.flatten()[at : at + sharing].tolist())
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _groups[ranks]
