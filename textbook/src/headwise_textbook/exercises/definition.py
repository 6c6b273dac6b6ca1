"""Multi-head attention step by step, with one step changed as in a known mistake.

A mistake has a name `step/what`; `steps` computes the definition, or a definition with mistakes, and MISTAKES has a
sentence for each. Matrices are x @ W + b, masks are True where a query may see a key.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.wording import Bilingual
from headwise_textbook.texts import read_toml

Weights = Mapping[str, tuple[Tensor | None, Tensor | None]]  # of q, k, v and o: [d_in, d_out] and [d_out]
STEPS = ("project", "split", "score", "scale", "mask", "softmax", "weigh", "merge", "output")
PARTS = {
    "project": "q projected", "split": "q", "score": "scores", "scale": "scores", "mask": "masked",
    "softmax": "weights", "weigh": "heads", "merge": "merged", "output": "output",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An input: x of queries, keys and values as [b, n, d], or [b, h, n, d] if the module has heads already."""

    x: tuple[Tensor, Tensor, Tensor]
    num_heads: int
    weights: Weights
    mask: Tensor | None = None  # [n, n]
    strided: tuple[bool, ...] = (False, False)  # whether a head has each h-th channel, before and after attention
    apart: bool = False  # whether the result is that of the heads, [b, h, n, d]

    @property
    def names(self) -> dict[str, float]:
        """The sizes by their letters."""
        b, n = self.x[0].shape[0], self.x[0].shape[-2]
        width = self.x[0].shape[-1] * (self.num_heads if self.x[0].ndim == 4 else 1)
        w = self.weights.get("q", (None, None))[0]  # heads may be narrower than the width by their number
        rows = width if w is None or self.x[0].ndim == 4 else w.shape[-1]
        return {"b": b, "n": n, "h": self.num_heads, "d": width, "d_k": rows // self.num_heads}


def steps(case: Case, *mistakes: str) -> dict[str, Tensor]:
    """What each step returns. RuntimeError where shapes do not fit, as in PyTorch."""
    changed = dict(one.split("/") for one in mistakes)
    if changed.get("project") == "turned":
        turned = case.x[0].transpose(0, 1), case.x[1].transpose(0, 1), case.x[2].transpose(0, 1)
        found = steps(replace(case, x=turned), *(one for one in mistakes if one != "project/turned"))
        return {**found, "output": found["output"].transpose(0, 1)}
    projected = _projected(case, changed.get("project", ""))
    found = {f"{name} projected": x for name, x in zip("qkv", projected, strict=True)}
    for name in "qkv":
        how, _, only = changed.get("split", "").partition("-")
        x = found[f"{name} projected"]
        found[name] = _split(x, case, how if only in ("", name) else "") if x.ndim == 3 else x
    q, k, v = found["q"], found["k"], found["v"]
    match changed.get("score"):
        case "untransposed":
            scores = q @ k
        case "swapped":
            scores = k @ q.mT
        case _:
            scores = q @ k.mT
    found["scores"] = scores = scores * _factor(case, changed.get("scale", ""))
    found["masked"] = scores = _masked(scores, case.mask, changed.get("mask", ""))
    weights = _softmax(scores, changed.get("softmax", ""))
    if case.mask is not None and changed.get("mask") in ("after", "inverted_after"):
        weights = weights * (case.mask if changed["mask"] == "after" else ~case.mask)
    found["weights"] = weights = weights / case.names["d_k"] ** 0.5 if changed.get("scale") == "after" else weights
    values = {"keys": k, "queries": q}.get(changed.get("weigh", ""), v)
    found["heads"] = heads = (weights.mT if changed.get("weigh") == "transposed" else weights) @ values
    if case.apart:
        return {**found, "output": heads}
    merge = changed.get("merge", "")
    merged = _merged(heads, case, "view" if changed.get("split") == "kept" and not merge else merge)
    found["merged"] = merged
    found["output"] = _output(merged, case, changed.get("output", ""))
    return found


def _projected(case: Case, how: str) -> list[Tensor]:
    kind, _, what = how.partition("-")
    found = []
    for name, x in zip("qkv", case.x, strict=True):
        used = what[1] if kind == "uses" and what[0] == name else name
        w, b = case.weights.get(used, (None, None))
        source = case.x["qkv".index(what[1])] if kind == "from" and what[0] == name else x
        if w is None or (kind == "raw" and what == name):
            found.append(source)
            continue
        y = source @ (w.mT if kind == "transposed" else w)
        found.append(y if b is None or (kind == "unbiased" and what in ("all", name)) else y + b)
    return found


def _split(x: Tensor, case: Case, how: str) -> Tensor:
    b, n, _ = x.shape
    h = case.num_heads
    match how:
        case "view":
            return x.reshape(b, h, n, -1)
        case "kept":
            return x.reshape(b, n, h, -1)
        case "one":
            return x[:, None]
    if case.strided[0]:
        return x.reshape(b, n, -1, h).permute(0, 3, 1, 2)
    return x.reshape(b, n, h, -1).transpose(1, 2)


def _factor(case: Case, how: str) -> float:
    sizes = case.names
    d_k = sizes["d_k"]
    return {
        "none": 1.0, "after": 1.0, "width": sizes["d"] ** -0.5, "square": 1 / d_k, "times": d_k**0.5,
        "length": sizes["n"] ** -0.5, "heads": sizes["h"] ** -0.5, "fourth": d_k**-0.25,
    }.get(how, d_k**-0.5)  # fmt: skip


def _masked(scores: Tensor, mask: Tensor | None, how: str) -> Tensor:
    if mask is None or how in ("ignored", "after", "inverted_after"):
        return scores
    if how == "added":
        return scores + mask
    if how == "zero":
        return scores.where(mask, 0.0)
    if how == "transposed":
        mask = mask.mT
    elif how == "inverted":
        mask = ~mask
    elif how == "strict":
        mask = mask & ~torch.eye(len(mask), dtype=torch.bool)
    elif how == "loose":
        mask = mask | torch.ones_like(mask).triu(1).tril(1)
    return scores.where(mask, -torch.inf)


def _softmax(scores: Tensor, how: str) -> Tensor:
    match how:
        case "queries" | "heads" | "batch":
            return scores.softmax({"queries": -2, "heads": 1, "batch": 0}[how])
        case "none":
            return scores
        case "log":
            return scores.log_softmax(-1)
        case "sigmoid":
            return scores.sigmoid()
        case "exp":
            return scores.exp()
        case "twice":
            return scores.softmax(-1).softmax(-1)
        case "all":
            return scores.flatten(-2).softmax(-1).view_as(scores)
    return scores.softmax(-1)


def _merged(heads: Tensor, case: Case, how: str) -> Tensor:
    b, n, h = heads.shape[0], case.x[0].shape[-2], case.num_heads
    match how:
        case "view":
            return heads.reshape(b, n, -1)
        case "mean":
            return heads.mean(1)
        case "sum":
            return heads.sum(1)
        case "last":
            return heads[:, -1]
        case "apart":
            return heads
    if case.strided[1]:
        return heads.permute(0, 2, 3, 1).reshape(b, n, h * heads.shape[-1])
    return heads.transpose(1, 2).reshape(b, n, -1)


def _output(merged: Tensor, case: Case, how: str) -> Tensor:
    w, bias = case.weights.get("o", (None, None))
    if w is None or how == "missing":
        return merged
    y = merged @ (w.mT if how == "transposed" else w)
    y = y if bias is None or how == "unbiased" else y + bias
    if how == "twice":
        y = y @ w + (0 if bias is None else bias)
    return y + case.x[0] if how == "residual" else y


def _mistakes() -> dict[str, Bilingual]:
    """What each mistake is, by step and name, with the letters of sizes in braces."""
    found = {}
    for name, entry in read_toml(__package__, "mistakes.toml").items():
        for of in entry.get("of", [""]):
            said = (text.replace("{x}", of[:1]).replace("{y}", of[1:]) for text in (entry["en"], entry["zh"]))
            found[name.replace("*", of)] = Bilingual(*said)
    return found


MISTAKES = _mistakes()


def agree(theirs: Tensor, ours: Tensor, without: Tensor | None = None, tolerance: float = 2e-4) -> bool:
    """Whether values are equal within rounding; without: queries [n] that are not compared, along the axis of n."""
    if theirs.shape != ours.shape:
        return False
    if without is not None and bool(without.any()):
        theirs, ours = (x.index_select(-2, (~without).nonzero()[:, 0]) for x in (theirs, ours))
    return torch.allclose(theirs.double(), ours.double(), rtol=tolerance, atol=tolerance)


def explained(theirs: Tensor, cases: Sequence[Case], allowed: Callable[[str], bool], pairs: int = 2) -> tuple[
    Case, tuple[str, ...]
] | None:  # fmt: skip
    """The case, and the mistakes, at most two, with which the definition gives a value; the fewest of them.

    pairs: of how many cases pairs of mistakes are tried.
    """
    names = [one for one in MISTAKES if allowed(one)]
    tried: list[tuple[Case, tuple[str, ...]]] = [(case, ()) for case in cases]
    tried += [(case, (one,)) for one in names for case in cases]
    step = {one: STEPS.index(one.split("/")[0]) for one in names}
    tried += [(case, (one, two)) for one in names for two in names if step[one] < step[two] for case in cases[:pairs]]
    for case, mistakes in tried:
        mask = case.mask
        if mask is not None and "mask/inverted" in mistakes:
            mask = ~mask
        elif mask is not None and "mask/strict" in mistakes:
            mask = mask.tril(-1)
        try:
            found = steps(case, *mistakes)["output"]
        except RuntimeError:  # the shapes of such a mistake do not fit
            continue
        if agree(theirs, found, None if mask is None else ~mask.any(-1)):
            return case, mistakes
    return None
