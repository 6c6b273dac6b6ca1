"""Attention maps as files: safetensors with the mask, the scale and the scores in the header, never pickle."""

import json
import math
import os
from typing import Any

import torch
from torch import Tensor

from headwise import masks, scores
from headwise.contents import Entry, each, number, parsed, reading, whole
from headwise.errors import CheckpointError, ConfigError, DTypeError, ShapeError
from headwise.rule import Rule, check_vectors
from headwise.scores import check_scores
from headwise.tensor_files import read_tensors, write_tensors

FORMAT = "headwise-map-4"  # those before it had no checksum
NAMES = ("q", "k", "lse")
COUNTS = "nonfinite_values"
DEEPEST = 200  # masks inside masks
KINDS = {
    kind.__name__: kind
    for kind in (
        masks.And, masks.Or, masks.Window, masks.Sinks, masks.Lengths, masks.Documents, masks.Dense, masks.Causal,
        masks.Everything, scores.SoftCap, scores.ALiBi, scores.RelativeBias, scores.Bias, scores.SinkLogits,
    )
}  # fmt: skip


def save(path: str | os.PathLike[str], tensors: dict[str, Tensor], rule: Rule, kernel: str) -> None:
    """Write q, k, lse and perhaps nonfinite_values with their rule; the file appears whole or not at all.

    Raises:
        CheckpointError: if the file cannot be written, or the rule has a mask or a score that is not headwise's own.
        ShapeError, DTypeError, ConfigError: if the tensors and the rule do not fit each other.
    """
    _check(tensors, rule)
    tensors = dict(tensors)
    header = {
        "format": FORMAT, "scale": repr(float(rule.scale)), "kernel": kernel,
        "mask": json.dumps(_encode(rule.mask, tensors, DEEPEST)),
        "scores": json.dumps([_encode_score(score, tensors) for score in rule.scores]),
    }  # fmt: skip
    if not rule.grid.at_end:
        header["first"] = str(rule.grid.first)
    write_tensors(path, tensors, header)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Rule, str]:
    """What `save` was given.

    Raises:
        CheckpointError: naming the file, if it is missing, damaged or something else, or its contents do not fit
            together.
    """
    with reading(path, "attention map"):
        tensors, header = read_tensors(path, FORMAT)
        text = Entry(dict(header))
        given = {name: tensors.pop(name) for name in (*NAMES, COUNTS) if name in tensors}
        if missing := [name for name in NAMES if name not in given]:
            raise CheckpointError(f"tensor {missing[0]!r} is missing")
        check_vectors(given["q"], given["k"])
        b, h, n, _ = given["q"].shape
        first = whole(parsed(text.word("first")), "first") if "first" in text else None
        mask = _decode(Entry(parsed(text.word("mask")), "mask"), tensors, DEEPEST)
        codes = each(parsed(text.word("scores")), "scores", Entry)
        changes = tuple(_decode_score(code, tensors) for code in codes)
        scale = number(parsed(text.word("scale")), "scale")
        rule = Rule(mask, scale, masks.Grid(b, h, n, given["k"].shape[2], first), changes)
        _check(given, rule)
        if tensors:
            raise CheckpointError(f"tensor {next(iter(tensors))!r} belongs to no mask and no score")
        return given, rule, text.word("kernel")


def _check(tensors: dict[str, Tensor], rule: Rule) -> None:
    """Raise if the tensors and the rule are not those of one map."""
    q, k, lse = (tensors[name] for name in NAMES)
    check_vectors(q, k)
    if tuple(rule.grid) != (*q.shape[:3], k.shape[2]):
        raise ShapeError(
            f"rule: made for {tuple(rule.grid)} (b, h, n, m), but q is {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    wide = torch.promote_types(q.dtype, torch.float32)
    if lse.shape != q.shape[:3] or lse.dtype != wide:
        raise ShapeError(f"lse: {lse.dtype} {tuple(lse.shape)}; expected {wide} {tuple(q.shape[:3])} as q has rows")
    counts = tensors.get(COUNTS)
    if counts is not None:
        if counts.shape != k.shape[:2] or counts.dtype != torch.int64:
            raise DTypeError(
                f"{COUNTS}: {counts.dtype} {tuple(counts.shape)}; expected torch.int64 {tuple(k.shape[:2])}"
            )
        if bool((counts < 0).any()):
            raise ConfigError(f"{COUNTS}: a count below 0")
    if not math.isfinite(rule.scale):
        raise ConfigError(f"scale={rule.scale}: expected a finite number")
    rule.mask.check(rule.grid)
    check_scores(rule.scores, rule.grid, q.device)


def _encode(mask: masks.Mask, tensors: dict[str, Tensor], deepest: int) -> dict[str, Any]:
    kind = _kind("mask", mask)
    match mask:
        case masks.And() | masks.Or():
            if not deepest:
                raise CheckpointError(f"more than {DEEPEST} masks inside one another cannot be saved; use one Dense(…)")
            left, right = (_encode(part, tensors, deepest - 1) for part in (mask.left, mask.right))
            return {"kind": kind, "left": left, "right": right}
        case masks.Window():
            return {"kind": kind, "left": int(mask.left), "right": int(mask.right)}
        case masks.Sinks():
            return {"kind": kind, "count": int(mask.count)}
        case masks.Lengths():
            queries = None if mask.queries is None else mask.queries.long().tolist()
            return {"kind": kind, "keys": mask.keys.long().tolist(), "queries": queries, "side": mask.side}
        case masks.Documents():
            return {"kind": kind, "tensor": _put(mask.ids, tensors)}
        case masks.Dense():
            return {"kind": kind, "tensor": _put(mask.mask.to(torch.uint8), tensors)}
    return {"kind": kind}


def _decode(code: Entry, tensors: dict[str, Tensor], deepest: int) -> masks.Mask:
    match code.word("kind"):
        case "And" | "Or" as kind:
            if not deepest:
                raise CheckpointError(f"more than {DEEPEST} masks inside one another")
            left, right = (_decode(code.entry(side), tensors, deepest - 1) for side in ("left", "right"))
            return left & right if kind == "And" else left | right
        case "Window":
            return masks.Window(code.whole("left"), code.whole("right"))
        case "Sinks":
            return masks.Sinks(code.whole("count"))
        case "Lengths":
            queries = None if code.raw("queries") is None else code.each("queries", whole)
            return masks.Lengths(code.each("keys", whole), queries, side=code.word("side"))
        case "Documents":
            return masks.Documents(_take(code, tensors))
        case "Dense":
            allowed = _take(code, tensors)
            if allowed.dtype != torch.uint8 or bool((allowed > 1).any()):
                raise CheckpointError("Dense: expected a tensor of 0 and 1")
            return masks.Dense(allowed.bool())
        case "Causal":
            return masks.Causal()
        case "Everything":
            return masks.Everything()
        case other:
            raise CheckpointError(f"unknown mask {other!r}")


def _encode_score(score: scores.Score, tensors: dict[str, Tensor]) -> dict[str, Any]:
    kind = _kind("score", score)
    match score:
        case scores.SoftCap():
            return {"kind": kind, "cap": float(score.cap)}
        case scores.ALiBi():
            return {"kind": kind, "tensor": _put(score.slopes, tensors)}
        case scores.RelativeBias():
            return {"kind": kind, "tensor": _put(score.values, tensors), "first": score.first}
        case scores.Bias():
            return {"kind": kind, "tensor": _put(score.values, tensors)}
        case scores.SinkLogits():
            return {"kind": kind, "tensor": _put(score.logits, tensors)}
    raise AssertionError(kind)


def _decode_score(code: Entry, tensors: dict[str, Tensor]) -> scores.Score:
    match code.word("kind"):
        case "SoftCap":
            return scores.SoftCap(code.number("cap"))
        case "ALiBi":
            return scores.ALiBi(_take(code, tensors))
        case "RelativeBias":
            return scores.RelativeBias(_take(code, tensors), code.whole("first"))
        case "Bias":
            return scores.Bias(_take(code, tensors))
        case "SinkLogits":
            return scores.SinkLogits(_take(code, tensors))
        case other:
            raise CheckpointError(f"unknown score {other!r}")


def _kind(what: str, thing: object) -> str:
    """The name that a file has for a mask or a score. CheckpointError for a class of the caller's own."""
    name = type(thing).__name__
    if KINDS.get(name) is not type(thing):
        raise CheckpointError(f"a {what} of type {name} cannot be saved; only headwise's own can")
    return name


def _put(x: Tensor, tensors: dict[str, Tensor]) -> str:
    """Join a tensor to those of the file, and give its name there."""
    name = f"tensor.{len(tensors)}"
    tensors[name] = x
    return name


def _take(code: Entry, tensors: dict[str, Tensor]) -> Tensor:
    name = code.word("tensor")
    if name not in tensors:
        raise CheckpointError(f"tensor {name!r} is missing, or belongs to two masks or scores")
    return tensors.pop(name)
