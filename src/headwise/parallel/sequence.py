"""Layers and models on a sequence partitioned over ranks.

    model = Decoder(config)
    with parallel.sequence_parallel(model, how="ring"):
        x = parallel.shard(ids, "zigzag", dim=-1)                # [b, n/R], this rank's tokens
        loss = loss_of(model(x), parallel.shard(targets, "zigzag", dim=-1))
        loss.backward()                                          # the total loss is the sum over the ranks
    parallel.sum_gradients(model)

All other layers process each token separately, so only attention layers change: they attend over all ranks, with rotary
positions in the whole sequence.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwise.errors import ConfigError, check_choice
from headwise.nn.base import AttentionLayer
from headwise.nn.owned import check_forward, copied
from headwise.nn.registry import DESIGNS
from headwise.parallel.layout import Layout, Members, check_held, check_layout, lengths, members, reduce_together
from headwise.parallel.ring import ring_attend
from headwise.parallel.ulysses import ulysses_attend

HOW: dict[str, tuple[Callable[..., Any], str]] = {
    "ring": (ring_attend, "zigzag"),
    "ulysses": (ulysses_attend, "contiguous"),
}  # with its default layout


class SequenceParallel:
    """Attention layers that attend over all ranks until `restore`, or until the end of a `with`.

    Attributes:
        model: the model, or its copy.
        layers: the names of the layers in the model; how, layout: as in `sequence_parallel`.
    """

    def __init__(
        self, model: nn.Module, layers: dict[str, AttentionLayer], how: str, layout: str, who: Members
    ) -> None:
        self.model, self.layers, self.how, self.layout = model, tuple(layers), how, layout
        self._who, self._changed = who, list(layers.values())
        for layer in self._changed:
            # Set on the instance, so that it overrides the class and parameters keep their names.
            vars(layer).update(self._steps(layer))

    def restore(self) -> None:
        """Restore the layers. Repeated calls have no effect."""
        while self._changed:
            layer = self._changed.pop()
            for name in STEPS:
                del vars(layer)[name]

    def __enter__(self) -> "SequenceParallel":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = f"{len(self.layers)} layers" if self._changed else "restored"
        return f"SequenceParallel({self.how}, {self.layout} over {self._who.ranks} ranks, {state})"

    def _steps(self, layer: AttentionLayer) -> dict[str, Callable[..., Any]]:
        """The methods that replace those of a layer."""
        attend_there, layout, who = HOW[self.how][0], self.layout, self._who
        own_rope, own_check = layer.apply_rope, layer.check

        def apply_rope(q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
            if layer.rotary is None:
                return q, k
            held = lengths(q.shape[2], who, q.device)
            whole = Layout(layout, sum(held), who.ranks)
            check_held("x", held, whole)
            pieces = whole.pieces(who.rank)
            parts = zip(*(x.split([len(piece) for piece in pieces], 2) for x in (q, k)), pieces, strict=True)
            rotated = [own_rope(q_part, k_part, piece.start) for q_part, k_part, piece in parts]
            return torch.cat([q for q, _ in rotated], 2), torch.cat([k for _, k in rotated], 2)

        def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
            found = attend_there(q, k, v, group=who.group, layout=layout, **options)
            return found if options.get("return_map") else (found, None)

        def check(x: Tensor, context: Tensor | None, cache: Any, *others: Any) -> None:
            own_check(x, context, cache, *others)
            if cache is not None:
                raise ConfigError(
                    "cache: not supported while the sequence is partitioned over ranks; restore() the layer to decode"
                )

        return dict(zip(STEPS, (apply_rope, attention, check), strict=True))


STEPS = ("apply_rope", "attention", "check")


def sequence_parallel(
    model: nn.Module, group: Any = None, *, how: str = "ring", layout: str | None = None, copy: bool = False
) -> SequenceParallel:  # fmt: skip
    """Let every attention layer of a model attend over a sequence partitioned over ranks.

    Inputs and outputs of the model are then this rank's tokens, as returned by `shard`. Masks and scores are passed to
    the layers for the *whole* sequence. Weights are equal on all ranks, and each rank computes its share of their
    gradients: `sum_gradients` sums them. With `return_map` layers return a `RingMap` or a `UlyssesMap`.

    Args:
        model: an attention layer, a `TransformerBlock`, a `Decoder`, or any model with such layers that processes each
            token separately elsewhere, with no positions other than rotary ones.
        group: a `ProcessGroup`, a one-dimensional `DeviceMesh`, or None for all processes.
        how: "ring" or "ulysses".
        layout: "zigzag" or "contiguous"; default: that of `ring_attend` or `ulysses_attend`.
        copy: change a deepcopy, the result's `.model`; the model itself is unchanged.
    Returns:
        A handle with `.restore()`, which is also a context manager.
    Raises:
        ConfigError: naming the layer whose design is not supported, or if the model has no layer, or a layer is already
            parallel or its forward was replaced on the instance; nothing is changed then.
    """
    check_choice("how", how, HOW)
    layout = HOW[how][1] if layout is None else layout
    check_layout(layout)
    who = members(group)
    if copy:
        model = copied(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, AttentionLayer)}
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no attention layers of headwise")
    for name, layer in layers.items():
        called = f"{name!r} ({type(layer).__name__})" if name else type(layer).__name__
        if reason := _refusal(type(layer)):
            raise ConfigError(
                f"{called}: not a design that combines tokens in attention only: {reason}; supported: "
                f"{', '.join(design.__name__ for design in DESIGNS.values() if not _refusal(design))}"
            )
        if any(step in vars(layer) for step in STEPS):
            raise ConfigError(f"{called} already attends over several ranks; restore() it first")
        check_forward(called, layer)
    return SequenceParallel(model, layers, how, layout, who)


def sum_gradients(model: nn.Module, group: Any = None) -> None:
    """Sum each parameter's gradient over the ranks, in place. All ranks must call it.

    Sends 2·(1 − 1/R) times the bytes of all gradients, one message per dtype. A parameter without a gradient on a rank
    counts as 0 there. If a weight is partitioned over another dimension of a mesh, each rank sums its own part.
    """
    who = members(group)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for dtype in dict.fromkeys(parameter.dtype for parameter in learning):
        own = [p.grad for p in learning if p.dtype == dtype and p.grad is not None]
        gradients = [x.to_local() if isinstance(x, DTensor) else x for x in own]
        reduce_together(gradients, who, dist.ReduceOp.SUM, dtype)


def _refusal(kind: type[AttentionLayer]) -> str:
    """Where a design combines tokens outside of `attend`, or "". Subclasses are unknown, as they may do so."""
    return kind.outside_attend if kind.is_described() else "it is not known"
