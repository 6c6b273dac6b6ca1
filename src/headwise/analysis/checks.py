"""Checks of the maps, outputs and weights of all layers that comparisons of heads take, and the names of heads.

All are plain data. `outputs` are one [b, h, n, d_v] a layer, before the output projection; `weights` one
dictionary a layer with "q" [h, d_model, d_k], "k" [h_kv, d_model, d_k], "v" [h_kv, d_model, d_v] and
"o" [h, d_v, d_model], such that x @ q[i] is head i's query.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headwise.errors import ConfigError, DeviceError, DTypeError, ShapeError
from headwise.map import AttentionMap
from headwise.rule import compute

Weights = Mapping[str, Tensor]
SIDES = {"q": "[h, d_model, d_k]", "k": "[h_kv, d_model, d_k]", "v": "[h_kv, d_model, d_v]", "o": "[h, d_v, d_model]"}


def head_name(layer: int, head: int) -> str:
    """L0H3: head 3 of layer 0."""
    return f"L{layer}H{head}"


def head_names(counts: Sequence[int], letter: str = "H") -> tuple[str, ...]:
    """L0H0, L0H1, … for `counts` heads a layer."""
    return tuple(f"L{layer}{letter}{head}" for layer, count in enumerate(counts) for head in range(count))


def checked_maps(maps: Sequence[AttentionMap] | AttentionMap, *, square: bool = False) -> list[AttentionMap]:
    """The maps of all layers, checked to have one batch, one size and finite scores; errors name the layer."""
    maps = [maps] if isinstance(maps, AttentionMap) else list(maps)
    if not maps:
        raise ShapeError("maps: got none, expected the AttentionMap of each layer")
    for layer, amap in enumerate(maps):
        if not isinstance(amap, AttentionMap):
            raise DTypeError(f"maps[{layer}]: expected an AttentionMap, got {type(amap).__name__}")
        (b, _, n, m), (b0, _, n0, m0) = amap.shape, maps[0].shape
        if (b, n, m) != (b0, n0, m0):
            raise ShapeError(
                f"maps[{layer}]: {b} × {n} queries × {m} keys, expected the {b0} × {n0} × {m0} of maps[0]: "
                f"all layers of one run"
            )
        if 0 in amap.shape:
            raise ShapeError(f"maps[{layer}]: shape {amap.shape}, expected at least one head, query and key")
        if square and n != m:
            raise ShapeError(f"maps[{layer}]: {n} queries × {m} keys, expected as many keys as queries")
        _check_finite(f"maps[{layer}]", "rows", (torch.isnan(amap.lse) | (amap.lse == torch.inf)).sum((0, 2)))
    return maps


def checked_outputs(outputs: Sequence[Tensor], mask: Tensor | None = None) -> list[Tensor]:
    """Head outputs of all layers as [h, tokens, d_v] float32 (float64 for float64), batch entries one after another,
    without the tokens [b, n] where `mask` is False; checked to be finite."""
    if isinstance(outputs, Tensor):
        raise DTypeError("outputs: got one tensor, expected a list with one [b, h, n, d_v] for each layer")
    found = []
    for layer, x in enumerate(outputs):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise DTypeError(f"outputs[{layer}]: expected a floating-point tensor, got {_kind(x)}")
        if x.ndim != 4 or 0 in x.shape:
            raise ShapeError(f"outputs[{layer}]: shape {tuple(x.shape)}, expected [b, h, n, d_v] with none of them 0")
        b, h, n, d = x.shape
        b0, _, n0, d0 = outputs[0].shape
        if (b, n, d) != (b0, n0, d0):
            raise ShapeError(
                f"outputs[{layer}]: shape {tuple(x.shape)}, expected [{b0}, h, {n0}, {d0}] as in outputs[0]"
            )
        if mask is None:
            kept = x.detach().transpose(0, 1).reshape(h, b * n, d)
        else:
            kept = x.detach().transpose(0, 1)[:, checked_tokens(mask, b, n).to(x.device)]
        _check_finite(f"outputs[{layer}]", "entries", (~torch.isfinite(kept)).sum((1, 2)))
        found.append(compute(kept))
    if not found:
        raise ShapeError("outputs: got none, expected one [b, h, n, d_v] for each layer")
    return _alike("outputs", found)


def checked_tokens(mask: Tensor, b: int, n: int) -> Tensor:
    """Which tokens are no padding, boolean [b, n]: where `mask` is True, or 1 as in transformers' attention_mask."""
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        raise DTypeError(
            f"mask: expected a boolean tensor [b, n], True for tokens that are no padding; got {_kind(mask)}"
        )
    if tuple(mask.shape) != (b, n):
        raise ShapeError(f"mask: shape {tuple(mask.shape)}, expected [{b}, {n}], the batch and tokens of outputs")
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ConfigError(f"mask: has the value {int(mask[(mask != 0) & (mask != 1)][0])}, expected True and False")
    if not bool(mask.any()):
        raise ConfigError("mask: is False for all tokens")
    return mask.bool()


def checked_weights(weights: Sequence[Weights], sides: str) -> dict[str, list[Tensor]]:
    """The projections named by the letters of `sides`, each a list over layers in float32 (float64 for float64)."""
    weights = [weights] if isinstance(weights, Mapping) else list(weights)
    if not weights:
        raise ShapeError("weights: got none, expected one dictionary for each layer")
    found: dict[str, list[Tensor]] = {side: [] for side in sides}
    for layer, given in enumerate(weights):
        for side in sides:
            name = f"weights[{layer}][{side!r}]"
            x = given.get(side)
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise DTypeError(f"{name}: expected a floating-point tensor {SIDES[side]}, got {_kind(x)}")
            if x.ndim != 3 or 0 in x.shape:
                raise ShapeError(f"{name}: shape {tuple(x.shape)}, expected {SIDES[side]} with none of them 0")
            first = found[side][0].shape if found[side] else x.shape
            if x.shape[1:] != first[1:]:
                raise ShapeError(f"{name}: shape {tuple(x.shape)}, expected [h, {first[1]}, {first[2]}] as in layer 0")
            if not bool(torch.isfinite(x).all()):
                raise ConfigError(f"{name}: {int((~torch.isfinite(x)).sum())} entries are NaN or infinite")
            found[side].append(compute(x.detach()))
    flat = _alike("weights", [x for side in sides for x in found[side]])
    return {side: flat[k * len(weights) : (k + 1) * len(weights)] for k, side in enumerate(sides)}


def per_query_head(keys: list[Tensor], heads: list[Tensor], side: str) -> list[Tensor]:
    """Key or value projections [h_kv, …] repeated for the heads that share them: [h, …]."""
    wide = []
    for layer, (k, h) in enumerate(zip(keys, heads, strict=True)):
        if h.shape[0] % k.shape[0]:
            raise ShapeError(
                f"weights[{layer}][{side!r}]: {k.shape[0]} heads, expected a divisor of the {h.shape[0]} heads that "
                f"share them"
            )
        wide.append(k.repeat_interleave(h.shape[0] // k.shape[0], 0))
    return wide


def _alike(name: str, layers: list[Tensor]) -> list[Tensor]:
    """The layers in the widest dtype among them. DeviceError if they are on different devices."""
    for x in layers:
        if x.device != layers[0].device:
            raise DeviceError(f"{name}: some are on {x.device}, some on {layers[0].device}; move them to one device")
    double = any(x.dtype == torch.float64 for x in layers)
    return [x.double() for x in layers] if double else layers


def _kind(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


def _check_finite(name: str, what: str, bad: Tensor) -> None:
    """Raise ConfigError for heads with numbers that are not finite, of which there are `bad` [h]."""
    if bool(bad.any()):
        heads = bad.nonzero().flatten().tolist()
        listed = ", ".join(map(str, heads[:8])) + (", …" if len(heads) > 8 else "")
        raise ConfigError(f"{name}: {int(bad.sum())} {what} of head {listed} are NaN or infinite")
