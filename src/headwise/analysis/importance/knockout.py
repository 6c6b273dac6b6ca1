"""Importance of attention between two sets of tokens: the loss without it, minus the loss of the whole model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from headwise.analysis.importance.losses import Losses, LossFunction, checked_inputs, held_still
from headwise.analysis.importance.values import HeadImportance, standard_error
from headwise.errors import ConfigError, check_choice, check_whole
from headwise.interventions import Forbid, Tokens
from headwise.models.attaching import Attachment, intervene, model_of
from headwise.models.site import HeadSite
from headwise.progress import Progress

TokensOf: TypeAlias = Tokens | Callable[[Any], Tokens]
BY = ("head", "layer")


def attention_knockout(
    model: nn.Module | Attachment,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    queries: TokensOf,
    keys: TokensOf,
    *,
    by: str = "head",
    window: int = 1,
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> HeadImportance:
    """L(queries may not attend to keys) − L, for one head or a window of layers at a time: where information flows from
    the keys to the queries. Negative where the model is better without it.

        >>> import torch, headwise as hw
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> batches = [torch.randn(7, 2, 16) for _ in range(4)]
        >>> loss_fn = lambda model, x: model(x)[-1].square().mean()        # any number, such as −log p of an answer
        >>> flow = hw.analysis.attention_knockout(model, batches, loss_fn, queries=-1, keys=[0, 1], by="layer")
        >>> flow.table.column("attention knockout, windows of 1").shape
        torch.Size([3])

    Args:
        model: any that `hw.intervene` and `find_heads` support, or for attention that is written by hand the handle of
            `hw.attach(model, batch=…)`. It runs in eval mode and is unchanged afterwards.
        batches: each runs once unchanged, and once for every head or layer.
        loss_fn: (model, batch) → the batch's mean loss, a tensor of one number.
        queries, keys: the two sets of tokens (`headwise.interventions`), or functions batch → set.
        by: "head": each head alone. "layer": all heads of `window` layers around each layer.
        window: of by="layer": an odd number of layers; at the ends it has fewer.
        sites: of `find_heads(model)`, in the order of the model; all by default.
        progress: called after each run of the model.
    Returns:
        `HeadImportance` in the unit of the loss; with by="layer" it has one entry for each layer. `samples` are the
        paired differences of each batch; the errors of the table are the standard errors of their means.
    Raises:
        ConfigError, ShapeError: naming the argument; also if a batch has none of the tokens.
    Source: Geva et al. 2023, 2304.14767, §4 (their figures use windows of 9 layers).
    """
    subject = model_of(model)
    kept, places = checked_inputs(subject, batches, sites)
    check_choice("by", by, BY)
    check_whole("attention_knockout", "window", window, 1)
    if window % 2 == 0 or (by == "head" and window > 1):
        raise ConfigError(f"window={window}: expected an odd number of layers, with by='layer'")
    names = [site.name for site in places]
    sets: list[tuple[list[str], list[int] | None]]
    if by == "head":
        sets = [([name], [head]) for name, site in zip(names, places, strict=True) for head in range(site.num_heads)]
        counts = [site.num_heads for site in places]
    else:
        sets = [(names[max(0, i - window // 2) : i + window // 2 + 1], None) for i in range(len(names))]
        counts = [1] * len(names)
    losses = Losses(subject, loss_fn, places, len(kept) * (1 + len(sets)), progress)
    samples, whole = np.empty((len(kept), len(sets))), np.empty(len(kept))
    with held_still(subject), torch.no_grad():
        for number, batch in enumerate(kept):
            pair = [tokens(batch) if callable(tokens) else tokens for tokens in (queries, keys)]
            whole[number] = float(losses.of(batch, number))
            for i, (layers, heads) in enumerate(sets):
                edit = Forbid(*pair, heads=heads)
                with intervene(model, edit, layers=layers, unused="raise"):
                    samples[number, i] = float(losses.of(batch, number, f" with {edit!r} in {', '.join(layers)}"))
    samples -= whole[:, None]
    method = "attention knockout" if by == "head" else f"attention knockout, windows of {window}"
    ends = np.cumsum(counts)[:-1]
    values, errors = (np.split(x, ends) for x in (samples.mean(0), standard_error(samples)))
    return HeadImportance.of(method, "loss", names, values, errors, samples=samples, loss=float(whole.mean()))
