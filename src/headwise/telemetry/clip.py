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

Weights that several layers share are multiplied once, by the least γ of these layers. What is not scaled by its weight
(parametrizations, masks, adapters, hooks, a replaced forward) is refused before anything changes.

Without biases, soft caps and the like on the scores, the largest logit on the same batch is then τ. Terms added to the
product are not scaled: the largest logit then approaches τ over several steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from math import inf, isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from headwise.errors import ConfigError
from headwise.kernels.spread import is_dtensor
from headwise.models import HeadSite, find_heads
from headwise.nn.base import AttentionLayer
from headwise.nn.layout import Part
from headwise.nn.owned import check_maps, check_plain, copied, local, shared, sharers, tensors
from headwise.parallel.heads_held import held_heads
from headwise.table.show import as_html, as_text
from headwise.telemetry.ledger import Layer
from headwise.telemetry.ranks import Reduced
from headwise.telemetry.record import Record


@dataclass(frozen=True)
class Clipped:
    """The result of `qk_clip`.

    Attributes:
        model: the model that was given, or its copy.
        step: of the record. tau: the limit.
        heads: (layer, head, largest logit, γ) of every head that was clipped.
        unclipped: (layer, head, largest logit) of every head that ran and whose largest logit is NaN or infinite, or
            was not measured.
    """

    model: nn.Module = field(repr=False, compare=False)
    step: int
    tau: float
    heads: tuple[tuple[str, int, float, float], ...]
    unclipped: tuple[tuple[str, int, float], ...] = ()

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
        if self.unclipped:
            listed = ", ".join(f"{layer or 'the model'} head {head} ({x})" for layer, head, x in self.unclipped[:4])
            more = f" and {len(self.unclipped) - 4} more" if len(self.unclipped) > 4 else ""
            title += f"; not clipped, as their largest logit is not known: {listed}{more}"
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
        `Clipped`: what was scaled, by how much, and which heads were not, as their largest logit is not a number.
    Raises:
        ConfigError: if max_logit is not measured, or naming watched layers whose queries and keys cannot be scaled head
            by head, or whose weights are computed from others or shared with other modules; nothing is changed then.
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
        model = copied(model, copies)
        clipped = {site.module: _whole(site) for site in find_heads(model)}
        plans = [(name, clipped[copies[id(site.module)]]) for name, site in plans]
    if own.ledger.clipped == summary.step or not summary.steps:
        return Clipped(model, summary.step, tau, ())
    largest = dict(zip(summary.places, summary.column("max_logit").tolist(), strict=True))
    seen = [[largest.get((name, head), 0.0) for head in range(site.num_heads)] for name, site in plans]
    gammas = [torch.tensor([tau / x if tau < x < torch.inf else 1.0 for x in each]).double() for each in seen]
    sites = [site for _, site in plans]
    with torch.no_grad():
        for change in _changes(model, sites, gammas):
            _multiply(*change)
    heads = [
        (name, i, seen[layer][i], gamma)
        for layer, (name, _) in enumerate(plans) for i, gamma in enumerate(gammas[layer].tolist()) if gamma < 1.0
    ]  # fmt: skip
    if not copy:
        own.ledger.clipped = summary.step
    ran = own.ledger.states[0].layers
    unclipped = [
        (name, i, x) for (name, _), each in zip(plans, seen, strict=True) for i, x in enumerate(each)
        if name in ran and (isnan(x) or x == inf)
    ]  # fmt: skip
    return Clipped(model, summary.step, tau, tuple(heads), tuple(unclipped))


def _plans(model: nn.Module, record: Record, *, of_all: bool) -> list[tuple[str, HeadSite]]:
    """The watched layers with their sites, with the heads of all ranks; raises if one cannot be clipped."""
    names = {module: name for name, module in record.modules().items()}
    sites = {site.module: _whole(site) for site in find_heads(model)}
    refused = []
    for module, name in names.items():
        site, layer = sites.get(module), record.ledger.states[0].layers.get(name)
        if reason := _refuse_split(site, layer, of_all) or _refuse(site):
            refused.append(f"{name or 'the model'} ({type(module).__name__}): {reason}")
    if refused:
        raise ConfigError(f"qk_clip: {'; '.join(refused[:4])}. Leave such layers out: watch(model, layers=…)")
    return [(name, sites[module]) for module, name in names.items()]


def _whole(site: HeadSite) -> HeadSite:
    """A site with the heads of all ranks; its weights are DTensors of the whole size."""
    held = held_heads(site.module)
    return site if held is None else replace(site, num_heads=held.num_heads, num_kv_heads=held.num_kv_heads)


def _refuse_split(site: HeadSite | None, layer: Layer | None, of_all: bool) -> str | None:
    """Why a site whose heads or weights are split over ranks cannot be clipped, or None."""
    heads = layer is not None and len(layer.heads) < layer.of
    if site is None or not (
        heads or any(is_dtensor(getattr(part.owner, part.name, None)) for part in site.layout().parts)
    ):
        return None
    if not of_all:
        return "its heads are spread over ranks, so all ranks have to clip alike: give record.reduce()"
    if heads and site.layout().norms:
        return "its heads are spread over ranks, and its norm is one for all of them"
    if heads and layer is not None and layer.of != site.num_heads:
        return f"the record has {layer.of} heads of it on all ranks, and its projections have {site.num_heads}"
    return None


def _refuse(site: HeadSite | None) -> str | None:
    """Why the queries and keys of a site cannot be clipped, or None."""
    if site is None:
        return "it is not in the model, or its projections of queries and keys are unknown"
    if isinstance(site.module, AttentionLayer) and site.module.coupling.at == "scores":
        return f"its scores are mixtures of several heads' products: {site.module.coupling.why}"
    try:
        parts = site.parts()
        if not {"q", "k"} <= {part.letter for part in parts}:
            return "it has no W_q and W_k"
        check_plain(site.place, site.module, _scaled_parts(site))
    except ConfigError as error:
        return str(error)
    norms = site.layout().norms
    names = [name for name, one in site.module.named_modules(remove_duplicate=False) if one in norms]
    after = {letter for name in names for letter in name[: 2 if name.startswith("qk") else 1]}
    if norms and after != {"q", "k"}:
        return f"which of its queries and keys {', '.join(names)} normalizes is not known"
    return next(filter(None, map(_refuse_norm, norms)), None)


def _scaled_parts(site: HeadSite) -> list[Part]:
    """The weights and biases of the norms as parts, of which all heads share the whole, or else W_q and W_k."""
    return [
        Part("norm", norm, name, -1, "key", getattr(norm, name).shape[-1])
        for norm in site.layout().norms for name in ("weight", "bias") if isinstance(getattr(norm, name, None), Tensor)
    ] or [part for part in site.parts() if part.letter in ("q", "k")]  # fmt: skip


class _Change(NamedTuple):
    """A parameter, the factors of the numbers along one axis from `start` on, and what is added to it before."""

    tensor: Tensor
    axis: int
    start: int
    factors: Tensor
    offset: float = 0.0


def _changes(model: nn.Module, sites: Sequence[HeadSite], gammas: list[Tensor]) -> list[_Change]:
    """What is multiplied: a tensor of several layers once, by their least γ, to which `gammas` are lowered. ConfigError
    for weights that other modules use too, and for maps that compute with more than their weight."""
    if not any(bool((gamma < 1.0).any()) for gamma in gammas):
        return []
    together = sharers(model)
    parts = [_scaled_parts(site) for site in sites]
    held = [[together[at[:2]] for part in each for at in tensors(part)] for each in parts]
    while _lowered(sites, gammas, [{one.region for one in chain(*each)} for each in held]):
        pass
    clipped = [i for i, gamma in enumerate(gammas) if bool((gamma < 1.0).any())]
    modules = {sites[i].module for i in clipped}
    inside = tuple(
        f"{path}." if path else "" for path, x in model.named_modules(remove_duplicate=False) if x in modules
    )
    changed = {at[:2] for i in clipped for part in parts[i] for at in tensors(part)}
    found: dict[Any, _Change] = {}
    for i in clipped:
        check_maps(sites[i].place, sites[i].module, parts[i])
        for one, *others in held[i]:
            for other in others:
                known = (other.owner, other.name) in changed and other.path.startswith(inside)
                if not known or other.region != one.region:
                    raise shared(sites[i].place, one, other)
        for change in _of_site(sites[i], parts[i], gammas[i]):
            at = local(change.tensor)
            key = (at.device, at.data_ptr() or id(at), change.start)
            first = found.setdefault(key, change)
            if first.axis != change.axis or not torch.allclose(first.factors, change.factors, rtol=1e-9):
                raise ConfigError(
                    f"{sites[i].place}: a tensor is shared by several heads, or by queries and keys, which would have "
                    f"to be scaled differently; give each its own weights first"
                )
    return list(found.values())


def _lowered(sites: Sequence[HeadSite], gammas: list[Tensor], regions: list[set[Any]]) -> bool:
    """Whether γ of a site became that of another one that shares weights with it."""
    before = [gamma.clone() for gamma in gammas]
    for (i, one), (j, other) in combinations(enumerate(regions), 2):
        if one & other:
            if sites[i].num_heads != sites[j].num_heads:
                raise ConfigError(f"{sites[i].place} and {sites[j].place} share weights, but not their number of heads")
            gammas[i] = gammas[j] = torch.minimum(gammas[i], gammas[j])
    return any(not torch.equal(*pair) for pair in zip(before, gammas, strict=True))


def _of_site(site: HeadSite, parts: Sequence[Part], gamma: Tensor) -> Iterator[_Change]:
    """What is multiplied in one site."""
    layout = site.layout()
    if layout.norms:
        for part in parts:
            offset = (_offset(part.owner) or 0.0) if part.name == "weight" else 0.0
            x = getattr(part.owner, part.name)
            yield _Change(x, x.ndim - 1, 0, gamma.min().sqrt().expand(x.shape[-1]), offset)
        return
    shared_keys = gamma.view(site.num_kv_heads, -1)  # [h_kv, queries of a key]
    key = shared_keys.amin(-1).sqrt()
    query = (shared_keys / key[:, None]).flatten()
    for part in parts:
        factors = query if part.letter == "q" else key
        if isinstance(part.tensor, nn.ParameterList):
            for one, factor in zip(part.tensor, factors, strict=True):
                yield _Change(one, 0, 0, factor.expand(len(one)))
            continue
        each = factors[:, None].repeat(1, part.width)
        if part.letter == "q" and layout.shared_key:
            each[:, -layout.shared_key :] = gamma[:, None]  # their key stays as it is
        yield _Change(part.tensor, part.axis, part.start, each.flatten())


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


def _multiply(tensor: Tensor, axis: int, start: int, factors: Tensor, offset: float) -> None:
    """In place, in float64: a factor of bfloat16 would be off by half a percent."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # as slow to import as PyTorch itself

    along = torch.ones(tensor.shape[axis], dtype=torch.float64)
    along[start : start + len(factors)] = factors
    shape = [1] * tensor.ndim
    shape[axis] = -1
    whole = along.view(shape).expand(tensor.shape).to(tensor.device)
    if isinstance(tensor, DTensor):
        whole = distribute_tensor(whole.contiguous(), tensor.device_mesh, tensor.placements)
    tensor.copy_(((tensor.double() + offset) * whole - offset).to(tensor.dtype))
