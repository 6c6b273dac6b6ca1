"""`watch(model)`: statistics of every head while a model runs; also in the training loops of other libraries."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import nn

from headwise.errors import ConfigError
from headwise.stats import Measure
from headwise.telemetry.alarms import Alarm, Writer
from headwise.telemetry.chosen import chosen, options
from headwise.telemetry.clip import qk_clip
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
    differentiable: bool = False,
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
        differentiable: keep the maps of the last forward in its graph, for `headwise.losses`, which take the record:
            `loss + 0.01 * hw.losses.entropy_floor(record, 0.5)`. `record.maps` and their `measured` have gradients, as
            of `attend(…, differentiable=True)`; `latest`, `totals` and `history` are numbers. It implies maps="lazy",
            and the next forward that is a step releases them. A call whose map is not that of `attend` has a remark.
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
        during=during, alarms=alarms, on_error=on_error, differentiable=differentiable,
    )  # fmt: skip
    return Record(model, chosen(model, layers, "watch"), how)


class TrainingRecord:
    """The common part of the callbacks."""

    def __init__(self, tau: float | None, writers: Sequence[Writer], options: dict[str, Any]) -> None:
        if twice := {"steps", "during"} & options.keys():
            raise ConfigError(f"{sorted(twice)[0]}: the trainer determines where steps end; leave it out")
        self._tau, self._writers, self._options = tau, writers, options
        self.record: Record | None = None  # of the run; None before it begins

    def begin(self, model: nn.Module, step: int) -> None:
        """Watch the model, in addition to the numbers of an earlier run on it. step: how many the trainer has made."""
        if self.record is not None:
            self.record.stop()  # of a run that failed
        if self.record is None or self.record.model is not model:
            self.record = watch(model, steps="manual", during="training", **self._options)
            for writer in self._writers:
                self.record.write_to(writer)
        self.record.start(max(step, self.record.ledger.index))

    def end_step(self) -> None:
        """End a step after the optimiser's."""
        record = self.record
        if record is None or record.step() is None or self._tau is None:
            return
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        qk_clip(record.model, record.reduce() if many else record, self._tau)

    def end(self) -> None:
        """End the record when training ends."""
        if self.record is not None:
            self.record.stop()
        for writer in self._writers:
            writer.close()


def trainer_callback(*, tau: float | None = None, writers: Sequence[Writer] = (), **options: Any) -> Any:
    """A `TrainerCallback` for transformers' `Trainer`: `Trainer(…, callbacks=[trainer_callback(every=10)])`.

    Args:
        tau: clip the queries and keys of heads whose largest logit is over it (`qk_clip`), after each measured step.
        writers: as for `Record.write_to`; closed when training ends.
        options: those of `watch`, except steps and during.
    Returns:
        The callback; its `record` is the `Record` once training has begun. It excludes evaluation. Steps are numbered
        as the trainer's, from 0 on; a run that is resumed from a checkpoint continues with the steps of the checkpoint.
        `Trainer` does not say when training fails: the model is watched then until `record.stop()`.
    Raises:
        ConfigError: if transformers is not installed, or an option is invalid.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ConfigError(f"trainer_callback() needs transformers: pip install transformers ({error})") from None

    class HeadwiseCallback(TrainingRecord, TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.begin(model, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.end_step()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.end()

    return HeadwiseCallback(tau, writers, options)


def lightning_callback(*, tau: float | None = None, writers: Sequence[Writer] = (), **options: Any) -> Any:
    """A `Callback` for Lightning: `Trainer(callbacks=[lightning_callback(every=10)])`; see `trainer_callback`.

    The watched model is the `LightningModule`; layers are named as in it.

    Raises:
        ConfigError: if neither lightning nor pytorch_lightning is installed, or an option is invalid.
    """

    class HeadwiseCallback(TrainingRecord, _lightning()):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # At on_fit_start, the steps of a checkpoint are not known yet.
            self._stepped = trainer.global_step
            self.begin(pl_module, trainer.global_step)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            if trainer.global_step != self._stepped:  # not while gradients accumulate
                self._stepped = trainer.global_step
                self.end_step()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.end()

    return HeadwiseCallback(tau, writers, options)


def _lightning() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(name).Callback
        except ImportError:
            continue
    raise ConfigError("lightning_callback() needs Lightning: pip install lightning")
