"""PyTorch's defaults for new tensors change nothing: whatever is computed follows the tensors that were given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from samples import MASKS, SCORES, qkv
from torch import Tensor

from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Grid, Mask, Span, State
from headwise.stats import MEASURES, ClassMass, DuplicateMass, InductionMass

IDS = torch.randint(7, (2, 53), generator=torch.Generator().manual_seed(2))


class EveryThird(Mask):
    """A mask of somebody's own, which no compiled kernel reads: all is done by tiles."""

    holds = {}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return (cols % 3 == 0).expand(len(rows), -1)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.MIXED


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def measures() -> list[Any]:
    return [*MEASURES, ClassMass(IDS == 3), DuplicateMass(IDS), InductionMass(IDS, uniform=True)]


READS: dict[str, Callable[[AttentionMap], Any]] = {
    "measures": lambda amap: [*amap.measure(*measures()).values()],
    "measures by tiles": lambda amap: [*amap.using("torch_blocks").measure(*measures(), rows=True).rows.values()],
    "a tile": lambda amap: amap[0, 1:5, 3:30:2, 4:50],
    "columns apart": lambda amap: amap[0, 1:5, 3:30, 4:50:3],
    "dense": lambda amap: amap.to_dense(),
    "products": lambda amap: (amap @ amap.k[:, :1], amap.T @ amap.q),
    "pictures": lambda amap: (amap.pool(9), amap.pool(7, "max"), *amap.pooled(slice(3, 30), range(5, 50), 4)),
    "largest": lambda amap: amap.topk(5),
    "what keys receive": lambda amap: amap.received(),
    "diagonals": lambda amap: amap.diagonals(),
    "one head": lambda amap: amap.head(1, 3).measure("distance_variance")["distance_variance"],
}


def read(mask: Callable[[], Mask], score: str, what: str, kernel: str) -> Any:
    q, k, v = INPUTS
    scores = () if score == "none" else SCORES_HERE[score]
    out, amap = attend(q, k, v, mask=mask(), score=scores, return_map=True, kernel=kernel)
    return [out, amap.lse, *_flat(READS[what](amap))]


def _flat(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [y for part in x for y in _flat(part)]


INPUTS = qkv()
SCORES_HERE = {name: SCORES[name](2, 6, 37, 53) for name in ("alibi", "all")}
MADE: dict[str, Callable[[], Mask]] = {
    **{name: lambda name=name: MASKS[name](2, 37, 53) for name in ("everything", "causal window", "padded left")},
    "window and sinks": lambda: MASKS["window and sinks"](2, 37, 53),
    "nothing for some": lambda: MASKS["nothing for some"](2, 37, 53),
    "every third": EveryThird,
}


@pytest.mark.thorough_except(
    "dtype0-padded left-what keys receive", "dtype0-window and sinks-diagonals", "dtype1-causal window-one head"
)
@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_maps_are_read_alike(what: str, name: str, dtype: torch.dtype) -> None:
    for score, kernel in (("none", "auto"), ("all", "auto"), ("alibi", "torch_blocks"), ("all", "reference")):
        wanted = read(MADE[name], score, what, kernel)
        with defaults(dtype):
            found = read(MADE[name], score, what, kernel)
        for ours, expected in zip(found, wanted, strict=True):
            assert ours.dtype == expected.dtype
            assert ours.device == expected.device
            assert torch.equal(ours.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("kernel", ["auto", "torch_blocks"])
def test_dropout_draws_alike(kernel: str) -> None:
    q, k, v = INPUTS
    torch.manual_seed(7)
    wanted = attend(q, k, v, dropout_p=0.4, kernel=kernel)
    torch.manual_seed(7)
    with defaults(torch.float64):
        found = attend(q, k, v, dropout_p=0.4, kernel=kernel)
    assert torch.equal(found, wanted)


def test_masks_as_tensors_are_on_the_cpu() -> None:
    for made in MADE.values():
        mask = made()
        wanted = mask.to_dense(37, 53, batch=2, heads=6)
        with defaults(torch.float64):
            assert torch.equal(mask.to_dense(37, 53, batch=2, heads=6), wanted)
