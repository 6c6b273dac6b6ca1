"""What is checked of a family of models: the columns of docs/models.md.

A check takes a family and raises where what headwise computes is not what the model's own code ("eager") computes.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from model_families import BATCH, FAMILIES, LENGTH, Family, attention_mask, inputs, make, tokens
from torch import Tensor

import headwise as hw

TOLERANCE = 3e-5  # float32, of the largest output


@contextmanager
def switched(model: Any) -> Iterator[Any]:
    """The model with headwise's attention, and then with its own again."""
    with hw.attach(model):
        yield model


def output(model: Any, **given: Any) -> Tensor:
    """What the model computes, [BATCH, n, …]."""
    return model(**given)[0]


def same(ours: Tensor, theirs: Tensor, real: Tensor | None = None, tolerance: float = TOLERANCE) -> None:
    """Equal to the tolerance, relative to the largest number, in the real places."""
    if real is not None:
        ours, theirs = ours[real], theirs[real]
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error <= tolerance, f"relative error {error:.1e}, more than {tolerance:.0e}"


def forward(family: Family, padded: str | None = None) -> None:
    model = make(family)
    given, real = inputs(family, padded)
    with torch.no_grad():
        theirs = output(model, **given)
        with switched(model):
            ours = output(model, **given)
        if padded and (padded == "left" or family.kind in ("encoder", "both")):  # else causality hides it
            free = {name: x for name, x in given.items() if "attention_mask" not in name}
            assert not torch.allclose(output(model, **free)[real], theirs[real], atol=1e-2), "padding had no say"
    same(ours, theirs, real)


def padding_left(family: Family) -> None:
    forward(family, "left")


def padding_right(family: Family) -> None:
    forward(family, "right")


def generation(family: Family) -> None:
    """The tokens of model.generate with a cache, batched, padded on the left; past any window."""
    model = make(family)
    given, _ = inputs(family, None if family.kind == "speech" else "left")
    given = {name: x for name, x in given.items() if not name.startswith("decoder")}
    options = {"max_new_tokens": 11, "min_new_tokens": 11, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        theirs = model.generate(**given, **options)
        with switched(model):
            ours = model.generate(**given, **options)
    assert torch.equal(ours, theirs)
    assert len(theirs.unique(dim=0)) > 1, "every sequence goes on in the same way"


def gradients(family: Family) -> None:
    model = make(family)
    given, real = inputs(family, None if family.kind in ("image", "speech") else "right")

    def gradient() -> dict[str, Tensor]:
        model.zero_grad()
        output(model, **given)[real].square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    theirs = gradient()
    with switched(model):
        ours = gradient()
    assert ours.keys() == theirs.keys()
    largest = max(float(x.abs().max()) for x in theirs.values())
    for name, mine in ours.items():
        error = float((mine - theirs[name]).abs().max()) / largest
        assert error <= TOLERANCE, f"gradient of {name}: relative error {error:.1e}"


def bf16(family: Family) -> None:
    """At most twice the error of the model's own code in bfloat16, both against float32 with the same weights."""
    narrow = copy.deepcopy(make(family)).bfloat16()
    given, real = inputs(family, None if family.kind in ("image", "speech") else "right")
    small = {name: x.bfloat16() if x.is_floating_point() else x for name, x in given.items()}
    wide = copy.deepcopy(narrow).float()
    with torch.no_grad():
        truth = output(wide, **{name: x.float() if x.is_floating_point() else x for name, x in small.items()})[real]
        theirs = output(narrow, **small)[real]
        with switched(narrow):
            ours = output(narrow, **small)[real]
    assert ours.dtype == torch.bfloat16

    def error(x: Tensor) -> float:
        return float((x.float() - truth).square().mean().sqrt())

    assert error(ours) <= 2.0 * error(theirs) + 1e-3 * float(truth.square().mean().sqrt())


def dropout(family: Family) -> None:
    """Attention alone in training: random, the same again from the same seed, and none of it in eval."""
    model = copy.deepcopy(make(family, dropout=0.4))
    given, real = inputs(family)
    seen: list[hw.models.AttentionCall] = []

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return output(model, **given)[real]

    with torch.no_grad(), switched(model):
        with hw.models.observe(seen.append, model=model):
            still = run(1)
        assert torch.equal(still, run(2))
        for observation in seen:
            observation.module.train()
        one, again, other = run(1), run(1), run(2)
    assert seen
    assert torch.equal(one, again)
    assert not torch.allclose(one, other, atol=1e-3)
    assert not torch.allclose(one, still, atol=1e-3)
    assert torch.isfinite(one).all()


def packed(family: Family) -> None:
    """Several texts in one row: as if each had been alone."""
    model = make(family)
    ids, ends = tokens()[:2], ((0, 4, 9, LENGTH), (0, 6, LENGTH))
    positions = torch.stack([
        torch.cat([torch.arange(stop - start) for start, stop in pairwise(e)]) for e in ends
    ])  # fmt: skip
    given: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if family.packed_by == "cu_seq_lens":  # one row, and the model's own code does not know how
        given = {name: x[:1] for name, x in given.items()}
        given |= {"cu_seq_lens_q": torch.tensor(ends[0]), "cu_seq_lens_k": torch.tensor(ends[0])}
    with torch.no_grad():
        with switched(model):
            ours = output(model, **given, use_cache=False)
        if family.packed_by == "position_ids":
            same(ours, output(model, **given, use_cache=False))
        alone = output(model, input_ids=ids[:1, 4:9])
        assert not torch.allclose(output(model, input_ids=ids)[:1, 4:9], alone, atol=1e-2)
    same(ours[:1, 4:9], alone)


def cross_attention(family: Family) -> None:
    """Attention to an encoder's padded states of another length, with gradients to them."""
    model = make(family, cross=True)
    generator = torch.Generator().manual_seed(3)
    if family.cross:
        width = model.config.hidden_size
        states = torch.randn(BATCH, 7, width, generator=generator, requires_grad=True)
        mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [0] * 3 + [1] * 4])
        given = {"input_ids": tokens(), "encoder_hidden_states": states, "encoder_attention_mask": mask}
    else:
        width = model.config.d_model
        states = torch.randn(BATCH, 17, width, generator=generator, requires_grad=True)
        given = {"decoder_input_ids": tokens(), "encoder_outputs": (states,)}
        if family.kind != "speech":
            given["attention_mask"] = attention_mask("right", 17)

    def run() -> tuple[Tensor, Tensor]:
        out = output(model, **given)
        return out.detach(), torch.autograd.grad(out.square().sum(), states)[0]

    theirs, their_gradient = run()
    with switched(model):
        seen: list[hw.models.AttentionCall] = []
        with hw.models.observe(seen.append, model=model):
            ours, gradient = run()
    same(ours, theirs)
    same(gradient, their_gradient)
    assert any(observation.map.shape[2:] == (LENGTH, states.shape[1]) for observation in seen)


def weights(family: Family) -> None:
    """output_attentions=True as an argument of the call: the attentions that the model's own code gives."""
    model = make(family)
    given, _ = inputs(family)
    with torch.no_grad():
        theirs = model(**given, output_attentions=True)
        with switched(model):
            ours = model(**given, output_attentions=True)
    names = [name for name in theirs if name.endswith("attentions") and theirs[name]]
    assert names
    assert names == [name for name in ours if name.endswith("attentions") and ours[name]]
    for name in names:
        assert len(ours[name]) == len(theirs[name]) == 2
        for mine, their in zip(ours[name], theirs[name], strict=True):
            assert not mine.made
            same(mine.dense(), their)


FEATURES: dict[str, Callable[[Family], None]] = {
    "forward": forward,
    "padding left": padding_left,
    "padding right": padding_right,
    "generation with cache": generation,
    "gradients": gradients,
    "bf16": bf16,
    "dropout": dropout,
    "packed": packed,
    "cross attention": cross_attention,
    "weights": weights,
}

_MISSING = {
    "decoder": {"cross attention"},
    "encoder": {"generation with cache", "packed"},
    "both": {"packed"},
    "speech": {"packed"},
    "image": {"padding left", "padding right", "generation with cache", "packed", "cross attention"},
}


def applies(family: Family, feature: str) -> bool:
    """Whether a family has that feature, here."""
    return feature not in _MISSING[family.kind] or (feature == "cross attention" and family.cross is not None)


def cell(family: Family, feature: str) -> str:
    """What the document says of it."""
    return "yes" if applies(family, feature) else "–"


def table() -> str:
    """The table of docs/models.md, a row a family."""
    head, rows = ["family", *FEATURES], []
    for family in FAMILIES:
        name = f"{family.name} ({family.notes})" if family.notes else family.name
        rows.append([name, *(cell(family, feature) for feature in FEATURES)])
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
