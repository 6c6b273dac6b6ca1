"""Attention maps as files: safetensors with the mask, the scale and the scores in the header, never pickle."""

import json
import os
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise import masks, scores
from headwise.errors import CheckpointError
from headwise.files import atomic_path
from headwise.rule import Rule

FORMAT = "headwise-map-1"
# A reader of an earlier format would pass over these and give wrong weights.
WITH_SCORES = "headwise-map-2"
ELSEWHERE = "headwise-map-3"  # its queries do not stand at the end of the keys


def save(path: str | os.PathLike[str], tensors: dict[str, Tensor], rule: Rule, kernel: str) -> None:
    """Write q, k and lse, and more by any name, with their rule; the file appears whole or not at all."""
    tensors = dict(tensors)
    mask = json.dumps(_encode(rule.mask, tensors))
    header = {"format": FORMAT, "scale": repr(rule.scale), "kernel": kernel, "mask": mask}
    if rule.scores:
        codes = json.dumps([_encode_score(score, tensors) for score in rule.scores])
        header.update(format=WITH_SCORES, scores=codes)
    if not rule.grid.at_end:
        header.update(format=ELSEWHERE, first=str(rule.grid.first))
    with atomic_path(path) as temporary:
        save_file({name: x.contiguous() for name, x in tensors.items()}, temporary, metadata=header)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Rule, str]:
    """What `save` was given."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise CheckpointError(f"attention map {os.fspath(path)!r} does not exist") from None
    except SafetensorError as error:
        raise CheckpointError(f"attention map {os.fspath(path)!r} cannot be read, maybe truncated: {error}") from None
    if header.get("format") not in (FORMAT, WITH_SCORES, ELSEWHERE):
        raise CheckpointError(f"{os.fspath(path)!r} is not an attention map written by headwise ({FORMAT})")
    mask = _decode(json.loads(header["mask"]), tensors)
    changes = tuple(_decode_score(code, tensors) for code in json.loads(header.get("scores", "[]")))
    b, h, n, _ = tensors["q"].shape
    first = int(header["first"]) if "first" in header else None
    rule = Rule(mask, float(header["scale"]), masks.Grid(b, h, n, tensors["k"].shape[2], first), changes)
    return tensors, rule, header["kernel"]


def _encode(mask: masks.Mask, tensors: dict[str, Tensor]) -> dict[str, Any]:
    kind = type(mask).__name__
    match mask:
        case masks.And() | masks.Or():
            return {"kind": kind, "left": _encode(mask.left, tensors), "right": _encode(mask.right, tensors)}
        case masks.Window():
            return {"kind": kind, "left": mask.left, "right": mask.right}
        case masks.Sinks():
            return {"kind": kind, "count": mask.count}
        case masks.Lengths():
            queries = None if mask.queries is None else mask.queries.tolist()
            return {"kind": kind, "keys": mask.keys.tolist(), "queries": queries, "side": mask.side}
        case masks.Documents() | masks.Dense():
            name = f"mask.{len(tensors)}"
            tensors[name] = mask.ids if isinstance(mask, masks.Documents) else mask.mask.to(torch.uint8)
            return {"kind": kind, "tensor": name}
        case masks.Causal() | masks.Everything():
            return {"kind": kind}
    raise CheckpointError(f"a mask of type {kind} cannot be saved; only headwise's own masks can")


def _decode(code: dict[str, Any], tensors: dict[str, Tensor]) -> masks.Mask:
    match code["kind"]:
        case "And":
            return _decode(code["left"], tensors) & _decode(code["right"], tensors)
        case "Or":
            return _decode(code["left"], tensors) | _decode(code["right"], tensors)
        case "Window":
            return masks.Window(code["left"], code["right"])
        case "Sinks":
            return masks.Sinks(code["count"])
        case "Lengths":
            return masks.Lengths(code["keys"], code["queries"], side=code["side"])
        case "Documents":
            return masks.Documents(tensors.pop(code["tensor"]))
        case "Dense":
            return masks.Dense(tensors.pop(code["tensor"]).bool())
        case "Causal":
            return masks.Causal()
        case "Everything":
            return masks.Everything()
    raise CheckpointError(f"unknown mask {code['kind']!r} in the file; it was written by a newer headwise")


def _encode_score(score: scores.Score, tensors: dict[str, Tensor]) -> dict[str, Any]:
    kind, name = type(score).__name__, f"score.{len(tensors)}"
    match score:
        case scores.SoftCap():
            return {"kind": kind, "cap": score.cap}
        case scores.ALiBi():
            tensors[name] = score.slopes
            return {"kind": kind, "tensor": name}
        case scores.RelativeBias():
            tensors[name] = score.values
            return {"kind": kind, "tensor": name, "first": score.first}
        case scores.Bias():
            tensors[name] = score.values
            return {"kind": kind, "tensor": name}
        case scores.SinkLogits():
            tensors[name] = score.logits
            return {"kind": kind, "tensor": name}
    raise CheckpointError(f"a score of type {kind} cannot be saved; only headwise's own scores can")


def _decode_score(code: dict[str, Any], tensors: dict[str, Tensor]) -> scores.Score:
    match code["kind"]:
        case "SoftCap":
            return scores.SoftCap(code["cap"])
        case "ALiBi":
            return scores.ALiBi(tensors.pop(code["tensor"]))
        case "RelativeBias":
            return scores.RelativeBias(tensors.pop(code["tensor"]), code["first"])
        case "Bias":
            return scores.Bias(tensors.pop(code["tensor"]))
        case "SinkLogits":
            return scores.SinkLogits(tensors.pop(code["tensor"]))
    raise CheckpointError(f"unknown score {code['kind']!r} in the file; it was written by a newer headwise")
