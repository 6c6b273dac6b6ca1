"""The picture of a head × head matrix."""

import numpy as np
import pytest
import torch

from headwise.analysis.similarity import HeadSimilarity
from headwise.errors import ConfigError
from headwise.reports.pictures import ITSELF, READABLE, matrix_figure, write_matrix

pytest.importorskip("matplotlib", reason="pictures need the view extra")
pytest.importorskip("scipy", reason="groups need the scipy extra")


def similarity(layers: int = 3, heads: int = 4, *, signed: bool = False, directed: bool = False) -> HeadSimilarity:
    """Heads of one index are alike in all layers."""
    names = tuple(f"L{k}H{h}" for k in range(layers) for h in range(heads))
    index = torch.arange(layers * heads) % heads
    matrix = torch.where(index[:, None] == index, 0.9, -0.4 if signed else 0.1).double().fill_diagonal_(1.0)
    return HeadSimilarity("likeness", names, matrix, None if directed else 1 - matrix, "share", chance=0.1)


def labels(axes) -> list[str]:
    return [t.get_text() for t in axes.get_xticklabels()]


def test_heads_that_are_alike_stand_together_in_a_box() -> None:
    from matplotlib.colors import to_hex

    figure = matrix_figure(similarity())
    axes, bar = figure.axes
    names = labels(axes)
    assert sorted(names) == sorted(similarity().names)
    assert [t.get_text() for t in axes.get_yticklabels()] == names
    assert [len({name[-1] for name in names[k : k + 3]}) for k in (0, 3, 6, 9)] == [1, 1, 1, 1]
    assert sorted(box.get_width() for box in axes.patches) == [3, 3, 3, 3]
    assert axes.get_title(loc="left") == "likeness, 12 heads; by chance 0.1"
    assert bar.get_ylabel() == "share"
    shown = axes.images[0].get_array()
    np.testing.assert_array_equal(shown.data, similarity().matrix[similarity().order][:, similarity().order])
    np.testing.assert_array_equal(shown.mask, np.eye(12, dtype=bool))  # 1 is above the end of the bar, so it is grey
    assert to_hex(axes.images[0].cmap(axes.images[0].norm(shown))[3, 3]) == ITSELF
    assert axes.get_xlabel() == "grey: each head with itself, not on the scale"
    assert axes.images[0].norm.vmax == pytest.approx(0.9)  # a head with itself does not set the scale


def test_layers_keep_their_order_and_directions_their_names() -> None:
    for figure in (matrix_figure(similarity(), order="layers"), matrix_figure(similarity(directed=True))):
        axes = figure.axes[0]
        assert labels(axes) == list(similarity().names)
        assert not axes.patches
        assert len(axes.lines) == 4  # two borders of layers, across and down
    assert axes.get_xlabel().startswith("reads ")
    assert axes.get_ylabel() == "writes"


def test_a_scale_with_negative_numbers_has_zero_in_its_middle() -> None:
    image = matrix_figure(similarity(signed=True)).axes[0].images[0]
    norm = image.norm
    light = [sum(image.cmap(float(norm(value)))[:3]) for value in (-0.9, -0.4, 0.0, 0.4, 0.9)]
    assert light[0] < light[1] < light[2] > light[3] > light[4]
    assert (norm.vmin, norm.vmax) == (pytest.approx(-0.9), pytest.approx(0.9))
    plain = matrix_figure(similarity()).axes[0].images[0]
    fall = HeadSimilarity("far", similarity().names, similarity().matrix, similarity().distance, small_is_alike=True)
    turned = matrix_figure(fall).axes[0].images[0]
    assert plain.cmap(0.0) == turned.cmap(1.0) != plain.cmap(1.0)


@pytest.mark.thorough
def test_many_heads_have_fewer_ticks_and_one_head_is_drawn(tmp_path) -> None:
    many = similarity(9, 12)
    assert len(many.names) > READABLE
    assert 18 <= len(labels(matrix_figure(many, order="layers").axes[0])) <= 24
    one = similarity(1, 1)
    assert not matrix_figure(one).axes[0].images[0].get_array().mask.any()
    assert write_matrix(one, tmp_path / "new" / "one.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["one.png"]
    with pytest.raises(ConfigError, match="order='size'"):
        write_matrix(one, tmp_path / "two.png", order="size")
    assert not (tmp_path / "two.png").exists()
