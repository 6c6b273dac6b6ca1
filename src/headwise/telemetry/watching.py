"""`watch(model)`: statistics of every head while a model runs."""

from collections.abc import Iterable, Sequence

from torch import nn

from headwise.stats import Measure
from headwise.telemetry.alarms import Alarm
from headwise.telemetry.chosen import chosen
from headwise.telemetry.options import options
from headwise.telemetry.recognised import RecognisedRecord
from headwise.telemetry.record import Record


def watch(
    model: nn.Module,
    *,
    measures: Sequence[str | Measure] | None = None,
    every: int = 1,
    layers: Iterable[int | str] | None = None,
    heads: Sequence[int] | None = None,
    maps: str = "none",
    values: bool = False,
    history: int = 1000,
    steps: str = "forward",
    during: str = "always",
    alarms: Sequence[Alarm] = (),
    on_error: str = "warn",
) -> Record:
    """Record the attention of a model, head by head; within `with`, or from `start()` to `stop()`.

    >>> import torch, headwise as hw
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    >>> with hw.watch(model, measures=["entropy", "max_logit"]) as record:
    ...     y = model(torch.randn(7, 3, 16))
    >>> record.latest["entropy"].shape                                       # [layers, heads]
    torch.Size([2, 4])
    >>> record
    Record(2 layers; 1 of 1 steps measured; not watching)

    While it is active, headwise computes the attention of models of transformers and of `nn.MultiheadAttention`, as it
    does that of its own layers, with the statistics in the same pass; afterwards the models are as before. In all other
    modules, attention is recognised in each measured forward by what it computes, as `headwise.models.recognise` does,
    and computed once more for the statistics; what these modules compute is unchanged.

    Args:
        model: the module that is called. Calls of a part deep inside it alone are not recorded: watch that part.
        measures: names (`headwise measures` lists them) or measures of your own; None for the default ones: the largest
            logit, the entropy and a few more. In self attention, measures of rows exclude padded queries.
        every: measure the first and then every Nth step; the others cost next to nothing.
        layers: names of attention modules (`*` matches anything) or their indices; None for all.
        heads: numbers of the heads to keep, in every layer; None for all.
        maps: "lazy" keeps the `AttentionMap` of every call of the last measured forward (q, k and log-sum-exp), and
            "pooled" small pictures of them.
        values: with maps="lazy", also keep the values and the outputs of all heads, for TransformerLens's names such as
            `record.maps["blocks.0.attn.hook_z"]`.
        history: the number of measured steps to keep one by one.
        steps: "forward": each call of the model is a step. "manual": a step is all calls between two calls of
            `record.step()`, such as the micro-batches of an optimiser's step; maxima are taken over all of them.
        during: "always", or only in "training" or "evaluation" mode; other calls are not steps.
        alarms: conditions to check in every measured step; the measures that they need are added.
        on_error: what happens where something cannot be measured. "warn": a measure that fails is NaN, and the others
            are not; a call that headwise does not support is computed by the model's own attention, and NaN where
            that returns no weights. `record.remarks` has the reason, and when the forward has ended, there is one
            warning for each layer. "raise" raises the error through the model. In either case alarms raise what they
            are made to raise, and ConfigError is raised for layers without one of `heads` and under PyTorch's
            `context_parallel`, where no attention that headwise could leave the call to would be right.
    Returns:
        The `Record`: a context manager, with `start()` and `stop()` for other uses.
    Raises:
        ConfigError: naming the argument, or the modules, if no module can be watched. Where attention is recognised,
            the first forward raises it, with what came nearest; with during="training" it warns.
    Warns:
        UserWarning: after the first forward, of modules that were called without headwise computing their attention;
            `record.unwatched` names them.
    """
    how = options(
        measures=measures, every=every, heads=heads, maps=maps, values=values, history=history, steps=steps,
        during=during, alarms=alarms, on_error=on_error,
    )  # fmt: skip
    what = chosen(model, layers, "watch")
    if what.rest:
        return RecognisedRecord(model, what, how)
    return Record(model, what.known, what.targets, what.unwatched, how)
