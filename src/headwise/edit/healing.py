"""Short training after pruning or merging."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.base.run import devices_of, seeded, step_seed
from headwise.errors import ConfigError
from headwise.nn.owned import copied, local

Loss = Callable[[nn.Module, Any], Tensor]  # of a model on a batch, a scalar


@dataclass(frozen=True)
class HealingStep:
    """One step of `heal`, as `watch` gets it; loss is that of the step's batch, before the step."""

    step: int
    steps: int
    loss: float
    lr: float


@dataclass(frozen=True)
class Healed:
    """The trained model, the loss of each step's batch, and the number of trained weights, those with a gradient."""

    model: nn.Module
    losses: tuple[float, ...]
    trained: int

    def __repr__(self) -> str:
        tenth = max(1, len(self.losses) // 10)
        first, last = (sum(part) / len(part) for part in (self.losses[:tenth], self.losses[-tenth:]))
        return (
            f"{len(self.losses)} steps on {self.trained:,} weights; loss {first:.4g} → {last:.4g} (means of the first "
            f"and the last {tenth})"
        )


def heal(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Loss,
    steps: int,
    *,
    lr: float = 1e-4,
    warmup: int | None = None,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    parameters: Iterable[nn.Parameter] | None = None,
    seed: int = 0,
    watch: Callable[[HealingStep], None] | None = None,
    copy: bool = False,
) -> Healed:
    """Train a model for some steps of AdamW, with a warm-up and a cosine down to a tenth.

    Args:
        batches: as many as there are steps, or what can be gone through again and again, such as a list.
        loss_fn: loss_fn(model, batch), a scalar to be made small.
        warmup: steps until the learning rate `lr` is reached, a tenth of all by default.
        weight_decay: of AdamW. clip: largest norm of the gradient.
        parameters: what is trained, all that requires a gradient by default.
        seed: of dropout, and of all else that the model and `loss_fn` draw from torch's default generators: the same
            seed and batches give the same weights on one machine. The caller's generators are left as they were.
        watch: called after each step.
        copy: train a deepcopy; the model itself is unchanged. `parameters` are those of the model itself here too.
    Returns:
        `Healed`. The model is left in the mode, training or not, that it came in.
    Raises:
        ConfigError: for options out of range; for too few batches, and for a loss or gradients that are not finite,
            where the model keeps the steps before it; for a loss that depends on none of the parameters, and for steps
            that changed no weight, as small ones do not in bfloat16.
    """
    warmup = max(1, steps // 10) if warmup is None else warmup
    for name, count, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not isinstance(count, int) or count < least:
            raise ConfigError(f"{name}={count!r}: expected a whole number of at least {least}")
    if not lr > 0 or not weight_decay >= 0 or not clip > 0:
        raise ConfigError(f"lr={lr}, weight_decay={weight_decay}, clip={clip}: expected lr > 0, clip > 0, decay >= 0")
    copies: dict[int, Any] = {}  # by the id of the original
    result = copied(model, copies) if copy else model
    given = model.parameters() if parameters is None else parameters
    chosen = [copies.get(id(p), p) for p in given if p.requires_grad]
    if not chosen:
        raise ConfigError("parameters: none of them requires a gradient, so there is nothing to train")
    optimizer = torch.optim.AdamW(chosen, lr=lr, weight_decay=weight_decay)
    training, losses, source = result.training, list[float](), iter(batches)
    before: dict[nn.Parameter, tuple[int, Tensor]] = {}  # where the first gradient is largest, and the number there
    devices = devices_of(result)
    result.train()
    try:
        for step in range(steps):
            try:
                batch = next(source)
            except StopIteration:
                source = iter(batches)  # a list begins again; what can be gone through once is now empty
                batch = next(source, None)
                if batch is None:
                    raise ConfigError(
                        f"batches: they ended after {step} of {steps} steps; give more, or a list"
                    ) from None
            rate = lr * learning_rate_factor(step, steps, warmup, 0.1)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with seeded(step_seed(seed, step), devices):  # not around batches and watch, which may draw for themselves
                loss = loss_fn(result, batch)
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise ConfigError(f"the loss became {value} at step {step}; give a smaller lr than {lr:g}")
                optimizer.zero_grad(set_to_none=True)
                if loss.requires_grad:
                    loss.backward()
            for p in chosen:
                if p.grad is not None and p not in before:
                    place = int(local(p.grad).abs().argmax()) if local(p).numel() else 0
                    before[p] = place, _number(p, place)
            if not before:
                raise ConfigError(
                    "parameters: the loss depends on none of those that are trained; expected parameters of the model, "
                    "and a loss_fn that runs it with gradients"
                )
            norm = float(nn.utils.clip_grad_norm_(chosen, clip))
            if not math.isfinite(norm):  # a finite loss may have such gradients: √x at 0, sums beyond float16
                raise ConfigError(f"the norm of the gradient became {norm} at step {step}, at a loss of {value:g}")
            optimizer.step()
            losses.append(value)
            if watch is not None:
                watch(HealingStep(step + 1, steps, value, rate))
    finally:
        result.train(training)
        for parameter in chosen:
            parameter.grad = None
    if all(torch.equal(value, _number(p, place)) for p, (place, value) in before.items()):
        raise ConfigError(
            f"lr={lr:g}: {steps} steps changed no weight, as the steps are too small for {chosen[0].dtype}; give a "
            f"larger lr, or train in float32"
        )
    return Healed(result, tuple(losses), sum(p.numel() for p in before))


def _number(parameter: nn.Parameter, place: int) -> Tensor:
    """A number of a parameter, [1]; [0] where this rank has no part of it."""
    return local(parameter.detach()).flatten()[place : place + 1].clone()


def learning_rate_factor(step: int, steps: int, warmup: int, least: float) -> float:
    """Linear warmup over `warmup` steps, then a cosine decay to `least` (Loshchilov & Hutter 2016)."""
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * share))
