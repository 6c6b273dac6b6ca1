"""The saved state of a training run, checked when it is read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headwise.contents import Entry, reading
from headwise.errors import CheckpointError
from headwise.lm.checkpoint import WHAT
from headwise.tensor_files import tensor_like
from headwise.wording import Bilingual

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, each of its parameter's size


@dataclass(frozen=True)
class TrainingState:
    """A saved run.

    Attributes:
        model: its `state_dict`. optimizer: the state of each parameter, in order.
        step, seconds: completed. best: held-out losses of the best model. log: one entry per evaluation.
    """

    model: dict[str, Tensor]
    optimizer: list[dict[str, Tensor]]
    step: int
    seconds: float
    best: dict[str, float]
    log: list[dict[str, Any]]


def training_state(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], info: Mapping[str, Any], model: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
) -> TrainingState:  # fmt: skip
    """The state in a file for a model with this `state_dict` and an optimizer of these parameters.

    Raises:
        CheckpointError: if something is missing or has another size.
    """
    with reading(path, WHAT, way_out=Bilingual("--fresh trains anew", "--fresh 重新训练")):
        entry = Entry(dict(info), "info")
        log = entry.entries("log")
        for one in log:
            one.number("heldout_loss")
        best = entry.numbers("best")
        if best and "all" not in best:
            raise CheckpointError("info.best: expected the loss of all files")
        return TrainingState(
            {name: tensor_like(tensors, f"model.{name}", x) for name, x in model.items()},
            [_moments(tensors, i, parameter) for i, parameter in enumerate(parameters)],
            entry.whole("step", least=0), entry.number("seconds", least=0.0), best,
            [one.plain() for one in log],
        )  # fmt: skip


def _moments(tensors: Mapping[str, Tensor], i: int, parameter: Tensor) -> dict[str, Tensor]:
    prefix = f"optimizer.{i}."
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    if not names:  # saved before the first step
        return {}
    found = {name: tensor_like(tensors, f"{prefix}{name}", parameter) for name in MOMENTS}
    step = tensors.get(f"{prefix}step")
    if step is None or step.shape != ():
        raise CheckpointError(f"{prefix}step: expected one number")
    return {"step": step, **found}
