"""The contestants: headwise's kernels, PyTorch's own attention, the stored matrix, FlexAttention, rewrites.

Each is built from a case and its inputs to a `Contestant`: what is timed, and the names of what it returns. Whoever
cannot do a case raises `Skip` with the reason, at once or when first called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from benchmarks import formulas
from benchmarks.cases import REWRITES, Case
from benchmarks.inputs import Inputs, allowed, mask
from headwise.kernels import KERNELS


class Skip(Exception):
    """The reason why a contestant is skipped in a case."""


@dataclass(frozen=True)
class Contestant:
    """`call()` is what is timed; `named(result)` gives its tensors names: out, dq, dk, dv, pooled, statistics, kl."""

    call: Callable[[], Any]
    named: Callable[[Any], dict[str, Tensor]]


def build(name: str, case: Case, inputs: Inputs) -> Contestant:
    """The peer or kernel of that name, ready to be called."""
    if case.teacher and name not in PEERS:
        return _divergence(name, case, inputs)
    with torch.no_grad():
        forward = PEERS[name](case, inputs) if name in PEERS else _kernel(name, case, inputs)
    return _with_backward(forward, case, inputs) if case.backward else forward


def kernels(wanted: list[str]) -> list[str]:
    """The given kernels; by default all except the reference, which stores the matrix in float64."""
    return wanted or [name for name in KERNELS if name != "reference"]


def matrices(name: str) -> int:
    """Approximate number of weight matrices in memory at once; a contestant is skipped if they do not fit."""
    return {"eager": 3, "eager_statistics": 4}.get(name, 0)


def _kernel(name: str, case: Case, inputs: Inputs) -> Contestant:
    q, k, v = inputs.leaves
    wanted, rule = case.statistics, mask(case)
    if case.stored:
        k, v = hw.kernels.QuantizedKV.of(k), hw.kernels.QuantizedKV.of(v)
    if not wanted and not case.pooled:
        return Contestant(_skipping(lambda: hw.attend(q, k, v, mask=rule, kernel=name)), _only_out)

    def run() -> Any:
        options = {"mask": rule, "kernel": name, "measures": wanted, "differentiable": case.backward}
        out, amap = hw.attend(q, k, v, return_map=True, **options)
        return out, amap.measured, amap.pool(case.pooled) if case.pooled else None

    def named(result: Any) -> dict[str, Tensor]:
        out, measured, pooled = result
        return {"out": out, **(measured or {}), **({} if pooled is None else {"pooled": pooled})}

    return Contestant(_skipping(run), named)


def _divergence(name: str, case: Case, inputs: Inputs) -> Contestant:
    """The KL from the map of queries and keys that are drawn as the values and the output's gradient are."""
    (q, k, v), other = inputs.leaves, inputs.d_out
    assert other is not None
    options = {"mask": mask(case), "kernel": name, "return_map": True}

    def maps() -> tuple[Tensor, Any, Any]:
        with torch.no_grad():
            _, teacher = hw.attend(other, v, v, **options)
        with torch.enable_grad():
            out, student = hw.attend(q, k, v, differentiable=True, **options)
        return out.detach(), student, teacher

    out, student, teacher = _skipping(maps)()

    def run() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            kl = student.kl(teacher)
            return kl.detach(), *torch.autograd.grad(kl.sum(), (q, k))

    def named(result: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"out": out, **dict(zip(("kl", "dq of kl", "dk of kl"), result, strict=True))}

    return Contestant(_skipping(run), named)


def _skipping(call: Callable[[], Any]) -> Callable[[], Any]:
    """A kernel's refusal to run, or to read its map, as a `Skip`."""

    def guarded() -> Any:
        try:
            return call()
        except hw.KernelError as error:
            reason = str(error).partition(": ")[2].rpartition("; ")[0]
            raise Skip(reason or str(error)) from error

    return guarded


def _sdpa(case: Case, inputs: Inputs) -> Contestant:
    """PyTorch's fused attention, without repeated KV heads."""
    q, k, v = inputs.leaves
    causal = case.mask == "causal" and q.shape[2] > 1  # one query sees every key; PyTorch aligns to the first
    if case.mask == "window" or (causal and q.shape[2] != k.shape[2]):
        raise Skip("it takes this mask only as an n×m tensor")
    gqa = q.shape[1] != k.shape[1]
    return Contestant(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa), _only_out)


def _plain(case: Case, inputs: Inputs) -> Contestant:
    """headwise's automatic kernel without statistics, the baseline for the cost of statistics."""
    q, k, v = inputs.leaves
    rule = mask(case)
    return Contestant(lambda: hw.attend(q, k, v, mask=rule), _only_out)


def _restored(case: Case, inputs: Inputs) -> Contestant:
    """PyTorch's fused attention on dequantized int8 keys and values."""
    q, keys, values = inputs.q, hw.kernels.QuantizedKV.of(inputs.k), hw.kernels.QuantizedKV.of(inputs.v)
    gqa = q.shape[1] != keys.shape[1]

    def run() -> Tensor:
        return F.scaled_dot_product_attention(q, keys.decoded(), values.decoded(), enable_gqa=gqa)

    return Contestant(run, _only_out)


def _eager(case: Case, inputs: Inputs) -> Contestant:
    """All weights stored, softmax in float32, as in model code without a fused kernel."""
    q, k, v = inputs.leaves
    may = allowed(case) if case.size[2] > 1 else None

    def run() -> Tensor:
        p = formulas.scores(q, k, may).softmax(-1, dtype=torch.float32)
        return formulas.mixed(p.to(v.dtype), v)

    return Contestant(run, _only_out)


def _eager_statistics(case: Case, inputs: Inputs) -> Contestant:
    """All weights stored, and statistics computed from them."""
    q, k, v = inputs.leaves
    may = allowed(case)

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        scores = formulas.scores(q, k, may).float()
        p = scores.softmax(-1)
        return formulas.mixed(p.to(v.dtype), v), formulas.statistics(scores, p, may, case.statistics)

    return Contestant(run, lambda result: {"out": result[0], **result[1]})


def _flex(case: Case, inputs: Inputs) -> Contestant:
    """FlexAttention, compiled for these sizes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = inputs.leaves
    n, m = q.shape[2], k.shape[2]
    if case.mask == "window":
        raise Skip("not set up for this mask")
    torch._dynamo.reset()  # each case is compiled anew, with no sizes left open
    compiled = torch.compile(flex_attention, dynamic=False)
    gqa = q.shape[1] != k.shape[1]
    block = None
    if case.mask == "causal" and n > 1:
        block = create_block_mask(lambda b, h, i, j: i + m - n >= j, None, None, n, m, device="cpu")

    def run() -> Any:
        return compiled(q, k, v, block_mask=block, enable_gqa=gqa)

    return Contestant(run, _only_out)


def _sdpa_rows(case: Case, inputs: Inputs) -> Contestant:
    """Decoding: a group's queries as rows of one head, so that SDPA reads its keys once."""
    q, k, v = inputs.leaves
    b, h, n, d = q.shape
    rows = q.reshape(b, k.shape[1], h // k.shape[1] * n, d)
    return Contestant(lambda: F.scaled_dot_product_attention(rows, k, v).view(b, h, n, d), _only_out)


def _bmm(case: Case, inputs: Inputs) -> Contestant:
    """Decoding: product, softmax, product, with the group as rows."""
    q, k, v = inputs.leaves
    b, h, n, d = q.shape
    rows, keys, values = q.reshape(b * k.shape[1], -1, d), k.flatten(0, 1), v.flatten(0, 1)
    scale = d**-0.5

    def run() -> Tensor:
        p = torch.bmm(rows * scale, keys.mT).softmax(-1, dtype=torch.float32).to(v.dtype)
        return torch.bmm(p, values).view(b, h, n, d)

    return Contestant(run, _only_out)


def _bmm_keys_first(case: Case, inputs: Inputs) -> Contestant:
    """Decoding: the same, with keys as the left factor and values transposed."""
    q, k, v = inputs.leaves
    b, h, n, d = q.shape
    rows, keys, values = q.reshape(b * k.shape[1], -1, d), k.flatten(0, 1), v.flatten(0, 1)
    scale = d**-0.5

    def run() -> Tensor:
        p = torch.bmm(keys, (rows * scale).mT).softmax(-2, dtype=torch.float32).to(v.dtype)
        return torch.bmm(values.mT, p).mT.reshape(b, h, n, d)

    return Contestant(run, _only_out)


def _only_out(result: Any) -> dict[str, Tensor]:
    return {"out": result}


def _with_backward(forward: Contestant, case: Case, inputs: Inputs) -> Contestant:
    """Forward, then the gradients of q, k and v, of the output and of the statistics that the contestant computes;
    nothing accumulates from one call to the next."""

    def run() -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        with torch.enable_grad():
            found = forward.named(forward.call())
            given = dict(zip(("out", *case.statistics), inputs.d_loss(case), strict=True))
            d_found = [given[name].to(x) for name, x in found.items()]
            gradients = torch.autograd.grad(list(found.values()), inputs.leaves, d_found)
        return found, gradients

    def named(result: Any) -> dict[str, Tensor]:
        found, gradients = result
        if len(found) <= len(case.statistics):  # a baseline without them has other gradients
            return {"out": found["out"].detach()}
        detached = {name: x.detach() for name, x in found.items()}
        return {**detached, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}

    return Contestant(run, named)


PEERS: dict[str, Callable[[Case, Inputs], Contestant]] = {
    "sdpa": _sdpa,
    "plain": _plain,
    "restored": _restored,
    **dict(zip(REWRITES, (_sdpa_rows, _bmm, _bmm_keys_first), strict=True)),
    "eager": _eager,
    "eager_statistics": _eager_statistics,
    "flex": _flex,
}
