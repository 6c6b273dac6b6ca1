"""QK-clip: scales down the weights of queries and keys where the largest logit of a head is too large.

After the optimiser's step, with S the largest logit of head i in that step's batch (Kimi K2, 2507.20534, §2.1):

    γ_i = min(1, τ / S_i),   1 where S_i ≤ 0

and the logits of head i are multiplied by γ_i, by these factors:

    one KV head per query head     √γ_i on the rows of W_q and W_k, and on their biases
    grouped queries                √γ of the group's largest logit on the shared key, and the rest of γ_i on each query;
                                   query heads within the limit get the inverse, so that their logits do not change
    latent attention               √γ_i on the up-projections, γ_i on the rotary part of the query, whose key is shared
                                   by all heads and does not change
    QK-norm                        the norms come after W_q and W_k and undo their size, so √γ is applied to the weights
                                   (and biases) of both norms, which all heads share: γ of the layer's largest logit

Without biases, soft caps and the like on the scores, the largest logit on the same batch is then τ. Terms added to the
product are not scaled: the largest logit then approaches τ over several steps.
"""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from headwise.errors import ConfigError
from headwise.models import HeadSite, find_heads
from headwise.nn.base import AttentionLayer
from headwise.parallel.heads_held import held_heads
from headwise.table.show import as_html, as_text
from headwise.telemetry.ranks import Reduced
from headwise.telemetry.record import Record


@dataclass(frozen=True)
class Clipped:
    """The result of `qk_clip`.

    Attributes:
        model: the model that was given, or its copy.
        step: of the record. tau: the limit.
        heads: (layer, head, largest logit, γ) of every head that was clipped.
    """

    model: nn.Module = field(repr=False, compare=False)
    step: int
    tau: float
    heads: tuple[tuple[str, int, float, float], ...]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text."""
        body = [[layer, str(head), f"{largest:.4g}", f"{gamma:.4g}"] for layer, head, largest, gamma in self.heads]
        return ["layer", "head", "max logit", "γ"], body

    def __bool__(self) -> bool:
        return bool(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __repr__(self) -> str:
        title = f"step {self.step}, τ = {self.tau:g}: {len(self)} heads clipped"
        return f"{title}\n{as_text(*self.table())}" if self.heads else title

    def _repr_html_(self) -> str:
        return as_html(*self.table(), caption=f"step {self.step}, τ = {self.tau:g}")


def qk_clip(model: nn.Module, record: Record | Reduced, tau: float = 100.0, *, copy: bool = False) -> Clipped:
    """Scale down the queries and keys of heads whose largest logit was over τ in the record's latest step.

        loss.backward(); optimizer.step()
        record.step()                                  # with watch(model, steps="manual")
        hw.telemetry.qk_clip(model, record, tau=100.0)  # on many ranks: qk_clip(model, record.reduce(), tau=100.0)

    The optimiser's state is unchanged. A step is used once: until `watch(every=N)` measures a new one, further calls
    do nothing. The docstring of the module lists the factors.

    Args:
        model: any model with the watched modules in it. Weights may be sharded (FSDP2).
        record: with "max_logit" among its measures. Heads that it does not watch keep their logits.
        tau: the limit, above 0.
        copy: clip a deepcopy, the result's `.model`; the model itself is unchanged, and the step can be used again.
    Returns:
        `Clipped`: what was scaled, by how much.
    Raises:
        ConfigError: if max_logit is not measured, or naming watched layers whose queries and keys cannot be scaled head
            by head; nothing is changed then.
    Source: Kimi Team 2025, 2507.20534, §2.1 (MuonClip).
    """
    if not tau > 0:
        raise ConfigError(f"tau={tau!r}: expected a number above 0")
    own: Record = record.record if isinstance(record, Reduced) else record
    summary = record.latest
    if "max_logit" not in summary.names:
        raise ConfigError("qk_clip: the record does not measure max_logit; give it to watch(measures=…)")
    plans = _plans(model, own, of_all=isinstance(record, Reduced))
    if copy:
        copies: dict[int, Any] = {}  # by the id of the original
        model = deepcopy(model, copies)
        clipped = {site.module: _whole(site) for site in find_heads(model)}
        plans = [(name, clipped[copies[id(site.module)]]) for name, site in plans]
    if own.ledger.clipped == summary.step or not summary.steps:
        return Clipped(model, summary.step, tau, ())
    if not copy:
        own.ledger.clipped = summary.step
    largest = dict(zip(summary.places, summary.column("max_logit").tolist(), strict=True))
    heads = []
    with torch.no_grad():
        for name, site in plans:
            seen = [largest.get((name, head), 0.0) for head in range(site.num_heads)]
            gammas = [tau / value if tau < value < torch.inf else 1.0 for value in seen]
            heads += [(name, i, seen[i], gamma) for i, gamma in enumerate(gammas) if gamma < 1.0]
            if min(gammas) < 1.0:
                _clip(site, torch.tensor(gammas, dtype=torch.float64))
    return Clipped(model, summary.step, tau, tuple(heads))


def _plans(model: nn.Module, record: Record, *, of_all: bool) -> list[tuple[str, HeadSite]]:
    """The watched layers with their sites, with the heads of all ranks; raises if one cannot be clipped."""
    names = {module: name for name, module in record.modules().items()}
    sites = {site.module: _whole(site) for site in find_heads(model)}
    refused = []
    for module, name in names.items():
        if reason := _refuse(sites.get(module), of_all):
            refused.append(f"{name or 'the model'} ({type(module).__name__}): {reason}")
    if refused:
        raise ConfigError(f"qk_clip: {'; '.join(refused[:4])}. Leave such layers out: watch(model, layers=…)")
    return [(name, sites[module]) for module, name in names.items()]


def _whole(site: HeadSite) -> HeadSite:
    """A site with the heads of all ranks; its weights are DTensors of the whole size."""
    held = held_heads(site.module)
    return site if held is None else replace(site, num_heads=held.num_heads, num_kv_heads=held.num_kv_heads)


def _refuse(site: HeadSite | None, of_all: bool) -> str | None:
    """Why the queries and keys of a site cannot be clipped, or None."""
    if site is None:
        return "it is not in the model, or its projections of queries and keys are unknown"
    if held_heads(site.module) is not None:
        if not of_all:
            return "its heads are spread over ranks, so all ranks have to clip alike: give record.reduce()"
        if site.layout().norms:
            return "its heads are spread over ranks, and its norm is one for all of them"
    if isinstance(site.module, AttentionLayer) and site.module.coupling.at == "scores":
        return f"its scores are mixtures of several heads' products: {site.module.coupling.why}"
    try:
        letters = {part.letter for part in site.parts()}
    except ConfigError as error:
        return str(error)
    if not {"q", "k"} <= letters:
        return "it has no W_q and W_k"
    return next(filter(None, map(_refuse_norm, site.layout().norms)), None)


def _clip(site: HeadSite, gamma: Tensor) -> None:
    layout = site.layout()
    if layout.norms:
        for norm in layout.norms:
            _scale_norm(norm, float(gamma.min().sqrt()))
        return
    shared = gamma.view(site.num_kv_heads, -1)  # [h_kv, queries of a key]
    key = shared.amin(-1).sqrt()
    query = (shared / key[:, None]).flatten()
    for part in layout.parts:
        if part.letter in ("q", "k"):
            factors = query if part.letter == "q" else key
            tensor = part.tensor
            if isinstance(tensor, nn.ParameterList):
                for one, factor in zip(tensor, factors, strict=True):
                    _multiply(one, factor.expand(one.shape))
                continue
            each = factors[:, None].repeat(1, part.width)
            if part.letter == "q" and layout.shared_key:
                each[:, -layout.shared_key :] = gamma[:, None]  # their key stays as it is
            _multiply(tensor, _spread(tensor, part.axis, part.start, each.flatten()))


def _refuse_norm(norm: Any) -> str | None:
    """Why the output of a norm cannot be scaled by its weight, or None."""
    if not isinstance(getattr(norm, "weight", None), Tensor):
        return f"its norm {type(norm).__name__} has no weight to scale"
    return f"how its norm {type(norm).__name__} applies its weight is unknown" if _offset(norm) is None else None


def _offset(norm: Any) -> float | None:
    """What a norm adds to its weight: 0, or 1 as in Gemma; None if its output is neither."""
    weight, bias = norm.weight.detach(), getattr(norm, "bias", None)
    probe = torch.linspace(-1.0, 2.0, weight.shape[-1], device=weight.device).to(weight.dtype)
    with torch.no_grad():
        half = norm(probe) * 0.5
        for offset in (0.0, 1.0):
            scaled = {"weight": ((weight.double() + offset) * 0.5 - offset).to(weight)}
            if bias is not None:
                scaled["bias"] = bias.detach() * 0.5
            if torch.allclose(functional_call(norm, scaled, probe), half, rtol=2e-2, atol=1e-3):
                return offset
    return None


def _scale_norm(norm: Any, factor: float) -> None:
    """Scale the output of a norm that is not refused: its weight, or one more than it, and its bias."""
    offset = _offset(norm)
    assert offset is not None
    norm.weight.copy_(((norm.weight.double() + offset) * factor - offset).to(norm.weight))
    if getattr(norm, "bias", None) is not None:
        _multiply(norm.bias, torch.full(norm.bias.shape, factor))


def _spread(tensor: Tensor, axis: int, start: int, factors: Tensor) -> Tensor:
    """Factors for the whole tensor: the given ones along an axis from `start`, and 1 elsewhere."""
    along = torch.ones(tensor.shape[axis], dtype=torch.float64)
    along[start : start + len(factors)] = factors
    shape = [1] * tensor.ndim
    shape[axis] = -1
    return along.view(shape).expand(tensor.shape)


def _multiply(tensor: Tensor, factors: Tensor) -> None:
    """In place, in float64: a factor of bfloat16 would be off by half a percent."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # as slow to import as PyTorch itself

    factors = factors.to(tensor.device)
    if isinstance(tensor, DTensor):
        factors = distribute_tensor(factors.contiguous(), tensor.device_mesh, tensor.placements)
    tensor.copy_((tensor.double() * factors).to(tensor.dtype))
