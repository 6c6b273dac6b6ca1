"""Attention maps as files: safetensors with the mask and the scale in the header, never pickle."""

import json
import os
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise import masks
from headwise.errors import CheckpointError
from headwise.files import atomic_path

FORMAT = "headwise-map-1"


def save(path: str | os.PathLike[str], tensors: dict[str, Tensor], mask: masks.Mask, scale: float, kernel: str) -> None:
    """Write q, k and lse (any names) with their mask; the file appears whole or not at all."""
    tensors = dict(tensors)
    header = {"format": FORMAT, "scale": repr(scale), "kernel": kernel, "mask": json.dumps(_encode(mask, tensors))}
    with atomic_path(path) as temporary:
        save_file({name: x.contiguous() for name, x in tensors.items()}, temporary, metadata=header)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], masks.Mask, float, str]:
    """What `save` was given."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise CheckpointError(f"attention map {os.fspath(path)!r} does not exist") from None
    except SafetensorError as error:
        raise CheckpointError(f"attention map {os.fspath(path)!r} cannot be read, maybe truncated: {error}") from None
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{os.fspath(path)!r} is not an attention map written by headwise ({FORMAT})")
    mask = _decode(json.loads(header["mask"]), tensors)
    return tensors, mask, float(header["scale"]), header["kernel"]


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
