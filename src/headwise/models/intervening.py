"""`intervene(model, …)`: the attention of a model with edits."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from headwise import events
from headwise.errors import ConfigError, check_choice, warn
from headwise.interventions.edit import Edit, Placed
from headwise.models.adapters.places import Place, give_back, take_over
from headwise.models.adapters.selecting import named, select
from headwise.models.attaching import Attachment
from headwise.models.hooks import called
from headwise.nn.base import AttentionLayer

UNUSED = ("warn", "raise", "ignore")
RECOGNISED = "hw.intervene(hw.attach(model, batch=…), …)"


def model_of(model: nn.Module | Attachment) -> nn.Module:
    """The model itself, for what supports both it and its handle."""
    return model.model if isinstance(model, Attachment) else model


@contextmanager
def intervene(
    model: nn.Module | Attachment,
    *edits: Edit,
    layers: Iterable[int | str] | int | str | None = None,
    unused: str = "warn",
) -> Iterator[None]:
    """Within it, the attention of a model is computed with these edits.

    >>> import torch, headwise as hw
    >>> from headwise.interventions import Forbid, Scale
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    >>> x = torch.randn(7, 1, 16)
    >>> with hw.intervene(model, Forbid(queries=6, keys=[0, 1]), Scale(0.0, heads=[2]), layers="layers.1.*"):
    ...     y = model(x)

    headwise computes the attention of models of transformers and of `nn.MultiheadAttention` meanwhile, as it does that
    of its own layers; afterwards the model is as before. Outputs and gradients are exact, in O(n) memory; run the
    backward pass within it if the model uses gradient checkpointing, which repeats the forward pass there. Observers
    and records receive the weights that were used.

    Args:
        model: a model of transformers, `nn.MultiheadAttention`s or headwise's layers; or, for any other model, the
            handle `hw.attach(model, batch=…)` of its recognised attention.
        edits: applied in this order, and after those of the enclosing `intervene` contexts.
        layers: names of attention modules (`*` matches anything) or their indices; None for all.
        unused: "warn", "raise" or "ignore" at the end if an edit changed nothing: its tokens were in no call, or there
            was no call; and if a module was called without an edit of its attention, as one whose forward was replaced
            on the instance.
    Returns:
        A context manager.
    Raises:
        ConfigError: naming the argument; also for a layer of a design whose heads mix their scores or outputs, such as
            `TalkingHeadsAttention` and `SparseHeadMixture`. While it is active, calls raise ConfigError for a head that
            the module lacks, and ShapeError for a map of another size.
    """
    if not edits or not all(isinstance(edit, Edit) for edit in edits):
        given = ", ".join(type(edit).__name__ for edit in edits) or "none"
        raise ConfigError(f"intervene(model, *edits): expected edits such as Forbid(queries, keys), got {given}")
    check_choice("unused", unused, UNUSED)
    targets: list[nn.Module] = []
    if isinstance(model, Attachment):
        modules = dict(model.model.named_modules())
        places = named([Place(name, modules[name], "attached") for name in model.editable], layers)
    else:
        places, targets, _ = select(model, layers, "intervene", done="edited", way_out=RECOGNISED)
    for place in places:
        if isinstance(place.module, AttentionLayer) and (why := place.module.coupling.of_heads):
            raise ConfigError(
                f"intervene(model): {place.name or 'the model'} ({type(place.module).__name__}) cannot be edited: {why}"
            )
    placed = [Placed(edit, []) for edit in edits]
    take_over(targets)
    try:
        names = {place.module: place.name for place in places}
        with called(names) as calls, events.subscribe(modules=names, edits=placed):
            yield
    finally:
        give_back(targets)
    if unused == "ignore":
        return
    for what in _without_effect(placed, [place for place in places if place.name in calls]):
        if unused == "raise":
            raise ConfigError(what)
        warn(what)


def _without_effect(placed: Sequence[Placed], places: Sequence[Place]) -> Iterator[str]:
    """What was not done, in sentences."""
    reached = {name for name, _ in placed[0].applied}
    if missed := [f"{place.name or 'the model'} ({type(place.module).__name__})" for place in places
                  if place.name not in reached]:  # fmt: skip
        yield (
            f"intervene(model): {', '.join(missed)}: called, but without an attention that headwise computes, as where "
            f"its forward was replaced on the instance; no edit was applied there"
        )
        if not reached:
            return
    for one in placed:
        if not any(hit for _, hit in one.applied):
            nowhere = f"none of the {len(one.applied)} calls had a token of each set, so it changed nothing"
            yield f"{one.edit!r}: {nowhere if one.applied else 'no attention of its layers was called'}"
