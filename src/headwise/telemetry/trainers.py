"""Callbacks for transformers' `Trainer` and for Lightning: they watch the optimiser steps of a run, and can clip."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import nn

from headwise.errors import ConfigError
from headwise.telemetry.clip import qk_clip
from headwise.telemetry.record import Record
from headwise.telemetry.watching import watch
from headwise.telemetry.writers import Writer


class TrainingRecord:
    """The common part of the callbacks.

    Attributes:
        record: of the run; None before it begins.
    """

    def __init__(self, tau: float | None, writers: Sequence[Writer], options: dict[str, Any]) -> None:
        if twice := {"steps", "during"} & options.keys():
            raise ConfigError(f"{sorted(twice)[0]}: the trainer determines where steps end; leave it out")
        self._tau, self._writers, self._options = tau, writers, options
        self.record: Record | None = None

    def begin(self, model: nn.Module, step: int) -> None:
        """Watch the model, in addition to the numbers of an earlier run on it.

        Args:
            step: how many steps the trainer has made: with those of a checkpoint, if the run is resumed from one.
        """
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
