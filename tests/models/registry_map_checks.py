"""Checks of what is seen of a model: every attention call, its weights, its measures, its masks."""

import warnings
from collections import Counter
from typing import Any

import torch
from registry_case import (
    FACTOR,
    Case,
    NotApplicable,
    Outputs,
    Partly,
    Wrong,
    nudged,
    outputs,
    run,
    short_error,
    switched,
)
from torch import Tensor, nn

import headwise as hw
from headwise.models.adapters.huggingface.masks import MaskTensor

MEASURES = ("entropy", "max_logit", "sink_mass")


def _attentions(x: Any) -> dict[str, list[Tensor]]:
    items = x.items() if hasattr(x, "items") else ()
    return {name: [y for y in part if isinstance(y, Tensor)] for name, part in items
            if str(name).endswith("attentions") and isinstance(part, list | tuple)}  # fmt: skip


def returned_weights(case: Case) -> None:
    """output_attentions=True returns the weights of the model's own code, and makes none of them before it is read."""
    try:
        with torch.no_grad():
            theirs = _attentions(run(case.model, case.given, output_attentions=True))
    except Exception as error:
        raise NotApplicable(f"its own code does not take output_attentions: {short_error(error)}") from None
    theirs = {name: found for name, found in theirs.items() if found}
    if not theirs:
        raise NotApplicable("its own code returns none")
    with torch.no_grad():
        with nudged(case.model, 1):
            nearby = _attentions(run(case.model, case.given, output_attentions=True))
        with switched(case.model):
            ours = _attentions(run(case.model, case.given, output_attentions=True))
    moved = {name: [float((x - y).abs().max()) for x, y in zip(found, nearby[name], strict=True)]
             for name, found in theirs.items()}  # fmt: skip
    if early := [name for name, found in ours.items() if any(getattr(x, "made", False) for x in found)]:
        raise Wrong(f"{', '.join(early)} were made before they were read")
    if any(not ours.get(name) for name in theirs):
        raise Partly("the model does not pass on that attentions are wanted, so that they are None")
    for name, found in theirs.items():
        if len(ours.get(name, ())) != len(found):
            raise Wrong(f"{name}: {len(ours.get(name, ()))} instead of {len(found)}")
        for i, (mine, their) in enumerate(zip(ours[name], found, strict=True)):
            mine = mine.dense() if hasattr(mine, "dense") else mine
            if mine.shape != their.shape:
                raise Wrong(f"{name}[{i}]: shape {tuple(mine.shape)} instead of {tuple(their.shape)}")
            error, bound = float((mine - their).abs().max()), max(3e-5, FACTOR * moved[name][i])
            sums = mine.sum(-1, keepdim=True)
            if error > bound and bool((sums < 1 - 1e-4).any()):
                error = float((mine / sums - their).abs().max())
                if error <= 10 * bound:
                    raise Partly("the model's own weights leave out the learned sink's share, which is in headwise's")
            if not error <= bound:
                raise Wrong(f"{name}[{i}]: differs by {error:.1e}; allowed {bound:.1e}")


def _observed(case: Case, **options: Any) -> tuple[list[hw.models.AttentionCall], Outputs]:
    seen: list[hw.models.AttentionCall] = []
    with torch.no_grad(), switched(case.model), hw.models.observe(seen.append, model=case.model, **options):
        out = outputs(case.model, case.given)
    return seen, out


def every_attention_seen(case: Case) -> None:
    """Each module that computes attention in the model's own code is computed and seen by headwise, call by call."""
    seen, _ = _observed(case)
    names = {one.name for one in seen}
    missing = [
        name for name in case.attention
        if not any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in names)
    ]  # fmt: skip
    if missing and not names:
        raise Wrong(f"there is no error, but headwise computes none of the {len(missing)} attention modules")
    if missing:
        kinds = sorted({type(case.attention[name]).__name__ for name in missing})
        said = f"{len(missing)} of {len(case.attention)} attention modules compute by themselves: {', '.join(kinds)}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with hw.attach(case.model) as handle:
                attached = handle.attached
        said_there = " ".join(str(one.message) for one in caught)
        for name in missing:
            told = name in attached or any(kind in said_there for kind in _around(case.model, name))
            if not told:
                raise Wrong(f"{said}, and attach does not say so")
        raise Partly(said)
    counts = Counter(one.name for one in seen)
    for name, calls in case.calls.items():
        if name in counts and counts[name] < calls:
            raise Wrong(f"{name} computes {calls} times, and {counts[name]} of them are seen")


def _around(model: nn.Module, name: str) -> list[str]:
    """The classes of a module and of those that it lies in, as far as they are called attention."""
    parts = name.split(".")
    kinds = [type(model.get_submodule(".".join(parts[:at]))).__name__ for at in range(len(parts), 0, -1)]
    return [kind for at, kind in enumerate(kinds) if at == 0 or "Attention" in kind]


def rows_of_weights(case: Case) -> None:
    """Every row of every map sums to one; to less with learned sinks, to nothing where nothing may be seen."""
    seen, _ = _observed(case)
    if not seen:
        raise NotApplicable("no map was seen")
    for one in seen:
        dense = one.map.to_dense()
        sums = dense.sum(-1)
        if not torch.isfinite(dense).all() or float(dense.min()) < 0:
            raise Wrong(f"{one.name}: weights that are not finite or negative")
        sinks = any(type(score).__name__ == "SinkLogits" for score in one.map.rule.scores)
        # Weights are exp(score − log-sum-exp), exact to the rounding of the scores.
        scores = one.map.rule.scale * one.map.q.norm(dim=-1).max() * one.map.k.norm(dim=-1).max()
        fits = (sums - 1).abs() < 1e-5 + 8 * torch.finfo(torch.float32).eps * float(scores.abs())
        if sinks:
            fits |= sums <= 1
        fits |= sums == 0
        if not fits.all():
            raise Wrong(f"{one.name}: rows sum to {float(sums[~fits][0]):.6f}")


def observing_changes_nothing(case: Case) -> None:
    """Outputs while somebody observes are those while nobody does, to rounding."""
    with torch.no_grad(), switched(case.model):
        unseen = outputs(case.model, case.given)
    _, seen = _observed(case, measures=list(MEASURES))
    case.compare(seen, unseen)


def watched_measures(case: Case) -> None:
    """`watch` measures every head that it sees, all numbers are finite, and the model is afterwards what it was."""
    with torch.no_grad():
        with hw.watch(case.model, measures=list(MEASURES), maps="lazy") as record:
            out = outputs(case.model, case.given)
        if case.model.config._attn_implementation != "eager":
            raise Wrong(f"watch leaves attn_implementation={case.model.config._attn_implementation!r}")
    case.compare(out, case.theirs)
    kept = Counter(name.partition("#")[0] for name in record.maps)  # name#2 is the second call of a module
    for name, calls in Counter(one.name for one in _observed(case)[0]).items():
        if kept[name] != calls:
            raise Wrong(f"{kept[name]} maps are kept of {calls} calls of {name}")
    for at, name in enumerate(record.latest.layers):
        heads = record.maps[name].shape[1]
        for measure in MEASURES:
            if not torch.isfinite(torch.as_tensor(record.latest[measure][at][:heads])).all():
                raise Wrong(f"{measure} of {name} is not finite")


def masks_stay_short(case: Case) -> None:
    """No mask of n×m booleans is made of what transformers says of padding and causality."""
    made, make = [], MaskTensor.make

    def counting(self: MaskTensor) -> Tensor:
        made.append(tuple(self.shape))
        return make(self)

    given = case.given
    try:
        given, _ = case.padding("right")
        with torch.no_grad():
            outputs(case.model, given)
    except Exception:
        given = case.given
    MaskTensor.make = counting  # type: ignore[method-assign]
    try:
        with torch.no_grad(), switched(case.model):
            outputs(case.model, given)
    finally:
        MaskTensor.make = make  # type: ignore[method-assign]
    if made:
        raise NotApplicable(f"the model itself reads its mask as a tensor, {len(made)} times")
