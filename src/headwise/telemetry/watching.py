"""`watch(model)`: what every head does while a model trains or answers."""

from collections.abc import Iterable, Sequence

from torch import nn

from headwise.stats import Measure
from headwise.telemetry.alarms import Alarm
from headwise.telemetry.options import options
from headwise.telemetry.places import asked
from headwise.telemetry.record import Record


def watch(
    model: nn.Module,
    *,
    measures: Sequence[str | Measure] | None = None,
    every: int = 1,
    layers: Iterable[int | str] | None = None,
    heads: Sequence[int] | None = None,
    maps: str = "none",
    history: int = 1000,
    steps: str = "forward",
    during: str = "always",
    alarms: Sequence[Alarm] = (),
) -> Record:
    """A record of the attention of a model, head by head; it watches within `with`, or from `start()` to `stop()`.

    >>> import torch, headwise as hw
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    >>> with hw.watch(model, measures=["entropy", "max_logit"]) as record:
    ...     y = model(torch.randn(7, 3, 16))
    >>> record.latest["entropy"].shape                                       # [layers, heads]
    torch.Size([2, 4])
    >>> record
    Record(2 layers; 1 of 1 steps measured; not watching)

    While it watches, headwise computes the attention of models of transformers and of `nn.MultiheadAttention`, with the
    statistics in the same pass; afterwards what was there before does. headwise's own layers are asked for them.

    Args:
        model: the module that is called; calls of a part of it alone are not seen (watch that part).
        measures: names (`headwise measures` lists them) and measures of your own; None for those whose class says that
            `watch` shows them, the largest logit, the entropy and a few more. In self attention, padded queries are not
            counted by measures of rows.
        every: only the first, and then each so-manieth step is measured; the others cost next to nothing.
        layers: names of attention modules (`*` stands for anything) or their indices; None for all.
        heads: their numbers, in every layer; None for all. All are computed, these are kept.
        maps: "lazy" keeps the `AttentionMap` of every call of the last measured forward (q, k and log-sum-exp), and
            "pooled" small pictures of them.
        history: how many measured steps are kept one by one.
        steps: "forward": each call of the model is a step. "manual": a step is what lies between two calls of
            `record.step()`, such as the micro-batches of an optimiser's step; maxima are then taken over them.
        during: "always", or only in "training" or "evaluation" mode; other calls are no steps.
        alarms: what to look for in every measured step; the measures that they need are added.
    Returns:
        The `Record`: a context manager, with `start()` and `stop()` for other uses.
    Raises:
        ConfigError: naming the argument, or the modules, if there is nothing that can be watched.
    """
    how = options(
        measures=measures, every=every, heads=heads, maps=maps, history=history, steps=steps, during=during,
        alarms=alarms,
    )  # fmt: skip
    return Record(model, *asked(model, layers, "watch"), how)
