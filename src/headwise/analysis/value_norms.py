"""How much a token contributes where it is attended to: the norms of its values after the output projection."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise import events
from headwise.errors import ConfigError
from headwise.interventions import Arguments, Edit
from headwise.models.attaching import Attachment, intervene, model_of
from headwise.models.find import find_heads
from headwise.models.site import HeadSite
from headwise.rule import compute


def value_norms(
    model: nn.Module | Attachment, run: Callable[[], Any], *, sites: Sequence[HeadSite] | None = None
) -> dict[str, Tensor]:
    """‖v_j W_O^h‖ of every head h and token j: the length of what a weight of 1 on it adds to the residual stream.

        >>> import torch, headwise as hw
        >>> model = torch.nn.Sequential(hw.MultiHeadAttention(16, 4), hw.MultiHeadAttention(16, 4))
        >>> x = torch.randn(1, 7, 16)
        >>> with hw.watch(model, maps="lazy") as record:
        ...     y = model(x)
        >>> norms = hw.analysis.value_norms(model, lambda: model(x))
        >>> norms["0"].shape
        torch.Size([1, 4, 7])
        >>> added = record.maps["0"][0, 2, -1] * norms["0"][0, 2]               # to the last token by head 2, [7]
        >>> flow = hw.analysis.rollout([*record.maps.values()], value_norms=[*norms.values()])

    A weight alone does not say what is added: the value of a token with a large weight may be small, as that of an
    attention sink often is. Norms of values and weights multiply; a rollout or flow of the products is
    `rollout(maps, value_norms=…)`.

    Args:
        model: any that `hw.intervene` and `find_heads` support, or for attention that is written by hand the handle of
            `hw.attach(model, batch=…)`.
        run: a function that runs the model once, without a KV cache, as the maps' run did.
        sites: of `find_heads(model)`; all by default.
    Returns:
        name of the module → [b, h, m] float32 or float64, in the order of the calls; a module that is called several
        times as name, name#2, … (as records name their maps).
    Raises:
        ConfigError: if no attention was called, within `hw.intervene`, or for a module without an output projection of
            each head.
    Source: Kobayashi et al. 2020, 2004.10102, §3 (without the norm that follows).
    """
    if events.editing:
        raise ConfigError("value_norms: the attention of a model is edited (hw.intervene); call it outside of that")
    places = {site.name: site for site in (find_heads(model_of(model)) if sites is None else sites)}
    keep = _Keep()
    with torch.no_grad(), intervene(model, keep, layers=list(places), unused="ignore"):
        run()
    if not keep.values:
        raise ConfigError("run: called no attention of the model; expected a function that runs it once")
    norms = {name: projections(site) for name, site in places.items()}
    return {call: _norms(v, norms[events.module_name(call)]) for call, v in keep.values.items()}


class _Keep(Edit):
    """Changes nothing, and keeps the values [b, h_kv, m, d_v] of each call."""

    by_row = True

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Tensor] = {}

    def changed(self, call: Arguments) -> Arguments:
        self.values[events.call_name(call.name, self.values)] = call.v
        return call


def projections(site: HeadSite) -> Tensor:
    """A matrix R [h, ·, d_v] for each head with ‖R v‖ = ‖v W_O‖, no larger than d_v × d_v."""
    weights = site.weights()
    if "o" not in weights:
        raise ConfigError(
            f"{site.name or type(site.module).__name__}: its heads have no output projection of their own"
        )
    return torch.linalg.qr(compute(weights["o"]).mT, mode="r").R  # W_Oᵀ = Q R, and Q keeps norms


def _norms(v: Tensor, projection: Tensor) -> Tensor:
    heads = compute(v).repeat_interleave(len(projection) // v.shape[1], 1)
    return (heads @ projection.to(heads).mT).norm(dim=-1)
