"""Accuracy of attention in half precision: errors against float64, as the Markdown tables of docs/precision.md.

    python scripts/precision.py            the tables of the page, a few minutes
    python scripts/precision.py --quick    the same at small sizes, a few seconds

Every number is a median over seeds. ‖·‖ is the relative Frobenius error ‖x − x64‖ / ‖x64‖, max the largest absolute
error. `attend` alone is compared with float64 on the rounded inputs, which isolates the kernel's own error; layers are
compared with float64 weights and inputs, which includes the rounding of these.
"""

import argparse
import copy
import functools
import math
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise import MultiHeadAttention, TransformerBlock, __version__, attend
from headwise.errors import KernelError
from headwise.kernels import KERNELS

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}
OURS = tuple(name for name in KERNELS if name in ("cpu", "torch_fused", "torch_blocks"))
PEER = "PyTorch"  # scaled_dot_product_attention and PyTorch's layers
HEADS, HEAD_DIM = 2, 64
FACTORS = (1, 30)  # on the logits
LIVELY = 3.0  # factor on the initial W^Q, so that the logits of a layer have a spread of about 1, as for `attend` alone
OUTPUTS = ("out ‖·‖", "out max", "dq ‖·‖", "dk ‖·‖", "dv ‖·‖")
STATISTICS = ("LSE", "entropy", "max logit")
LAYER = ("out ‖·‖", "out max", "dx ‖·‖", "dW ‖·‖", *(f"{name} max" for name in STATISTICS))


@dataclass(frozen=True)
class Mode:
    """The dtype of inputs and weights, and that of autocast, if enabled."""

    dtype: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def name(self) -> str:
        """For example "bfloat16" or "autocast bfloat16"."""
        return NAMES[self.dtype] if self.autocast is None else f"autocast {NAMES[self.autocast]}"

    @contextmanager
    def on(self) -> Iterator[None]:
        """Context manager for this mode's autocast."""
        with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            yield


MODES = (
    *map(Mode, (torch.float32, torch.bfloat16, torch.float16)),
    Mode(torch.float32, torch.bfloat16),
    Mode(torch.float32, torch.float16),
)
Errors = dict[str, float]


def frobenius(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖ in float64."""
    return float((found.detach().double() - truth).norm() / truth.norm())


def largest(found: Tensor, truth: Tensor) -> float:
    """max |found − truth| in float64."""
    return float((found.detach().double() - truth).abs().max())


def median(runs: Sequence[Errors]) -> Errors:
    """The median of each error over runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def normal(*shape: int, seed: int) -> Tensor:
    """Independent standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# `attend` alone.


@dataclass(frozen=True)
class Truth:
    """float64 results: output, gradients of q, k and v for a given gradient of the output, statistics of rows."""

    out: Tensor
    gradients: tuple[Tensor, ...]
    rows: dict[str, Tensor]


def in_float64(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Truth:
    """Evaluate the formula in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT / math.sqrt(q.shape[-1])
    p = torch.softmax(scores, -1)
    out = p @ leaves[2]
    gradients = torch.autograd.grad(out, leaves, d_out.double())
    return Truth(out.detach(), gradients, _rows(scores.detach()))


@functools.cache
def case(dtype: torch.dtype, n: int, factor: float, seed: int) -> tuple[tuple[Tensor, ...], Truth]:
    """q, k, v and a gradient of the output in a dtype, and their float64 results; the same for every kernel."""
    q, *others = (normal(1, HEADS, n, HEAD_DIM, seed=4 * seed + i) for i in range(4))
    inputs = tuple(x.to(dtype) for x in (factor * q, *others))
    return inputs, in_float64(*inputs)


@functools.cache
def attend_errors(kernel: str, mode: Mode, n: int, factor: float, seed: int) -> Errors:
    """Errors of one call and of its gradients; raises KernelError if the kernel refuses it."""
    (*inputs, d_out), truth = case(mode.dtype, n, factor, seed)
    leaves = [x.detach().requires_grad_() for x in inputs]
    with mode.on():
        if kernel == PEER:
            out = nn.functional.scaled_dot_product_attention(*leaves)
            # It returns no statistics; those of the plain formula in the same dtype are shown for comparison.
            rows = _rows((leaves[0] @ leaves[1].mT / math.sqrt(HEAD_DIM)).detach())
        else:
            out, amap = attend(*leaves, kernel=kernel, return_map=True)
            reader = "auto" if kernel == "torch_fused" else kernel  # it does not compute statistics
            found = amap.using(reader).measure("entropy", "max_logit", rows=True).rows
            rows = {"LSE": amap.lse, "entropy": found["entropy"], "max logit": found["max_logit"]}
            assert all(x.dtype == torch.float32 for x in rows.values()), "statistics are float32 in every dtype"
    gradients = torch.autograd.grad(out, leaves, d_out.to(out.dtype))
    errors = {"out ‖·‖": frobenius(out, truth.out), "out max": largest(out, truth.out)}
    for name, found_gradient, true_gradient in zip(("dq", "dk", "dv"), gradients, truth.gradients, strict=True):
        errors[f"{name} ‖·‖"] = frobenius(found_gradient, true_gradient)
    return errors | {f"{name} max": largest(rows[name], truth.rows[name]) for name in rows}


def _rows(scores: Tensor) -> dict[str, Tensor]:
    """Statistics of rows of scores, in their dtype."""
    lse = torch.logsumexp(scores, -1)
    p = torch.softmax(scores, -1)
    return {"LSE": lse, "entropy": torch.special.entr(p).sum(-1), "max logit": scores.amax(-1)}


# Layers.


def layer_errors(kind: str, maker: str, mode: Mode, n: int, factor: float, seed: int) -> Errors:
    """Errors of a layer's output and gradients against its own float64 copy; for headwise, also those of its map."""
    torch.manual_seed(seed)
    attention = MultiHeadAttention(HEADS * HEAD_DIM, HEADS, bias=True)
    with torch.no_grad():
        for weight in (attention.q_proj.weight, attention.q_proj.bias):
            weight.mul_(factor * LIVELY)
    ours = attention if kind == "MultiHeadAttention" else block_of(attention)
    layer = ours if maker == "headwise" else Peer(ours)
    x, d_out = (normal(1, n, HEADS * HEAD_DIM, seed=2 * seed + i) for i in range(2))
    truth = _run(copy.deepcopy(layer).double(), x, d_out, Mode(torch.float64))
    found = _run(copy.deepcopy(layer).to(mode.dtype), x.to(mode.dtype), d_out.to(mode.dtype), mode)
    errors = {"out ‖·‖": frobenius(found["out"], truth["out"]), "out max": largest(found["out"], truth["out"])}
    errors |= {f"{name} ‖·‖": frobenius(found[name], truth[name]) for name in ("dx", "dW")}
    return errors | {f"{name} max": largest(found[name], truth[name]) for name in STATISTICS if name in found}


def block_of(attention: MultiHeadAttention) -> TransformerBlock:
    """The equivalent of PyTorch's encoder layer."""
    return TransformerBlock(attention, 4 * attention.d_model, norm="layer", bias=True)


class Peer(nn.Module):
    """PyTorch's layer with the weights of one of headwise's."""

    def __init__(self, ours: MultiHeadAttention | TransformerBlock) -> None:
        super().__init__()
        if isinstance(ours, MultiHeadAttention):
            self.layer: nn.Module = ours.to_torch()
            return
        width, inner = ours.ff_in.in_features, ours.ff_in.out_features
        block = nn.TransformerEncoderLayer(
            width, HEADS, inner, dropout=0.0, activation="gelu", norm_first=True, batch_first=True
        )
        assert isinstance(ours.attention, MultiHeadAttention)
        pairs = {
            "self_attn": ours.attention.to_torch(), "linear1": ours.ff_in, "linear2": ours.ff_out,
            "norm1": ours.attention_norm, "norm2": ours.ff_norm,
        }  # fmt: skip
        for name, module in pairs.items():
            getattr(block, name).load_state_dict(module.state_dict())
        self.layer = block

    def forward(self, x: Tensor) -> Tensor:
        """Self-attention without weights, so that PyTorch can use its fused kernel."""
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, x, x, need_weights=False)[0]
        return self.layer(x)


def _run(layer: nn.Module, x: Tensor, d_out: Tensor, mode: Mode) -> dict[str, Tensor]:
    """Output, gradients and, for headwise's layers, statistics of the rows."""
    x = x.requires_grad_()
    with mode.on():
        if isinstance(layer, Peer):
            out, rows = layer(x), {}
        else:
            out, amap = layer(x, return_map=True)
            found = amap.measure("entropy", "max_logit", rows=True).rows
            rows = {"LSE": amap.lse, "entropy": found["entropy"], "max logit": found["max_logit"]}
    parameters = list(layer.parameters())
    d_x, *d_w = torch.autograd.grad(out, [x, *parameters], d_out.to(out.dtype))
    return {"out": out.detach(), "dx": d_x, "dW": torch.cat([g.flatten().double() for g in d_w]), **rows}


# Tables.


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def of_attend(n: int, seeds: int) -> tuple[list[str], list[str], list[str]]:
    """Tables of outputs with gradients, and of statistics, and the refused calls, at one n."""
    outputs, rows, refused = [], [], []
    for factor in FACTORS:
        for mode in MODES:
            for kernel in (*OURS, PEER):
                try:
                    errors = median([attend_errors(kernel, mode, n, factor, seed) for seed in range(seeds)])
                except KernelError as error:
                    refused.append(f"- {kernel}, {mode.name}: {error}")
                    continue
                begin = [f"×{factor}", mode.name, kernel]
                outputs.append([*begin, *(_short(errors[name]) for name in OUTPUTS)])
                begin[2] = "plain formula" if kernel == PEER else kernel
                rows.append([*begin, *(_short(errors[f"{name} max"]) for name in STATISTICS)])
    head = ["logits", "dtype", "kernel"]
    return (
        table([*head, *OUTPUTS], outputs),
        table([*head, *(f"{name}, max" for name in STATISTICS)], rows),
        list(dict.fromkeys(refused)),
    )


def over_lengths(lengths: Sequence[int], seeds: int) -> list[str]:
    """Table of the output's error over n, for ordinary logits."""
    rows = []
    for mode in MODES:
        for kernel in (*OURS, PEER):
            try:
                runs = [[attend_errors(kernel, mode, n, 1, seed) for seed in range(seeds)] for n in lengths]
            except KernelError:
                continue
            rows.append([mode.name, kernel, *(_short(median(run)["out ‖·‖"]) for run in runs)])
    return table(["dtype", "kernel", *(f"n = {n:,}" for n in lengths)], rows)


def of_layers(n: int, seeds: int) -> list[str]:
    """Table of whole layers compared with PyTorch's."""
    rows = []
    for kind in ("MultiHeadAttention", "TransformerBlock"):
        for factor in FACTORS:
            for mode in MODES:
                for maker in ("headwise", PEER):
                    errors = median([layer_errors(kind, maker, mode, n, factor, seed) for seed in range(seeds)])
                    numbers = [_short(errors[name]) if name in errors else "" for name in LAYER]
                    rows.append([kind if maker == "headwise" else "", f"×{factor}", mode.name, maker, *numbers])
    return table(["layer", "logits", "dtype", "of", *LAYER], rows)


def _short(error: float) -> str:
    return f"{error:.1e}"


def main() -> None:
    """Print the page's tables."""
    parser = argparse.ArgumentParser(description="Errors of half precision against float64, as Markdown.")
    parser.add_argument("--quick", action="store_true", help="small sizes and one seed: seconds instead of minutes")
    quick = parser.parse_args().quick
    n, layer_n, seeds = (128, 64, 1) if quick else (2048, 256, 3)
    lengths = (32, 128) if quick else (128, 512, 2048)
    outputs, rows, refused = of_attend(n, seeds)
    many = f"median of {seeds} seeds" if seeds > 1 else "one seed"
    lines = [
        f"headwise {__version__}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{platform.system()} {platform.machine()}; {many}; b = 1, h = {HEADS}, d = {HEAD_DIM}.",
        "", f"**`attend` alone, n = {n:,}: outputs and gradients**", "", *outputs,
        "", f"**`attend` alone, n = {n:,}: statistics of rows**", "", *rows,
        "", "**`attend` alone: output ‖·‖ over n, ordinary logits**", "", *over_lengths(lengths, seeds),
        "", f"**Layers, d_model = {HEADS * HEAD_DIM}, n = {layer_n}**", "", *of_layers(layer_n, seeds),
    ]  # fmt: skip
    lines += ["", "Refused:", "", *refused] if refused else []
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
