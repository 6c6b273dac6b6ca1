"""`gate_gradients(model)`: which heads matter to the loss, accumulated in the training backward pass.

    >>> import torch, headwise as hw
    >>> model = hw.MultiHeadAttention(24, 4)
    >>> with hw.telemetry.gate_gradients(model) as gates:
    ...     for _ in range(3):
    ...         model(torch.randn(2, 5, 24), mask=hw.Causal()).square().mean().backward()
    >>> [len(layer) for layer in gates.importance().column]
    [4]

`gradient_importance` computes the same with backward passes of its own, over given batches and with fixed weights.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from threading import Lock, get_ident
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.importance.losses import HeadImportance
from headwise.errors import ConfigError, check_choice
from headwise.kernels.compiling import eager
from headwise.kernels.events import in_backward, subscribe
from headwise.kernels.spread import Held
from headwise.models.adapters.places import entrances, give_back, select, take_over
from headwise.models.configuration import num_heads
from headwise.models.frames import Calls, turn
from headwise.models.recognise.publisher import FollowedForward, not_followed
from headwise.nn.base import AttentionLayer
from headwise.telemetry.chosen import Chosen, chosen, may_have_more

Self = TypeVar("Self", bound="GateGradients")

PER = ("batch", "row", "token")


def gate_gradients(model: nn.Module, *, layers: Iterable[int | str] | None = None) -> "GateGradients":
    """Accumulate the gradient of a factor ξ = 1 on every head's output, ∂L/∂ξ = Σ_t o_t·∂L/∂o_t, in each backward pass
    of a model; within `with`, or from `start()` to `stop()`.

    The backward pass of attention requires o_t·∂L/∂o_t anyway, so it comes at no extra cost and gradients do not change
    (kernels other than "cpu" compute it again: one product for each number of the output). Both the forward and the
    backward pass must be within.

    Args:
        model: as in `watch`: headwise's layers, nn.MultiheadAttention, models of transformers. Attention of the last
            two is computed by headwise meanwhile. Other attention is recognised in each forward with gradients; its
            layers are listed from their first backward pass on. Calls that only checkpointing with use_reentrant=True
            repeats with gradients are not recorded.
        layers: names of attention modules (`*` matches anything) or their indices; None for all.
    Raises:
        ConfigError: naming the argument, or the modules, if no module is supported.
    Source: Michel et al. 2019, 1905.10650, eq. 2.
    """
    what = chosen(model, layers, "gate_gradients", _unsupported)
    if not what.known and not may_have_more(what.rest, what.unwatched):
        select(model, layers, "gate_gradients", _unsupported)  # which raises
    return GateGradients(model, what)


class GateGradients:
    """The gradients of every head's gate, as returned by `gate_gradients`.

    A loss scale (`torch.amp.GradScaler`) multiplies all of them; passes that are not finite are counted in `skipped`
    and excluded. In distributed training each process has the gradients of its own share of the batch, and
    of its own heads: those of other ranks are NaN.

    Attributes:
        active: whether it is accumulating.
    """

    def __init__(self, model: nn.Module, what: Chosen) -> None:
        self._model, self._what = model, what
        self._modules = what.known | what.rest
        self._open = ExitStack()
        self._follower: FollowedForward | None = None
        self.active = False
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Discard the gradients so far."""
        self._sums = {name: _Sums() for name in self._what.known}

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the attention modules so far, in the order of registration."""
        with self._lock:
            return tuple(name for name in self._modules if name in self._sums)

    @property
    def unwatched(self) -> dict[str, str]:
        """name → why a module is not supported; what came close to attention in the last forward, with its line."""
        seen = self._follower.seen if self._follower else None
        near = {one.name: one.reason_and_line for one in not_followed(seen)} if seen else {}
        return {**near, **{name: why for name, why in self._what.unwatched.items() if name not in self._sums}}

    def start(self: Self) -> Self:
        """Accumulate from now on, in addition to the gradients so far."""
        if not self.active:
            take_over(self._what.targets)
            self.active = True
            self._open.callback(give_back, self._what.targets)
            modules = {module: name for name, module in self._modules.items()}
            self._open.enter_context(subscribe(on_delta=self._add, modules=modules))
            if self._what.rest:
                self._entrances = entrances(self._model, self._modules)
                self._calls = Calls()
                self._follower = FollowedForward(
                    self._model, self._what.aside, "gate_gradients", known=bool(self._what.known), begin=self._begin,
                    end=self._end,
                )  # fmt: skip
                self._open.callback(self._follower.close)
                for handle in self._follower.hooks(self._entrances):
                    self._open.callback(handle.remove)
        return self

    @eager
    def _begin(self, module: nn.Module) -> bool:
        """A forward with gradients begins, in which attention of the rest is recognised."""
        seen = self._follower
        if seen is None or seen.stays or module not in self._entrances or in_backward() or not torch.is_grad_enabled():
            return False
        with turn:
            if not self._calls.begin(module) or seen.home in self._calls.elsewhere():
                return False
            seen.follow()
            return True

    @eager
    def _end(self, module: nn.Module, result: Any) -> None:
        with turn:
            if module not in self._entrances or in_backward() or not self._calls.end(module):
                return
            if self._follower is not None and self._follower.home == get_ident():
                self._follower.close()

    def stop(self) -> None:
        """Stop accumulating, and restore the model."""
        self._open.close()
        self.active = False

    def __enter__(self: Self) -> Self:
        return self.start()

    def __exit__(self, *error: Any) -> None:
        self.stop()

    @property
    def passes(self) -> dict[str, int]:
        """name → number of backward passes."""
        with self._lock:
            return {name: sums.finished().passes for name, sums in self._sums.items()}

    @property
    def skipped(self) -> dict[str, int]:
        """name → number of backward passes excluded because they were not finite."""
        with self._lock:
            return {name: sums.finished().skipped for name, sums in self._sums.items()}

    def importance(self, *, per: str = "batch", absolute: str = "each") -> HeadImportance:
        """The importance of every head, from the gradients so far.

        Args:
            per: "batch": E_x|∂L/∂ξ| over backward passes x. "row": x is a row of a batch instead, for losses that are
                a mean over rows of equal weight. "token": E_x Σ_t|o_t·∂L/∂o_t|, as `taylor_importance`.
            absolute: "each" for E_x|∂L/∂ξ|, "mean" for |E_x ∂L/∂ξ|; not with "token".
        Returns:
            HeadImportance in the loss's unit, whose `loss` is NaN, since the loss itself is unknown. A layer without a
            backward pass has NaN.
        Raises:
            ConfigError: for another value, or if there was no backward pass.
        """
        check_choice("per", per, PER)
        if absolute not in ("each", "mean") or (absolute == "mean" and per == "token"):
            raise ConfigError(f"absolute={absolute!r}: expected 'each' or 'mean', and 'each' with per='token'")
        if not any(self.passes.values()):
            raise ConfigError(
                "gate_gradients: no backward pass so far; run the model and loss.backward() within it, with gradients"
            )
        layers = self.layers
        with self._lock:
            found = [self._sums[name].mean(self._modules[name], per, absolute) for name in layers]
        method = {"batch": "E|dL/dξ|", "row": "E|dL/dξ|, by rows", "token": "E Σ|o·dL/do|"}[per]
        if absolute == "mean":
            method = method.replace("E|dL/dξ|", "|E dL/dξ|")
        values, errors = zip(*found, strict=True)
        return HeadImportance.of(f"in training, {method}", "loss", layers, values, errors)

    def __repr__(self) -> str:
        passes = max(self.passes.values(), default=0)
        return (
            f"GateGradients({len(self.layers)} layers; {passes} backward passes; {'' if self.active else 'not '}active)"
        )

    def _add(self, name: str, held: Held | None, delta: Tensor) -> None:
        with self._lock, torch.no_grad():
            sums = self._sums.setdefault(name, _Sums())
            sums.held = held
            sums.add(delta, torch._C._current_graph_task_id())


class _Sums:
    """The sums of one layer over backward passes: [3, h] of x, |x| and x² in float64, for the x of each `per`."""

    def __init__(self) -> None:
        self.passes, self.rows, self.skipped = 0, 0, 0
        self.held: Held | None = None
        self._sums: dict[str, Tensor] = {}
        self._pending: tuple[int, Tensor, Tensor] | None = None

    def add(self, delta: Tensor, task: int) -> None:
        """Add δ [b, h, n] of one call; calls of one backward pass belong together."""
        delta = delta.double()
        rows, tokens = delta.sum(-1), delta.abs().sum((0, 2))
        before = self._pending
        if before is not None and before[0] == task and before[1].shape == rows.shape:
            rows, tokens = before[1] + rows, before[2] + tokens
        else:
            self.finished()
        self._pending = task, rows, tokens

    def finished(self) -> "_Sums":
        """Close the backward pass in progress, and return self."""
        if self._pending is None:
            return self
        _, rows, tokens = self._pending
        self._pending = None
        if not bool(torch.isfinite(rows).all()):
            self.skipped += 1
            return self
        self.passes, self.rows = self.passes + 1, self.rows + len(rows)
        # The loss is a mean over rows: a row's own gradient is its part times their number.
        each = {"batch": rows.sum(0)[None], "row": rows * len(rows), "token": tokens[None]}
        for per, x in each.items():
            new = torch.stack((x, x.abs(), x.square())).sum(1)
            old = self._sums.get(per)
            self._sums[per] = new if old is None else old + new
        return self

    def mean(self, module: nn.Module, per: str, absolute: str) -> tuple[np.ndarray, np.ndarray]:
        """Means and their standard errors, [h]."""
        self.finished()
        if not self.passes:
            known: Any = getattr(module, "num_heads", num_heads(getattr(module, "config", None)) or 1)
            nothing = np.full(int(known), np.nan)
            return nothing, nothing.copy()
        count = self.rows if per == "row" else self.passes
        signed, size, squares = self._sums[per].cpu().numpy() / count
        mean = size if absolute == "each" else signed
        spread = np.sqrt(np.maximum(squares - mean**2, 0.0) / (count - 1)) if count > 1 else np.full_like(mean, np.nan)
        return self._placed(np.abs(mean)), self._placed(spread)

    def _placed(self, own: np.ndarray) -> np.ndarray:
        """Numbers of this rank's heads among those of the layer; NaN for heads of other ranks."""
        if self.held is None:
            return own
        found = np.full(self.held.of, np.nan)
        found[self.held.heads.start : self.held.heads.stop] = own
        return found


def _unsupported(module: nn.Module) -> str:
    """Why the gradients of a module's heads are not those of the outputs of one `attend`; "" if they are."""
    return module.coupling.of_heads if isinstance(module, AttentionLayer) else ""
