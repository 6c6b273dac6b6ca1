"""Checks of what is done with a model: gradients, decoding with a cache, generation."""

from typing import Any

import torch
from registry_case import (
    FACTOR,
    FLOOR,
    PADDED,
    UNSTABLE,
    Case,
    NotApplicable,
    Wrong,
    nudged,
    outputs,
    run,
    short_error,
    switched,
)
from registry_inputs import BATCH, LENGTH, tokens
from torch import Tensor

from headwise.models.adapters.huggingface.library import cache_argument


def _gradients(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the parameters, and of the inputs that have any."""
    given = {k: x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
             for k, x in case.given.items()}  # fmt: skip
    floats = {k: x for k, x in given.items() if isinstance(x, Tensor) and x.requires_grad}
    weights = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(11)
    loss = torch.zeros(())
    for name, x in outputs(case.model, given).items():
        if name not in case.unstable and x.requires_grad:
            loss = loss + (x.float() * torch.randn(x.shape, generator=generator)).sum() / max(
                1e-6, float(x.detach().abs().max())
            )
    if not loss.requires_grad:
        raise NotApplicable("its outputs have no gradient")
    found = torch.autograd.grad(loss, [*weights.values(), *floats.values()], allow_unused=True)
    named = dict(zip([*weights, *floats], found, strict=True))
    return ({name: named[name] for name in weights if named[name] is not None},
            {name: named[name] for name in floats if named[name] is not None})  # fmt: skip


def _same_gradients(case: Case, which: int) -> None:
    try:
        theirs = _gradients(case)[which]
        moved = dict.fromkeys(theirs, 0.0)
        for seed in (1, 2):
            with nudged(case.model, seed):
                for name, x in _gradients(case)[which].items():
                    moved[name] = max(moved.get(name, 0.0), float((x - theirs[name]).abs().max()))
    except NotApplicable:
        raise
    except Exception as error:
        raise NotApplicable(f"its own code has no gradients: {short_error(error)}") from None
    if not theirs:
        raise NotApplicable("no inputs are numbers")
    with switched(case.model):
        ours = _gradients(case)[which]
    largest = max(float(x.abs().max()) for x in theirs.values())
    for name in ours.keys() | theirs.keys():
        mine, their = ours.get(name), theirs.get(name)
        if mine is None or their is None:
            there = their if mine is None else mine
            if bool(there.abs().max() > 1e-6 * largest):
                raise Wrong(f"gradient of {name}: only {'theirs' if mine is None else 'ours'} is there")
            continue
        bound = max(FACTOR * moved[name], 2 * FLOOR * largest)
        error = float((mine - their).abs().max())
        if bound > UNSTABLE * largest and error <= largest:
            continue
        if not error <= bound:
            raise Wrong(
                f"gradient of {name}: differs by {error:.1e}, {error / largest:.1e} of the largest; allowed {bound:.1e}"
            )


def gradients_of_weights(case: Case) -> None:
    """Gradients of all parameters are those of the model's own code."""
    _same_gradients(case, 0)


def gradients_of_inputs(case: Case) -> None:
    """Gradients of the inputs that are numbers, too."""
    _same_gradients(case, 1)


def _steps(case: Case, ids: Tensor, first: int) -> Tensor:
    """The logits of a text, computed with a cache: a beginning at once, the rest one by one."""
    model, cache, found = case.model, None, []
    argument = cache_argument(model)
    for start, stop in [(0, first), *((i, i + 1) for i in range(first, ids.shape[1]))]:
        more = {} if cache is None else {argument: cache}
        torch.manual_seed(0)
        out = model(input_ids=ids[:, start:stop], use_cache=True, **more)
        cache = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, 1)


def _decoded(case: Case) -> tuple[Tensor, float]:
    if (
        not case.generates()
        or not case.takes(cache_argument(case.model), "input_ids")
        or "decoder_input_ids" in case.given
    ):
        raise NotApplicable("it is no causal language model")
    ids = tokens(case.model.config, LENGTH)
    try:
        with torch.no_grad():
            theirs = _steps(case, ids, 6)
            moved = 0.0
            for seed in (1, 2):
                with nudged(case.model, seed):
                    moved = max(moved, float((_steps(case, ids, 6) - theirs).abs().max()))
    except Exception as error:
        raise NotApplicable(f"its own code does not decode so: {short_error(error)}") from None
    size = float(theirs.abs().max())
    if FACTOR * moved > UNSTABLE * size:
        raise NotApplicable(f"one unit in the last place changes its own logits by {moved / size:.0e}")
    return theirs, max(FACTOR * moved, FLOOR * size)


def decoding_with_a_cache(case: Case) -> None:
    """Logits computed with a cache, token by token, are those of the model's own code with its cache."""
    theirs, bound = _decoded(case)
    with torch.no_grad(), switched(case.model):
        ours = _steps(case, tokens(case.model.config, LENGTH), 6)
    error = float((ours - theirs).abs().max())
    if not error <= bound:
        raise Wrong(f"logits differ by {error:.1e}; allowed {bound:.1e}")


def cache_as_the_full_pass(case: Case) -> None:
    """Logits computed with a cache are those of one call with the whole text."""
    theirs, bound = _decoded(case)
    ids = {"input_ids": tokens(case.model.config, LENGTH)}
    with torch.no_grad():
        full = run(case.model, ids).logits
        if full.shape != theirs.shape or not float((full - theirs).abs().max()) <= 2 * bound:
            raise NotApplicable("its own code computes something else with a cache")
        with switched(case.model):
            ours, whole = _steps(case, ids["input_ids"], 6), run(case.model, ids).logits
    error = float((ours - whole).abs().max())
    if not error <= 2 * bound:
        raise Wrong(f"logits differ by {error:.1e}; allowed {2 * bound:.1e}")


def generated_tokens(case: Case) -> None:
    """model.generate gives the tokens that it gives with the model's own code, with padding on the left."""
    if not case.model.can_generate():
        raise NotApplicable("it does not generate")
    given = {name: x for name, x in case.given.items() if not name.startswith("decoder_")}
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if getattr(case.model.config, "is_encoder_decoder", False):
        options |= {"decoder_start_token_id": 1, "bos_token_id": 1}
    if case.kind == "text" and case.takes("attention_mask"):
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[1, :PADDED] = 0
        given["attention_mask"] = mask

    def generate() -> Tensor:
        torch.manual_seed(0)
        made = case.model.generate(**given, **options)
        return made if isinstance(made, Tensor) else made.sequences

    with torch.no_grad():
        try:
            theirs = generate()
            with nudged(case.model, 1):
                again = generate()
        except Exception as error:
            raise NotApplicable(f"its own code does not generate so: {short_error(error)}") from None
        if not torch.equal(theirs, again):
            raise NotApplicable("one unit in the last place changes its own tokens")
        with switched(case.model):
            ours = generate()
    if not torch.equal(ours, theirs):
        raise Wrong(f"{int((ours != theirs).sum())} of {theirs[:, -6:].numel()} tokens differ")
