"""The picture of heads over a training."""

from pathlib import Path

import numpy as np
import pytest

from headwise.analysis.history import Alike, HeadHistory, HeadLook
from headwise.errors import CheckpointError, ConfigError
from headwise.reports.plots import COLOURS, dynamics_figure, write_dynamics

pytest.importorskip("matplotlib", reason="pictures need the view extra")


def history(looks: int = 4, layers: int = 2, heads: int = 3, *, bare: bool = False) -> HeadHistory:
    """Head 1 of layer 0 looks back by one from the second look on; head 2 of layer 1 copies from the third on."""
    found = []
    for i in range(looks):
        rises = np.linspace(0.1, 0.9, layers * heads).reshape(layers, heads) * (i + 1) / looks
        labels: list[list[list[str]]] = [[[] for _ in range(heads)] for _ in range(layers)]
        labels[0][1] = ["previous"] if i >= 1 else []
        labels[-1][-1] = ["induction"] if i >= 2 else []
        alike = {} if bare else {"cka": Alike(0.5 - 0.1 * i, 0.6 - 0.1 * i, ())}
        repeats = {} if bare else {"previous": rises, "induction": rises**2}
        found.append(HeadLook(50 * i, 0.1, {"broad": 3.0 * rises}, repeats, labels, alike))
    return HeadHistory({}, found)


def test_each_panel_has_a_line_a_head_in_the_colour_of_its_last_role() -> None:
    figure = dynamics_figure(history())
    panels = figure.axes
    assert len(panels) == 4
    expected = [history().repeats("previous"), history().repeats("induction"), history().passage("broad")]
    roles = ["none", "previous", "none", "none", "none", "induction"]
    for axes, values in zip(panels, expected, strict=False):
        assert len(axes.lines) == 6
        assert [line.get_color() for line in axes.lines] == [COLOURS[role] for role in roles]
        for i, line in enumerate(axes.lines):
            np.testing.assert_array_equal(line.get_xdata(), [0, 50, 100, 150])
            np.testing.assert_allclose(line.get_ydata(), values[:, i // 3, i % 3])
        assert axes.get_ylim()[0] == 0.0
        assert axes.get_ylim()[1] >= values.max()
        assert [text.get_text() for text in axes.texts] == ["L1H2", "L1H1", "L1H0", "L0H2"]
    whole, within = panels[3].lines
    np.testing.assert_allclose(whole.get_ydata(), [0.5, 0.4, 0.3, 0.2])
    np.testing.assert_allclose(within.get_ydata(), [0.6, 0.5, 0.4, 0.3])
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(words) == ["induction (1)", "no role (4)", "previous (1)"]
    assert words[-1] == "no role (4)"


@pytest.mark.thorough
def test_what_was_not_measured_says_so_and_one_look_is_drawn(tmp_path: Path) -> None:
    figure = dynamics_figure(history(bare=True))
    assert [[text.get_text() for text in axes.texts] for axes in (figure.axes[0], figure.axes[3])] == [
        ["not measured"], ["not measured"],
    ]  # fmt: skip
    assert [line.get_marker() for line in dynamics_figure(history(1)).axes[0].lines] == ["o"] * 6
    history(1).write(tmp_path / "heads.jsonl")
    path = write_dynamics(tmp_path / "heads.jsonl", tmp_path / "new" / "heads.png", title="$ 武松")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no records"):
        write_dynamics(HeadHistory({}, []), tmp_path / "x.png")
    with pytest.raises(CheckpointError, match=r"none\.jsonl"):
        write_dynamics(tmp_path / "none.jsonl", tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []
