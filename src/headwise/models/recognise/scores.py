"""What was done to scores before the softmax, as scale, soft cap, biases and mask."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.mask_tensors import both
from headwise.masks import Mask, Span
from headwise.models.recognise.axes import Axes
from headwise.models.recognise.followed import Lost, Step
from headwise.models.recognise.masks import Placed, Sizes, placed_mask, same
from headwise.scores import Score

KEPT = 1 << 20  # numbers of a mask that are kept to be compared
HIDES = -9000.0  # exp of this is 0 in every dtype: an addition of so little is a mask
FILLS = -1000.0  # so is this, if all scores of hidden keys are set to it, or it alone is added to any
BIASES = -1000.0  # biases beside a mask are not less


@dataclass
class Changes:
    """What was done to the scores of one call.

    Attributes:
        scale: number on q·k. cap: of a tanh soft cap, or None.
        q_factor, k_factor: [b or 1, h or 1, n or m, 1], or None.
        biases: what is added, each [b or 1, h or 1, n or 1, m or 1]. hidden: what is masked, likewise boolean.
        masks, scores: those of a function that defines them. zeroed: where scores were multiplied by 0, boolean.
        named: of other layers: sizes, device, whether keys may be cut, what is hidden, if that is small, and its mask.
    """

    scale: float = 1.0
    cap: float | None = None
    q_factor: Tensor | None = None
    k_factor: Tensor | None = None
    biases: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    zeroed: list[Tensor] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    named: list[tuple[Sizes, torch.device, bool, Tensor | None, Placed]] = field(default_factory=list)

    def mask(self, axes: Axes, *, cut: bool) -> Placed:
        """All that is masked, as the shortest mask.

        Args:
            cut: whether keys that are hidden from all queries may be left out.
        """
        n, m = axes.sizes[2:]
        given = any(one.placed for one in self.scores)  # such as ALiBi
        known = n == m or given or any(one.placed for one in self.masks)
        if not self.hidden:
            return Placed(both(*self.masks), m, known)
        hidden = self.hidden[0]
        for one in self.hidden[1:]:
            hidden = hidden | one
        found = self._named(hidden, axes.sizes, cut=cut and not (self.masks or given))  # type: ignore[arg-type]
        return Placed(both(*self.masks, found.mask), found.keys, known or found.known)

    def _named(self, hidden: Tensor, sizes: Sizes, *, cut: bool) -> Placed:
        """The mask that hides these keys; that of another layer if it hides the same."""
        whole = hidden.expand(-1, -1, *sizes[2:])

        def rows(span: Span) -> Tensor:
            return ~whole[:, :, span.start : span.stop]

        for same_sizes, device, same_cut, kept, placed in self.named:
            if (same_sizes, device, same_cut) != (sizes, hidden.device, cut):
                continue
            if same(kept, hidden) if kept is not None else placed.hides_alike(rows, sizes):
                return placed
        placed = placed_mask(rows, sizes, lambda: ~whole, cut=cut)
        small = hidden.numel() <= KEPT
        self.named.append(
            (sizes, hidden.device, cut, hidden.clone() if small else None, placed)
        )  # the code may change its own
        return placed

    def take(self, step: Step, axes: Axes) -> None:
        """Include the next step."""
        kind, value = step.kind, step.value
        if isinstance(value, Tensor) and value.numel() == 1 and kind in ("times", "add") and not value.requires_grad:
            kind, value = {"times": ("mul", float(value)), "add": ("shift", 0.0)}[kind]
        if kind == "mul":
            self._multiply(float(value))
        elif kind == "mask":
            self.masks.append(value)
        elif kind == "score":
            self.scores.append(value)
        elif kind == "tanh":
            before = (
                "biased" if self.biases else "masked" if self.hidden or self.zeroed else "capped" if self.cap else ""
            )
            if before:
                raise Lost(f"scores are {before} before a soft cap; headwise adds biases after it, then masks")
            self.cap = 1.0
        elif kind == "fill":
            if not step.coef <= FILLS:
                raise Lost(f"masked scores are set to {step.coef:g}, which does not mask them")
            self.hidden.append(axes.matrix(value, step.layout).bool())
        elif kind == "add":
            self._add(axes.matrix(value, step.layout), step.coef)
        elif kind == "times":
            self._times(axes.matrix(value, step.layout))

    def _multiply(self, number: float) -> None:
        if not number > 0:
            raise Lost(f"scores are multiplied by {number:g}")
        if self.cap is None:
            self.scale *= number
        else:
            self.cap *= number
        self.biases = [bias * number for bias in self.biases]

    def _add(self, values: Tensor, coef: float) -> None:
        values = values if coef == 1 else values * coef
        if not values.is_floating_point():
            values = values.float()
        hidden = values <= HIDES
        if not bool(hidden.any()):
            hidden = _of_one_number(values)
        if bool(hidden.any()):
            least, most = values[hidden].aminmax()
            floor = torch.finfo(values.dtype).min / 4
            # Different numbers are biases that reach so low, unless nothing is left of scores beside them in float32,
            # or nothing is near them: masks of −1e9 or −1e4 that were added to each other, or to a bias, are a mask.
            if least != most and most > max(floor, -1e8) and not _apart(values, hidden):
                hidden = torch.zeros_like(hidden)
        if bool(hidden.any()):
            self.hidden.append(hidden)
            values = values.masked_fill(hidden, 0.0)
        # A number for each query changes no weight.
        if values.shape[3] > 1 and (values.requires_grad or bool((values != 0).any())):
            self.biases.append(values)

    def _times(self, values: Tensor) -> None:
        if not values.requires_grad and bool(((values == 0) | (values == 1)).all()):
            self.zeroed.append(values == 0)
        elif self.biases or self.cap is not None or (values.shape[2] > 1 and values.shape[3] > 1):
            raise Lost("scores are multiplied by a tensor")
        elif values.shape[3] == 1:
            self.q_factor = values if self.q_factor is None else self.q_factor * values
        else:
            values = values.mT
            self.k_factor = values if self.k_factor is None else self.k_factor * values

    def check(self) -> None:
        """Raise if scores were multiplied by 0 and not masked afterwards."""
        for zeroed in self.zeroed:
            left = zeroed
            for hidden in self.hidden:
                left = left & ~hidden
            if bool(left.any()):
                raise Lost("scores are multiplied by 0 and not masked")


def _apart(values: Tensor, hidden: Tensor) -> bool:
    """Whether what is not hidden is far from what is."""
    rest = values[~hidden]
    return bool(rest.numel() and rest.min() > BIASES)


def _of_one_number(values: Tensor) -> Tensor:
    """What hides keys in a mask of two numbers that are far apart, such as 0 and −1000; nothing in others."""
    hidden = values <= FILLS
    if bool(hidden.any()):
        least, most = values[hidden].aminmax()
        rest = values[~hidden]
        if least != most or not rest.numel() or rest.min() < FILLS / 10:
            hidden = torch.zeros_like(hidden)
    return hidden
