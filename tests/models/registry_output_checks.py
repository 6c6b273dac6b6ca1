"""Checks of what a model computes: batches, padding, training, bfloat16, and that nothing of it is left behind.

Each check raises `Wrong`, `NotApplicable`, a `HeadwiseError` (refused), or anything else (a crash).
"""

import copy

import torch
from registry_case import (
    Case,
    NotApplicable,
    Outputs,
    Wrong,
    kept_buffers,
    leaves,
    nudged,
    outputs,
    short_error,
    switched,
)
from registry_inputs import BATCH, Inputs
from torch import Tensor

import headwise as hw


def same_outputs(case: Case) -> None:
    """Outputs are those of the model's own code."""
    with torch.no_grad(), switched(case.model):
        ours = outputs(case.model, case.given)
    case.compare(ours, case.theirs)


def same_bits_again(case: Case) -> None:
    """The same call gives the same bits."""
    with torch.no_grad(), switched(case.model):
        one, two = outputs(case.model, case.given), outputs(case.model, case.given)
    if any(not torch.equal(one[name], two[name]) for name in one):
        with torch.no_grad():
            again = outputs(case.model, case.given)
        if all(torch.equal(case.theirs[name], again[name]) for name in again):
            raise Wrong("two equal calls differ")
        raise NotApplicable("its own code is random")


def alone_as_in_a_batch(case: Case) -> None:
    """A batch entry is what it is alone."""

    def first(given: Inputs) -> Inputs:
        return {k: x[:1] if isinstance(x, Tensor) and x.ndim and len(x) == BATCH else x for k, x in given.items()}

    if any(isinstance(x, Tensor) and (not x.ndim or len(x) != BATCH) for x in case.given.values()):
        raise NotApplicable("its batch is packed in one row")

    def parts(found: Outputs, whole: Outputs) -> Outputs:
        return {name: found[name] for name in found if whole[name].ndim and len(whole[name]) == BATCH}

    with torch.no_grad():
        try:
            theirs = parts(outputs(case.model, first(case.given)), case.theirs)
        except Exception as error:
            raise NotApplicable(f"its own code does not take one entry: {short_error(error)}") from None
        batch = {name: case.theirs[name][:1] for name in theirs}
        try:
            case.compare(theirs, batch)
        except Wrong:
            raise NotApplicable("its own code mixes batch entries") from None
        with switched(case.model):
            ours = outputs(case.model, first(case.given))
    case.compare({name: ours[name] for name in theirs}, batch)


def _padded(case: Case, side: str) -> None:
    given, real = case.padding(side)
    with torch.no_grad():
        try:
            theirs = outputs(case.model, given)
            other = dict(given)
            other["input_ids"] = torch.where(real, given["input_ids"], given["input_ids"].flip(0) + 1)
            leaking = outputs(case.model, other)
        except Exception as error:
            raise NotApplicable(f"its own code does not take it: {short_error(error)}") from None
        allowed, _ = case.measured(lambda: outputs(case.model, given), theirs)
        with switched(case.model):
            ours = outputs(case.model, given)
            unread = outputs(case.model, other)
    try:
        case.compare(leaking, theirs, allowed, real)
    except Wrong:
        raise NotApplicable("in its own code real tokens depend on padding") from None
    case.compare(ours, theirs, allowed, real)
    case.compare(unread, ours, allowed, real)


def padding_on_the_left(case: Case) -> None:
    """With padding on the left, the real places are those of the model's own code, whatever the padding is."""
    _padded(case, "left")


def padding_on_the_right(case: Case) -> None:
    """With padding on the right, too."""
    _padded(case, "right")


def padding_of_targets(case: Case) -> None:
    """With a padding mask of the decoder's tokens, too."""
    if "decoder_input_ids" not in case.given or not case.takes("decoder_attention_mask"):
        raise NotApplicable("it has no decoder beside its encoder")
    n = case.given["decoder_input_ids"].shape[1]
    mask = torch.ones(BATCH, n, dtype=torch.long)
    mask[1, -3:] = 0
    given = {**case.given, "decoder_attention_mask": mask}
    with torch.no_grad():
        try:
            theirs = outputs(case.model, given)
        except Exception as error:
            raise NotApplicable(f"its own code does not take it: {short_error(error)}") from None
        allowed, _ = case.measured(lambda: outputs(case.model, given), theirs)
        with switched(case.model):
            ours = outputs(case.model, given)
    case.compare(ours, theirs, allowed, mask.bool())


def training_mode(case: Case) -> None:
    """In training mode, without dropout, outputs are those of the model's own code."""
    with torch.no_grad(), kept_buffers(case.model):

        def training() -> Outputs:
            with kept_buffers(case.model):
                case.model.train()
                return outputs(case.model, case.given)

        try:
            theirs = training()
            with kept_buffers(case.model):
                case.model.train()
                torch.manual_seed(1)
                other = dict(
                    leaves(case.model(**case.given, **({"use_cache": False} if case.takes("use_cache") else {})))
                )
        except Exception as error:
            raise NotApplicable(f"its own code does not run in training mode: {short_error(error)}") from None
        if any(name not in other or not torch.equal(x, other[name]) for name, x in theirs.items()):
            raise NotApplicable("its own code is random in training")
        allowed, _ = case.measured(training, theirs)
        with switched(case.model):
            ours = training()
    case.compare(ours, theirs, allowed)


def bfloat16(case: Case) -> None:
    """In bfloat16, at most twice the error of the model's own code, both against float32."""
    try:
        narrow = copy.deepcopy(case.model).bfloat16()
        small = {
            k: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in case.given.items()
        }
        wide = copy.deepcopy(narrow).float()
        back = {k: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in small.items()}
        with torch.no_grad():
            truth, theirs = outputs(wide, back), outputs(narrow, small)
            with nudged(narrow, 1):
                moved = outputs(narrow, small)
    except Exception as error:
        raise NotApplicable(f"its own code does not run in it: {short_error(error)}") from None
    with torch.no_grad(), switched(narrow):
        ours = outputs(narrow, small)
    seen = 0
    for name, exact in truth.items():
        size = float(exact.square().mean().sqrt())
        if name in case.unstable or name not in theirs or exact.numel() < 64:
            continue
        if not exact.shape == theirs[name].shape == moved[name].shape == ours[name].shape:
            continue  # how many numbers there are depends on rounding

        def error(x: Tensor, exact: Tensor = exact) -> float:
            rows = (x.float() - exact).flatten(0, -2) if exact.ndim > 1 else (x.float() - exact)[:, None]
            return float(rows.square().mean(-1).sqrt().median())  # where a router chooses otherwise, rows are far off

        their = max(error(theirs[name]), error(moved[name]))
        if not their <= 0.1 * size:
            continue
        seen += 1
        if not error(ours[name]) <= 2 * their + 2e-3 * size:
            raise Wrong(f"{name}: error {error(ours[name]) / size:.1e}, its own code's {their / size:.1e}")
    if not seen:
        raise NotApplicable("its own error is more than a tenth of its outputs, or they are few numbers")


def restored(case: Case) -> None:
    """After `detach` every bit of the outputs and every configuration is what it was."""
    hw.attach(case.model).detach()
    unchanged(case)


def unchanged(case: Case) -> None:
    """Raise `Wrong` if the model does not compute with its own attention, the same bits as before."""
    for part in case.model.modules():
        used = getattr(getattr(part, "config", None), "_attn_implementation", "eager")
        if used == "headwise":
            raise Wrong(f"{type(part).__name__} has attn_implementation={used!r}")
    with torch.no_grad():
        again = outputs(case.model, case.given)
    if any(not torch.equal(x, again[name]) for name, x in case.theirs.items()):
        raise Wrong("outputs have other bits than before")


def weights_untouched(case: Case) -> None:
    """After all that, weights and buffers have the bits that they had."""
    now = case.model.state_dict()
    changed = [name for name, x in case.state.items() if name not in now or not torch.equal(now[name], x)]
    if changed or now.keys() != case.state.keys():
        raise Wrong(f"{', '.join(changed[:3]) or 'names'} changed")
