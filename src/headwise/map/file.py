"""Attention maps as files: safetensors with the mask, the scale and the scores in the header, never pickle."""

import json
import math
import os
from typing import Any

import torch
from torch import Tensor

from headwise.base.read import Entry, each, number, parsed, read_tensors, reading, whole, word
from headwise.errors import CheckpointError, ConfigError, DTypeError, ShapeError
from headwise.fields import Described, read, unregistered, write
from headwise.masks import Grid, Mask, Span
from headwise.masks.grid import NO_GAP
from headwise.rule import Rule, check_vectors
from headwise.scores import Score, check_scores

FORMAT = "headwise-map-5"
NAMES = ("q", "k", "lse")
COUNTS = "nonfinite_values"
TENSOR, BOOLEAN = "tensor.", "boolean."  # prefixes of the names of the tensors of masks and scores


def content(tensors: dict[str, Tensor], rule: Rule, kernel: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file with q, k, lse and optionally nonfinite_values, and their rule. CheckpointError if a
    class of mask or score is not registered; other HeadwiseErrors if tensors and rule do not match."""
    _check(tensors, rule)
    tensors = dict(tensors)
    store = _Store(tensors)
    header = {
        "format": FORMAT, "scale": repr(float(rule.scale)), "kernel": kernel,
        "mask": json.dumps(_code(rule.mask, store)),
        "scores": json.dumps([_code(score, store) for score in rule.scores]),
    }  # fmt: skip
    if not rule.grid.at_end:
        header["first"] = str(rule.grid.first)
    if rule.grid.gap.size:
        header["gap"] = json.dumps(rule.grid.gap)
    if rule.grid.extra:
        header["extra"] = str(rule.grid.extra)
    return tensors, header


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Rule, str]:
    """Read tensors, rule and kernel that `save` wrote. CheckpointError names the file if it is missing, damaged, of
    another format, or inconsistent."""
    with reading(path, "attention map"):
        tensors, header = read_tensors(path, FORMAT)
        text = Entry(dict(header))
        given = {name: tensors.pop(name) for name in (*NAMES, COUNTS) if name in tensors}
        if missing := [name for name in NAMES if name not in given]:
            raise CheckpointError(f"tensor {missing[0]!r} is missing")
        check_vectors(given["q"], given["k"])
        b, h, n, _ = given["q"].shape
        first = whole(parsed(text.word("first")), "first") if "first" in text else None
        gap = _gap(parsed(text.word("gap"))) if "gap" in text else NO_GAP
        extra = whole(parsed(text.word("extra")), "extra", 0) if "extra" in text else 0
        store = _Store(tensors)
        mask: Mask = read(Mask, parsed(text.word("mask")), "mask", store.take)
        codes = parsed(text.word("scores"))
        scores: list[Score] = each(codes, "scores", lambda code, at: read(Score, code, at, store.take))
        scale = number(parsed(text.word("scale")), "scale")
        rule = Rule(mask, scale, Grid(b, h, n, given["k"].shape[2], first, gap, extra), tuple(scores))
        _check(given, rule)
        if tensors:
            raise CheckpointError(f"tensor {next(iter(tensors))!r} belongs to no mask or score")
        return given, rule, text.word("kernel")


def _gap(code: Any) -> Span:
    ends = each(code, "gap", lambda end, at: whole(end, at, 0))
    if len(ends) != 2 or ends[0] > ends[1]:
        raise CheckpointError(f"gap: expected [start, stop], got {ends}")
    return Span(*ends)


def _check(tensors: dict[str, Tensor], rule: Rule) -> None:
    """Raise if the tensors and the rule do not match."""
    q, k, lse = (tensors[name] for name in NAMES)
    check_vectors(q, k)
    if tuple(rule.grid) != (*q.shape[:3], k.shape[2]):
        raise ShapeError(
            f"rule: its sizes (b, h, n, m) are {tuple(rule.grid)}, but q is {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    if rule.grid.gap.start > rule.grid.m:
        raise ConfigError(f"gap={tuple(rule.grid.gap)}: it begins after all {rule.grid.m} keys")
    if rule.grid.extra > rule.grid.m:
        raise ConfigError(f"extra={rule.grid.extra}: more than the {rule.grid.m} keys")
    wide = torch.promote_types(q.dtype, torch.float32)
    if lse.shape != q.shape[:3] or lse.dtype != wide:
        raise ShapeError(f"lse: got {lse.dtype} {tuple(lse.shape)}, expected {wide} {tuple(q.shape[:3])}")
    counts = tensors.get(COUNTS)
    if counts is not None:
        b, h = q.shape[:2]
        fits = counts.dtype == torch.int64 and counts.ndim == 2 and len(counts) == b
        # Not those of k: the keys of talking heads are joined, and each value has its own head.
        if not fits or (h % counts.shape[1] if counts.shape[1] else h):
            raise DTypeError(
                f"{COUNTS}: got {counts.dtype} {tuple(counts.shape)}, expected torch.int64 [{b}, a divisor of {h}]"
            )
        if bool((counts < 0).any()):
            raise ConfigError(f"{COUNTS}: counts must be >= 0")
    if not math.isfinite(rule.scale):
        raise ConfigError(f"scale={rule.scale}: expected a finite number")
    rule.mask.check(rule.grid)
    check_scores(rule.scores, rule.grid, q.device)


class _Store:
    """The tensors of masks and scores in a file, by name; each belongs to one field."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def put(self, x: Tensor) -> str:
        """Add a tensor to those of the file and return its name. Booleans are stored as bytes."""
        name = f"{BOOLEAN if x.dtype == torch.bool else TENSOR}{len(self.tensors)}"
        self.tensors[name] = x.to(torch.uint8) if x.dtype == torch.bool else x
        return name

    def take(self, code: Any, at: str) -> Tensor:
        """Remove and return the tensor of a name."""
        name = word(code, at)
        if not name.startswith((BOOLEAN, TENSOR)) or name not in self.tensors:
            raise CheckpointError(f"{at}: tensor {name!r} is missing, or belongs to two masks or scores")
        x = self.tensors.pop(name)
        if not name.startswith(BOOLEAN):
            return x
        if x.dtype != torch.uint8 or bool((x > 1).any()):
            raise CheckpointError(f"{at}: expected a tensor of 0 and 1")
        return x.bool()


def _code(thing: Described, store: _Store) -> dict[str, Any]:
    """Serialize a mask or a score; raises CheckpointError if its class is not registered."""
    if (other := unregistered(thing)) is not None:
        raise CheckpointError(
            f"a {other.called} of type {type(other).__name__} cannot be saved; declare its fields in `holds` and "
            f"register the class with headwise.{other.called}s.register"
        )
    return write(thing, store.put)
