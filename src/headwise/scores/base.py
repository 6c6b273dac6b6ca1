"""What a score is: a change between q·k and the softmax, which says by itself what it is to kernels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import ConfigError, DeviceError, DTypeError, ShapeError, check_declared
from headwise.fields import Described, Section
from headwise.masks import Grid, Span
from headwise.scores.terms import Terms


class Score(Described, ABC):
    """Base of what can be in `score=(…)`.

    A class declares what it holds (`headwise.fields`), whether it is `placed`, and its `terms`; nothing is assumed.
    Scores differ between batch entries, heads, queries and keys by the arrays that they hold along those axes, and by
    distance if they are placed. `register` lets files have it.
    """

    known: ClassVar[dict[str, type["Score"]]] = {}
    called = "score"
    repeats: ClassVar[bool] = False  # whether two of its kind in one call make sense
    placed: ClassVar[bool]  # whether it depends on the positions of queries and keys

    def __init_subclass__(cls, abstract: bool = False) -> None:
        super().__init_subclass__()
        if not abstract:
            check_declared(cls, Score, {
                "holds": "the arguments of its constructor as fields",
                "placed": "whether it depends on the positions of queries and keys",
                "terms": "what it is to kernels",
            })  # fmt: skip
            if cls.holds is None:
                raise ConfigError(f"class {cls.__name__}(Score): holds=None, so no head or block has its part of it")

    @abstractmethod
    def terms(self, grid: Grid, like: Tensor) -> Terms:
        """The score as terms over a grid, in the dtype and on the device of `like`, with their graph. Biases may have
        dtypes of their own."""

    def check(self, grid: Grid, device: torch.device) -> None:
        """Raise if this cannot be laid over such a matrix."""

    def part(self, rows: Span, cols: Span, grid: Grid) -> "Score | None":
        """The score as a rectangle of the matrix has it, for `grid.part(rows, cols)`; None if it is of whole rows, so
        that whoever merges rectangles adds it once."""
        return self.cut({"n": Section(*rows, grid.n), "m": Section(*cols, grid.m)})

    def kept(self) -> "Score":
        """The score as a map keeps it: without graph, and with numbers that no optimiser changes."""
        return self.mapped(_kept)


def check_scores(scores: object, grid: Grid, device: torch.device) -> tuple[Score, ...]:
    """`score=…` as a tuple, each fit for the grid and none twice that cannot be."""
    given = (scores,) if isinstance(scores, Score) else scores
    if not isinstance(given, Sequence) or not all(isinstance(score, Score) for score in given):
        raise DTypeError(f"score: expected headwise scores such as (SoftCap(30.0),), got {scores!r}")
    for at, score in enumerate(given):
        if not score.repeats and any(type(other) is type(score) for other in given[:at]):
            raise ConfigError(f"score: two of {type(score).__name__}, and only one has a meaning")
        score.check(grid, device)
    return tuple(given)


def check_floats(name: str, values: Sequence[float] | Tensor, ndim: int) -> Tensor:
    """Floating numbers of so many dimensions as a tensor, or an error that names them."""
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=torch.float64).float() if ndim == 1 else torch.as_tensor(values)
    if not values.is_floating_point():
        raise DTypeError(f"{name}: expected floating numbers, got {values.dtype}")
    if values.ndim != ndim:
        raise ShapeError(f"{name}: expected {ndim} dimension{'s' * (ndim > 1)}, got shape {tuple(values.shape)}")
    return values


def check_device(name: str, values: Tensor, device: torch.device) -> None:
    """Raise DeviceError if values are elsewhere than q."""
    if values.device != device:
        raise DeviceError(f"score={name} is on {values.device}, but q is on {device}; move them to one device")


def _kept(values: Tensor) -> Tensor:
    """Detached; copied if it is a parameter or a view of one, which the next step of training would change."""
    still = values.detach()
    # torch.compile cannot ask what is a view.
    shared = values.is_leaf or torch.compiler.is_dynamo_compiling() or values._is_view()
    return still.clone() if values.requires_grad and shared else still
