"""Heat maps as PNG: one picture of all heads, and one of each."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.errors import ConfigError
from headwise.files import atomic_path
from headwise.views.data import Passage, Report, visible
from headwise.views.fonts import covered, font_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

READABLE = 64  # characters that can stand as ticks along an axis
WITH_VALUES = 16  # texts so short get their weights written into the cells


def write_pngs(
    report: Report, folder: str | os.PathLike[str], *, step: Callable[[str, int, int], None] | None = None
) -> list[Path]:
    """Write all-heads.png and layer-L-head-H.png (for each passage, if there are several) into `folder`.

    Needs matplotlib, the `view` extra. Returns the files in the order they were written.
    """
    figure_class()
    folder = Path(folder)
    layers, heads = report.shape
    total, written = len(report.passages) * (layers * heads + 1), []
    for k, passage in enumerate(report.passages):
        prefix = f"passage-{k + 1}-" if len(report.passages) > 1 else ""
        written.append(_save(overview(report, passage), folder / f"{prefix}all-heads.png"))
        for layer in range(layers):
            for head in range(heads):
                if step is not None:
                    step("drawing", len(written), total)
                picture = heat_map(report, passage, layer, head)
                written.append(_save(picture, folder / f"{prefix}layer-{layer}-head-{head}.png"))
    return written


def heat_map(report: Report, passage: Passage, layer: int, head: int) -> "Figure":
    """One head: labelled axes, colour bar and, for short texts, the weight in each cell."""
    weights = passage.maps[layer, head] if passage.peaks is None else passage.peaks[layer, head]
    side = weights.shape[0]
    inches = float(np.clip(0.24 * side if len(passage.tokens) <= READABLE else 8, 4.5, 12))
    figure = figure_class()(figsize=(inches + 1.2, inches + 0.6), layout="constrained")
    axes = figure.subplots()
    image = _draw(axes, weights)
    bar = figure.colorbar(image, ax=axes, fraction=0.045, pad=0.02)
    bar.set_label("weight" if passage.cell == 1 else f"largest weight in {passage.cell} × {passage.cell} characters")
    _ticks(axes, passage)
    axes.set_xlabel("key: looked at")
    axes.set_ylabel("query: looking")
    pattern = report.patterns[layer][head]
    axes.set_title(f"Layer {layer}, head {head}" + (f": {pattern}" if pattern else ""), fontsize=11)
    if len(passage.tokens) <= WITH_VALUES and passage.cell == 1:
        middle = np.nanmax(weights) / 2 if np.isfinite(weights).any() else 0
        for (i, j), weight in np.ndenumerate(weights):
            if weight > 0.005:
                ink = "white" if weight < middle else "black"
                axes.text(j, i, f"{weight:.2f}", ha="center", va="center", color=ink, fontsize=7)
    return figure


def overview(report: Report, passage: Passage) -> "Figure":
    """All heads side by side, each on its own scale."""
    layers, heads = report.shape
    maps = passage.maps if passage.peaks is None else passage.peaks
    figure = figure_class()(figsize=(1.5 * heads + 0.6, 1.5 * layers + 0.8), layout="constrained")
    grid = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            axes = grid[layer, head]
            _draw(axes, maps[layer, head])
            axes.set_xticks([])
            axes.set_yticks([])
            if layer == 0:
                axes.set_title(f"head {head}", fontsize=9)
        grid[layer, 0].set_ylabel(f"layer {layer}", fontsize=9)
    figure.suptitle(_drawable(report.title), fontproperties=_font(11))
    return figure


def loss_curve(
    log: list[dict[str, Any]], path: str | os.PathLike[str], baselines: dict[str, float] | None = None
) -> None:
    """A picture of a training log (`log.jsonl` as dictionaries), with other models' held-out losses as lines."""
    figure = figure_class()(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [name for name in log[0].get("heldout", {}) if name != "all"] if log else []
    for name in names:
        axes.plot([line["step"] for line in log], [line["heldout"][name] for line in log], label=f"held out: {name}")
    axes.plot(
        [line["step"] for line in log], [line["train_loss"] for line in log], color="0.75", zorder=0, label="training batch"
    )
    for k, (name, loss) in enumerate((baselines or {}).items()):
        axes.axhline(loss, color=f"C{k % 10}", linestyle=":", linewidth=1)
        axes.annotate(name, (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    _save(figure, Path(path))


def figure_class() -> Any:
    """matplotlib's Figure, or an error that says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'headwise[view]'") from None
    return Figure


def _draw(axes: "Axes", weights: np.ndarray) -> Any:
    top = float(np.nanmax(weights)) if np.isfinite(weights).any() else 1.0
    return axes.imshow(weights, cmap="magma", vmin=0, vmax=top or 1.0, interpolation="nearest", aspect="equal")


def _ticks(axes: "Axes", passage: Passage) -> None:
    n, cell = len(passage.tokens), passage.cell
    if cell == 1 and n <= READABLE:
        words = [_drawable(visible(token)) for token in passage.tokens]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(n), words, fontproperties=_font(9))
        if any(len(word) > 2 for word in words):
            axes.tick_params(axis="x", rotation=90)
        return
    every = max(1, n // 8)
    places = range(0, n, every)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([p / cell for p in places], [str(p) for p in places], fontsize=9)


def _font(size: float) -> Any:
    from matplotlib.font_manager import FontProperties

    return FontProperties(fname=str(font_path()), size=size)


def _drawable(text: str) -> str:
    """The text with characters that the font lacks as U+XXXX, and no sign that matplotlib would take for TeX."""
    return "".join(c if ord(c) in covered() else f"U+{ord(c):04X}" for c in text).replace("$", r"\$")


def _save(figure: "Figure", path: Path) -> Path:
    with atomic_path(path) as temporary, warnings.catch_warnings():
        # Very small pictures leave the layout no room; they are drawn all the same.
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied.*")
        figure.savefig(temporary, dpi=130, format="png")
    return path
