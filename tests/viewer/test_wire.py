"""Maps as they travel: what is decoded is what was encoded, to three digits, however small."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from headwise.errors import ShapeError
from headwise.reports.viewer import tiles

WEIGHTS = st.floats(0, 1, width=32) | st.floats(-70, 0).map(lambda x: float(np.float32(2.0**x))) | st.just(float("nan"))


def held_to(maps: np.ndarray, found: np.ndarray) -> None:
    """The bounds that the docstring of `encode` gives."""
    assert found.shape == maps.shape
    assert found.dtype == np.float32
    known = np.isfinite(maps)
    assert np.array_equal(np.isnan(found), ~known)
    truth, found = maps[known].astype(np.float64), found[known].astype(np.float64)
    tiny = (truth > 0) & (truth < tiles.LEAST * (1 - 2.0**-11))
    assert ((found[tiny] > 0) & (found[tiny] < tiles.LEAST)).all()
    assert (np.abs(found[~tiny] - truth[~tiny]) <= truth[~tiny] * 2.0**-11).all()


@pytest.mark.thorough
@settings(deadline=None, max_examples=80)
@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=3, max_dims=3, max_side=11), elements=WEIGHTS))
def test_round_trip(maps):
    held_to(maps, tiles.decode(tiles.encode(maps)))


@pytest.mark.thorough_except("values1", "values2", "values3", "values4", "values5", "values6")
@pytest.mark.parametrize(
    "values",
    [[0.25], [0.0, 1.0], [1e-9, 2e-9, 3e-9], [np.nan, 0.5], [np.inf, 0.5, -np.inf], [0.3, 0.3, 0.3], [1e-5, 1.0]],
)
def test_values_at_the_edge(values):
    maps = np.array(values, np.float32)[None, :, None]
    held_to(maps, tiles.decode(tiles.encode(maps)))


def test_small_weights_beside_large_ones_keep_their_digits():
    found = tiles.decode(tiles.encode(np.float32([[[1.0, 0.3, 6.2e-9, 3e-15]]])))
    assert [f"{x:.3g}" for x in found.ravel()] == ["1", "0.3", "6.2e-09", "3e-15"]


def test_header_is_eight_bytes_little_endian():
    data = tiles.encode(np.array([[[0.5, 0.25, np.nan]], [[1.0, 0.0, 1e-30]]], np.float32))
    assert struct.unpack("<HHI", data[:8]) == (1, 3, 2)
    assert np.frombuffer(data[8:], "<u2").tolist() == [64510, 63486, 65535, 65534, 0, 1]


def test_nothing_allowed_travels_as_nan():
    data = tiles.empty(3, 5)
    assert np.isnan(tiles.decode(data)).all()
    assert tiles.decode(data).shape == (1, 3, 5)


@pytest.mark.parametrize("shape", [(3, 5), (1, 2, 3, 4), (1, 70_000, 1), (1, 1, 65_536)])
def test_shapes_that_do_not_fit_are_refused(shape):
    with pytest.raises(ShapeError, match=r"expected \[count, rows, cols\]"):
        tiles.encode(np.zeros(shape, np.float32))


@pytest.mark.parametrize("data", [b"", b"x" * 7, tiles.empty(2, 2)[:-1], tiles.empty(2, 2) + b"x"])
def test_truncated_data_is_refused(data):
    with pytest.raises(ShapeError, match=f"{len(data)}"):
        tiles.decode(data)
