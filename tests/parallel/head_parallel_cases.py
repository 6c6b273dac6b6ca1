"""Layers, blocks and models to be spread by their heads, and what they are called with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.nn import AttentionLayer

WIDTH, HEADS = 21, 4
# Layers whose bytes are counted, h, h_kv, d_k and dtype; docs/scale.md shows them.
TRAFFIC = ((8, 4, 12, "float32"), (4, 1, 8, "bfloat16"), (8, 8, 4, "float32"))


@dataclass(frozen=True)
class Case:
    """make: the model. call: the options of its call on x, with fresh tensors that require gradients. wraps: whether
    the attention is inside of another module."""

    name: str
    make: Callable[[], nn.Module]
    call: Callable[[Tensor], dict[str, Any]] = lambda x: {"mask": hw.Causal()}
    wraps: bool = False


class Crossing:
    """What is found in the options of a call."""

    @staticmethod
    def leaves(call: dict[str, Any]) -> list[Tensor]:
        """Tensors that require gradients: the context, and those of scores."""
        found = [call["context"]] if "context" in call else []
        for score in call.get("score", ()):
            found += [x for x in vars(score).values() if isinstance(x, Tensor) and x.is_leaf and x.requires_grad]
        return found


class Falling(hw.masks.Mask):
    """A mask of nobody's library that differs between heads: head i sees keys that its index does not divide."""

    holds = None  # it differs between heads by no array

    def allowed(self, rows: Tensor, cols: Tensor, grid: Any) -> Tensor:
        heads = torch.arange(2, 2 + grid.h)[:, None, None]
        return ((cols % heads != 1) & (cols <= (rows + grid.shift)[:, None]))[None]

    def state(self, rows: Any, cols: Any, grid: Any) -> Any:
        from headwise.masks import State

        return State.MIXED


def normal(*shape: int, seed: int) -> Tensor:
    """Independent standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(*shape: int, seed: int) -> Tensor:
    """The same, to be learned."""
    return normal(*shape, seed=seed).requires_grad_()


def model_of(case: Case, dtype: torch.dtype) -> nn.Module:
    """A case's model, drawn anew; norms too."""
    torch.manual_seed(17)
    model = case.make()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype)


def is_spreadable(design: type[AttentionLayer]) -> bool:
    """Whether its heads can be spread by what it says of itself: independent ones, each rows or columns of linear maps
    of its own, and no other parameters but norms of heads."""
    layer = design.build(24, 4)
    layout = layer.layout()
    cut = [(part.owner, part.name) for part in layout.parts]
    owners = {owner for owner, _ in cut}
    separate = len(set(cut)) == len(cut) and all(isinstance(owner, nn.Linear) for owner in owners)
    others = [module for module in layer.modules() if module not in owners | set(layout.norms)]
    common = [parameter for module in others for parameter in module.parameters(recurse=False)]
    return not (design.coupling.at or design.resizing.fixed or common) and separate


SPREADABLE = [name for name, design in hw.nn.DESIGNS.items() if is_spreadable(design)]


def mha(heads: int, kv: int, **options: Any) -> hw.MultiHeadAttention:
    return hw.MultiHeadAttention(WIDTH, heads, num_kv_heads=kv, head_dim=12, **options)


def scores(x: Tensor) -> dict[str, Any]:
    """Scores of every kind, each with its own numbers for the heads or shared by them, and learned."""
    n = x.shape[1]
    return {
        "mask": hw.Causal(),
        "score": (
            hw.SoftCap(3.0), hw.ALiBi(leaf(8, seed=1)), hw.SinkLogits(leaf(8, seed=2)),
            hw.Bias(leaf(1, 8, n, n, seed=3)), hw.Bias(leaf(3, 1, 1, n, seed=4)),
            hw.RelativeBias(leaf(8, 5, seed=5), -2), hw.RelativeBias(leaf(1, 4, seed=6), -3),
            hw.scores.t5_bias(normal(16, 8, seed=7), bidirectional=False),
        ),
    }  # fmt: skip


CASES = (
    Case("mha", lambda: mha(4, 4, bias=True)),
    Case("gqa", lambda: mha(8, 4, rotary=True, bias=True)),
    Case("gqa of few", lambda: mha(8, 2, value_dim=8, qk_norm=True, bias=True)),
    Case("mqa", lambda: mha(4, 1, rotary=True, qk_norm=True, bias=True)),
    Case("full", lambda: mha(4, 4), lambda x: {}),
    Case(
        "cross", lambda: mha(4, 1, context_dim=13, bias=True), lambda x: {"context": leaf(3, 5, 13, seed=9)}
    ),
    Case("scores", lambda: mha(8, 2), scores),
    Case(
        "masks of heads", lambda: mha(4, 2),
        lambda x: {
            "mask": hw.Causal() & (hw.Dense(normal(3, 4, 7, 7, seed=1) > 0) | hw.masks.HeadWindows([1, 2, 3, None]))
        },
    ),
    Case("mask of nobody", lambda: mha(8, 8), lambda x: {"mask": Falling() | hw.Sinks(1)}),
    Case("gated", lambda: hw.nn.GatedAttention(WIDTH, 4, head_dim=8, num_kv_heads=2, rotary=True, bias=True)),
    Case("gated channels", lambda: hw.nn.GatedAttention(WIDTH, 8, head_dim=4, gate="channel")),
    Case("block", lambda: hw.TransformerBlock(mha(4, 1, rotary=True), d_ff=20, bias=True), wraps=True),
    Case(
        "post-norm", lambda: hw.TransformerBlock(mha(8, 2), d_ff=12, order="post", norm="layer", activation="relu"),
        wraps=True,
    ),
)  # fmt: skip
