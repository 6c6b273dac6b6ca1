"""Masks say of a tile what they say of its cells, and compose like sets."""

from collections.abc import Callable
from itertools import combinations, product, starmap

import pytest
import torch
from samples import MASKS

from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.map.attention import attend
from headwise.masks import (
    Causal,
    Dense,
    Documents,
    Everything,
    Forbidden,
    Grid,
    HeadWindows,
    Lengths,
    Mask,
    Sinks,
    Span,
    State,
    Window,
    WithGap,
    conjuncts,
    is_causal,
    spans,
)


@pytest.mark.parametrize("one", MASKS)
@pytest.mark.parametrize("other", ["causal", "window", "dense"])
def test_and_or_are_those_of_sets(one: str, other: str) -> None:
    a, b = MASKS[one](2, 17, 23), MASKS[other](2, 17, 23)
    left, right = (x.to_dense(17, 23, batch=2).expand(2, 1, 17, 23) for x in (a, b))
    assert torch.equal((a & b).to_dense(17, 23, batch=2).expand(2, 1, 17, 23), left & right)
    assert torch.equal((a | b).to_dense(17, 23, batch=2).expand(2, 1, 17, 23), left | right)


def test_a_mask_that_is_called_causal_hides_what_comes_after() -> None:
    for name, make in MASKS.items():
        for mask in (make(2, 17, 23), Causal() & make(2, 17, 23), Causal() | make(2, 17, 23)):
            after = mask.to_dense(17, 23, batch=2, heads=3).triu(23 - 17 + 1).any()
            assert not (is_causal(mask) and after), (name, mask)
        assert is_causal(make(2, 17, 23) & Causal())
    known = (Causal(), Window(3), (Window(3) | Causal()) & Sinks(2), Causal() & (Window(3, 1) | Sinks(2)))
    unknown = (None, Everything(), Sinks(2), Window(3, 1), Causal() | Sinks(2))
    assert [is_causal(mask) for mask in known + unknown] == [True] * 4 + [False] * 5


def test_conjuncts_are_the_masks_that_must_all_allow() -> None:
    either = Window(3) | Sinks(1)
    assert conjuncts(Causal()) == [Causal()]
    assert conjuncts(either) == [either]
    assert conjuncts((Causal() & either) & Lengths([4]))[:2] == [Causal(), either]


@pytest.mark.thorough_except("mask0", "mask1", "mask2", "mask3", "mask7")
@pytest.mark.parametrize(
    "mask",
    [
        Causal(), Window(4), Window(4, 2), Sinks(3), Lengths([9]), Lengths([8], [5], side="right"),
        Documents(torch.tensor([0, 0, 0, 1, 1, 1, 1, -1, -1, 2, 2])), Causal() & (Window(3) | Sinks(2)),
    ],
)  # fmt: skip
def test_every_tile_of_a_small_matrix_is_as_full_as_its_state_says(mask: Mask) -> None:
    n, m = 7, 11
    grid, allowed = Grid(1, 1, n, m), mask.to_dense(n, m)[0, 0]
    for rows, cols in product(*(starmap(Span, combinations(range(size + 1), 2)) for size in (n, m))):
        tile, state = allowed[rows.start : rows.stop, cols.start : cols.stop], mask.state(rows, cols, grid)
        assert state is not State.FULL or bool(tile.all()), (rows, cols)
        assert state is not State.EMPTY or not bool(tile.any()), (rows, cols)


def test_a_tile_that_is_padding_in_one_sequence_and_full_in_another_is_mixed() -> None:
    ids = torch.tensor([[3] * 5, [-1] * 5])
    assert Documents(ids).state(Span(1, 3), Span(0, 2), Grid(2, 1, 5, 5)) is State.MIXED


def test_a_span_has_a_size_beside_its_two_ends() -> None:
    span = Span(3, 14)
    assert (span.size, Span(5, 5).size) == (11, 0)
    assert tuple(span) == (3, 14)
    assert Grid(2, 3, 17, 19).part(span, Span(7, 12)) == Grid(2, 3, 11, 5, 2 + 3 - 7)


def test_empty_and_full_tiles_are_known_where_it_pays() -> None:
    grid, tile = Grid(1, 1, 1000, 1000), Span(500, 600)
    assert Causal().state(tile, Span(600, 700), grid) is State.EMPTY
    assert Causal().state(tile, Span(0, 501), grid) is State.FULL
    assert Window(50).state(tile, Span(0, 451), grid) is State.EMPTY
    assert (Causal() & Window(50)).state(tile, Span(450, 460), grid) is State.MIXED
    assert (Window(50) | Sinks(9)).state(tile, Span(0, 9), grid) is State.FULL
    assert Documents(torch.arange(1000) // 100).state(tile, Span(500, 600), grid) is State.FULL
    assert Documents(torch.arange(1000) // 100).state(tile, Span(600, 700), grid) is State.EMPTY


def test_queries_stand_at_the_end_of_the_keys() -> None:
    assert Causal().to_dense(2, 4)[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert (Causal() & Window(2)).to_dense(2, 4)[0, 0].int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert Window(1, 1).to_dense(2, 4)[0, 0].int().tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_lengths_hide_padding_on_either_side() -> None:
    left = Lengths([1, 3]).to_dense(2, 3, batch=2)[:, 0, 0].int().tolist()
    assert left == [[1, 0, 0], [1, 1, 1]]
    assert Lengths([1, 3], side="right").to_dense(2, 3, batch=2)[:, 0, 0].int().tolist() == [[0, 0, 1], [1, 1, 1]]
    assert Lengths([2], [1]).to_dense(2, 3)[0, 0].int().tolist() == [[1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Causal(), ["5 queries", "3 keys"]),
        (Lengths([2, 2, 2]), ["3 lengths", "batch of 2"]),
        (Lengths([2, 9]), ["length 9", "3 keys"]),
        (Documents([0, 0]), ["(1, 2)", "3 keys"]),
        (Dense(torch.ones(5, 4).bool()), ["(1, 1, 5, 4)", "5, 3"]),
        (Causal() & Dense(torch.ones(7, 5, 3).bool()), ["5 queries"]),
    ],
)
def test_a_mask_of_the_wrong_size_is_named(mask: object, words: list[str]) -> None:
    with pytest.raises(ShapeError) as caught:
        mask.check(Grid(2, 1, 5, 3))  # type: ignore[attr-defined]
    assert all(word in str(caught.value) for word in words)


def test_bad_masks_are_refused_when_made() -> None:
    with pytest.raises(ConfigError, match="left=0"):
        Window(0)
    with pytest.raises(ConfigError, match="-1"):
        Sinks(-1)
    with pytest.raises(ConfigError, match="side='middle'"):
        Lengths([1], side="middle")
    with pytest.raises(DTypeError, match="boolean"):
        Dense(torch.ones(2, 2))
    with pytest.raises(ShapeError, match="lengths >= 0"):
        Lengths([-1])
    with pytest.raises(DTypeError, match="integers"):
        Documents(torch.zeros(3))
    with pytest.raises(DTypeError, match="wrap a boolean tensor in Dense"):
        Causal() & torch.ones(2, 2).bool()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint64])
def test_lengths_of_narrow_integers_do_not_wrap(dtype: torch.dtype) -> None:
    mask = Lengths(torch.tensor([3], dtype=dtype), side="right")
    assert mask.to_dense(300, 300)[0, 0, 0].nonzero().flatten().tolist() == [297, 298, 299]


@pytest.mark.parametrize(
    ("huge", "small"),
    [
        (Window(5, 2**63 - 1), Window(5, 90)),
        (Window(2**63 - 1, 2), Window(90, 2)),
        (Sinks(2**63 - 1) & Causal(), Causal()),
        (HeadWindows([2**63 - 1, 2**63 - 1], 3) & Causal(), Causal()),
        (HeadWindows([2, 2], 2**63 - 1), Everything()),
    ],
)
def test_sizes_near_the_limit_of_64_bits_do_not_wrap(huge: Mask, small: Mask) -> None:
    grid = Grid(1, 2, 7, 9).part(Span(0, 5), Span(6, 9))  # its queries may be before the first key
    assert torch.equal(spans.to_dense(huge.spans(grid), 3), spans.to_dense(small.spans(grid), 3))
    assert torch.equal(huge.to_dense(7, 9, heads=2), small.to_dense(7, 9).expand_as(huge.to_dense(7, 9, heads=2)))


EMPTY = {
    "lengths": lambda: Lengths([]),
    "lengths of queries": lambda: Lengths(torch.zeros(0).long(), torch.zeros(0).long(), side="right"),
    "documents": lambda: Documents(torch.zeros(0, 5).long()),
    "forbidden": lambda: Forbidden(torch.zeros(0, 5).bool(), torch.zeros(0, 5).bool()),
    "dense": lambda: Dense(torch.zeros(0, 1, 5, 5).bool()),
}


@pytest.mark.parametrize("other", [None, "union", "both"])
@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_has_masks(name: str, other: str | None) -> None:
    mask = EMPTY[name]()
    mask = mask if other is None else Window(2) | mask if other == "union" else Causal() & mask
    q = torch.randn(0, 2, 5, 4)
    out, amap = attend(q, q, q, mask=mask, return_map=True, measures=["received_mass", "entropy", "mean_distance"])
    assert out.shape == q.shape
    assert amap[:].shape == (0, 2, 5, 5)
    assert amap.diagonals()[1].shape == (0, 2, 9)
    assert amap.measured["entropy"].shape == amap.measure("previous_mass")["previous_mass"].shape == (0, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(2.5), r"Window\(left=2.5\)"),
        (lambda: Window(True), r"Window\(left=True\)"),
        (lambda: Window(2, None), r"Window\(right=None\)"),
        (lambda: Sinks("a"), r"Sinks\(count='a'\)"),
        (lambda: Lengths(torch.tensor([True])), r"Lengths\(keys=…\)"),
        (lambda: Lengths(torch.tensor([1j])), r"Lengths\(keys=…\)"),
        (lambda: Window(2**63), r"Window\(left=9223372036854775808\): expected at most 9223372036854775807"),
    ],
)
def test_numbers_of_masks_are_whole(make: Callable[[], Mask], message: str) -> None:
    with pytest.raises((ConfigError, ShapeError), match=message):
        make()


@pytest.mark.parametrize("gap", [Span(0, 4), Span(2, 9), Span(6, 7), Span(0, 14), Span(3, 3)])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_with_a_gap_is_the_mask_without_those_keys(name: str, gap: Span) -> None:
    n, m = 5, 23
    mask, rest = MASKS[name](2, n, m), [j for j in range(m) if j not in range(*gap)]
    grid = Grid(2, 6, n, len(rest))
    dense, found = mask.to_dense(n, m, batch=2, heads=6), mask.with_gap(gap, grid)
    expected = dense[..., rest]
    assert torch.equal(found.to_dense(n, len(rest), batch=2, heads=6).expand_as(expected), expected)
    ranges = found.spans(grid)
    assert (ranges is None) <= (mask.spans(Grid(2, 6, n, m)) is None)
    if ranges is not None:
        assert torch.equal(spans.to_dense(ranges, len(rest)).expand(len(expected), -1, -1), expected[:, 0])
    for i in range(n):
        for start in range(0, len(rest), 3):
            rows, cols = Span(i, n), Span(start, min(start + 7, len(rest)))
            state, tile = found.state(rows, cols, grid), expected[..., i:n, cols.start : cols.stop]
            assert state is State.MIXED or bool((tile == (state is State.FULL)).all())


def test_masks_know_whether_they_depend_on_positions() -> None:
    """Whether the rows of the same queries, moved among the keys, are others."""
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    masks = [
        Causal(), Window(2), Window(2, 3), HeadWindows([1, 3]), Lengths([3]), Documents(ids), Window(2) | Sinks(1),
        Causal() & Lengths([4]), Documents(ids) & Window(2), Sinks(2), Everything(), WithGap(Window(2), 0, 2),
        Dense(torch.ones(1, 1, 3, 7, dtype=torch.bool)),
    ]  # fmt: skip
    rows, cols = torch.arange(3), torch.arange(7)
    for mask in masks:
        here, there = (mask.allowed(rows, cols, Grid(1, 2, 3, 7, first)) for first in (0, 3))
        assert mask.placed != torch.equal(here, there), mask
