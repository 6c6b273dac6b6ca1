"""Head-parallel attention: every rank computes its own heads, and one all-reduce sums their outputs.

    mesh = init_device_mesh("cuda", (4,))
    model = hw.parallel.parallelize_heads(model, mesh)  # every MultiHeadAttention in it, and the blocks around them

The q, k and v projections are partitioned by columns and the output projection by rows (Megatron-LM: Shoeybi et al.
2019, 1909.08053, §3) with PyTorch's `parallelize_module`. Activations between layers are equal on all ranks.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from headwise.errors import ConfigError, ShapeError
from headwise.fields import Section
from headwise.masks import Mask
from headwise.nn.base import AttentionLayer
from headwise.nn.block import TransformerBlock
from headwise.nn.owned import check_changeable, check_unshared, copied, sharers
from headwise.nn.registry import DESIGNS
from headwise.parallel.heads_held import HeldHeads, check_even, held_heads, hold
from headwise.scores import Score


class Heads(ParallelStyle):
    """The layer itself, resized to this rank's heads. x becomes a replicated DTensor, once for all projections, so that
    one all-reduce sums their contributions to its gradient (the operator f of Shoeybi et al. 2019, §3)."""

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


_groups: dict[tuple[int, ...], Any] = {}  # of ranks that share a KV head


class KeyHeads(ColwiseParallel):
    """W^K or W^V: ranks that share a KV head compute some of its channels each and gather the rest; gradients are
    summed and scattered."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        sharing = device_mesh.size() // self.num_kv_heads
        if sharing > 1:
            at = device_mesh.get_local_rank() // sharing * sharing  # the ranks are neighbours in the mesh
            ranks = tuple(device_mesh.mesh.flatten()[at : at + sharing].tolist())
            if ranks not in _groups:
                _groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
            group = _groups[ranks]
            module.register_forward_hook(
                lambda _, __, y: waited(all_gather_tensor_autograd(y, y.ndim - 1, group))  # of d
            )
        return module


class HeadNorm(SequenceParallel):
    """A norm of each head, [b, h, n, d]: `SequenceParallel` along the heads; its weight's gradient is summed."""

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
    """Dropout of a partitioned tensor: ranks draw different numbers; then all generators are in one state again."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own_randomness(module, device_mesh)
        return module


def own_randomness(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the forward pass of a module draw different random numbers on each rank in training."""
    forks: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        if module.training:
            seed = int(torch.randint(1 << 40, (), device="cpu"))  # equal on all ranks
            on: dict[str, Any] = {"devices": []} if mesh.device_type == "cpu" else {"device_type": mesh.device_type}
            fork = torch.random.fork_rng(**on)
            fork.__enter__()
            forks.append(fork)
            torch.manual_seed(seed + 1 + mesh.get_local_rank())

    def after(module: nn.Module, args: Any, y: Any) -> None:
        if forks:
            forks.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


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
    found = dict(kwargs)
    cuts = {"h": Section(held.heads.start, held.heads.stop, held.num_heads)}
    if isinstance(kwargs.get("mask"), Mask):
        found["mask"] = kwargs["mask"].cut(cuts)
    if kwargs.get("score"):

        def enter(x: Tensor) -> Tensor:  # equal on all ranks; its gradient is the sum over all
            if not x.requires_grad:
                return x
            return DTensor.from_local(x, held.mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )

        given = kwargs["score"]
        scores = (given,) if isinstance(given, Score) else given
        found["score"] = tuple(score.mapped(enter).cut(cuts) for score in scores)
    return found


def head_parallel_plan(module: AttentionLayer | TransformerBlock) -> dict[str, ParallelStyle]:
    """Return the plan that partitions a layer by its heads with `torch.distributed.tensor.parallel.parallelize_module`.

        parallelize_module(layer, mesh, hw.parallel.head_parallel_plan(layer))

    Q, K and V are partitioned by columns and W_O by rows. If there are fewer KV heads than ranks, the ranks that share
    one compute its channels together. The feed-forward network of a `TransformerBlock` is partitioned too, W_1 by
    columns and W_2 by rows.

    Returns:
        Name of a submodule → style; "" is the layer itself.
    Raises:
        ConfigError: naming the design, if its heads depend on each other, are not rows and columns of linear maps,
            share other weights, or if the design is unknown; for weights that are computed from others or shared.
    """
    if isinstance(module, TransformerBlock):
        inside = head_parallel_plan(module.attention)
        plan = {f"attention.{name}" if name else "attention": style for name, style in inside.items()}
        if module.inner_dropout.p:
            plan["inner_dropout"] = OwnRandomness()
        return {**plan, "ff_in": ColwiseParallel(), "ff_out": RowwiseParallel()}
    if reason := _refusal(type(module)) or _unspreadable(module):
        raise ConfigError(f"{type(module).__name__} cannot be spread over ranks by its heads: {reason}")
    layout = module.layout()
    check_changeable(type(module).__name__, module, layout.parts)
    styles: dict[nn.Module, ParallelStyle] = {norm: HeadNorm() for norm in layout.norms}
    for part in layout.parts:
        if part.axis == 1:
            styles[part.owner] = RowwiseParallel()
        else:
            styles[part.owner] = ColwiseParallel() if part.heads == "query" else KeyHeads(module.num_kv_heads)
    return {"": Heads(), **{name: styles[part] for name, part in module.named_modules() if part in styles}}


def parallelize_heads(
    model: nn.Module, mesh: DeviceMesh, *, feed_forward: bool = True, copy: bool = False
) -> nn.Module:
    """Partition every attention layer of a model by its heads over the ranks of a mesh.

    Each rank then computes and caches its own heads; outputs, gradients and optimizer steps are those of one process.
    All ranks must call this function, and every later forward and backward pass, with the same input. The weights of
    the mesh's first rank are used; partitioned weights become DTensors, so that checkpoints of
    `torch.distributed.checkpoint` contain them whole, and `whole_state` gathers them.

    Masks and scores are passed to a layer for all heads. Maps, concatenated heads and caches contain this rank's heads:
    `held_heads(layer)` returns which, and `gather_map` joins maps.

    Args:
        model: an attention layer, a `TransformerBlock`, a `Decoder`, or any model with such parts. The heads of its
            designs must be independent, and rows or columns of linear maps.
        mesh: of one dimension, such as `init_device_mesh("cuda", (4,))`, or one dimension of a larger mesh:
            `mesh["heads"]`. Its size must divide each layer's heads, and divide or be a multiple of its KV heads.
        feed_forward: whether to partition the feed-forward networks of `TransformerBlock`s too, by their inner width.
        copy: partition a deepcopy; the model itself is unchanged.
    Returns:
        The model, or its copy.
    Raises:
        ConfigError, ShapeError: naming the layer, and the numbers that do not fit; nothing is changed then.
    Source: Shoeybi et al. 2019, 1909.08053, §3 (the two all-reduces of a layer); grouped keys, Ainslie et al. 2023.
    """
    if mesh.ndim != 1:
        raise ConfigError(f"mesh: has {mesh.ndim} dimensions, {mesh.mesh_dim_names}; give one of them, as mesh['name']")
    if copy:
        model = copied(model)
    plans = dict(_plans(model, mesh.size(), feed_forward))
    if not plans:
        raise ConfigError(f"model: {type(model).__name__} has no attention layer of headwise; convert it first")
    for module, plan in plans.items():
        parallelize_module(module, mesh, plan)
    with torch.no_grad():  # weights and buffers that are not partitioned, from the first rank
        for x in [*model.parameters(), *model.buffers()]:
            if not isinstance(x, DTensor):
                dist.broadcast(x, src=int(mesh.mesh.flatten()[0]), group=mesh.get_group())
    return model


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Gather the `state_dict` of the whole model on every rank. All ranks must call it.

    The result can be loaded into an unpartitioned model. For the reverse, use
    `torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state, options=StateDictOptions(
    full_state_dict=True))`.
    """
    state = model.state_dict()
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for a model in which only some weights are partitioned.

    Args:
        max_norm: gradients are scaled down to this total norm if it is larger.
    Returns:
        The total norm before clipping, equal on all ranks.
    """
    kinds: list[list[nn.Parameter]] = [[], []]
    for parameter in model.parameters():
        if parameter.grad is not None:
            kinds[isinstance(parameter, DTensor)].append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds if kind]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.zeros(())
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, max_norm, norm)
    return norm


def _refusal(kind: type[AttentionLayer]) -> str:
    """Why layers of a class cannot be partitioned, or "". Subclasses are excluded, as they may compute more."""
    if kind.is_described():
        return kind.coupling.why or kind.resizing.fixed
    known = [each.__name__ for each in DESIGNS.values() if not _refusal(each)]
    return f"it is not known to keep its heads apart; known: {', '.join(known)}"


def _unspreadable(module: AttentionLayer) -> str:
    """Which parameters of a layer are neither partitioned by heads as a linear map nor a norm of heads, or ""."""
    layout = module.layout()
    names = {owner: name for name, owner in module.named_modules()}
    places = Counter((part.owner, part.name) for part in layout.parts)
    equal = "; to_multi_head() gives the same function, whose heads can be spread"
    for part in layout.parts:
        if not isinstance(part.owner, nn.Linear):
            found = f"the heads of its {part.name} are no rows or columns of a linear map"
            return found + (equal if hasattr(module, "to_multi_head") else "")
        if places[part.owner, part.name] > 1:
            return f"{part.name!r} of its {names[part.owner]!r} holds several of its maps, one after the other"
    cut = {*(part.owner for part in layout.parts), *layout.norms}
    common = [name for name, _ in module.named_parameters() if module.get_submodule(name.rpartition(".")[0]) not in cut]
    return f"all its heads share {common[0]!r}, which would have to be on every rank" if common else ""


def _plans(model: nn.Module, ranks: int, feed_forward: bool) -> Iterator[tuple[nn.Module, dict[str, ParallelStyle]]]:
    """Each layer with its plan; raises for the first that cannot be partitioned."""
    inside = set()
    together = sharers(model)
    for name, module in model.named_modules():
        if isinstance(module, TransformerBlock) and feed_forward:
            inside.add(module.attention)
        elif not isinstance(module, AttentionLayer) or module in inside:
            continue
        attention = module.attention if isinstance(module, TransformerBlock) else module
        try:
            if held_heads(attention) is not None:
                raise ConfigError(f"its heads are spread already: {held_heads(attention)}")
            plan = head_parallel_plan(module)
            check_even(attention, ranks)
            check_unshared(type(attention).__name__, attention.layout().parts, together)
            if isinstance(module, TransformerBlock) and module.ff_in.out_features % ranks:
                raise ShapeError(
                    f"d_ff={module.ff_in.out_features} cannot be spread evenly over {ranks} ranks; give "
                    f"feed_forward=False"
                )
        except (ConfigError, ShapeError) as error:
            raise type(error)(f"{name or 'the model'}: {error}") from None
        yield module, plan
