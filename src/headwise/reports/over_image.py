"""Attention between an image and a text, drawn over the image. Requires matplotlib."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError, check_choice
from headwise.map import AttentionMap
from headwise.pictures.colours import stops
from headwise.reports.figure import INK, LINE, MUTED, colour_bar, drawable, figure_class, font, save
from headwise.reports.patches import SIDES, check_grid
from headwise.reports.pixels import pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 6  # panels in a row, at most


def write_image_maps(
    amap: AttentionMap, image: Any, path: str | os.PathLike[str], *, tokens: Sequence[str], grid: tuple[int, int],
    side: str = "keys", image_start: int = 0, text_start: int = 0, heads: Sequence[int] | None = None, batch: int = 0,
    title: str = "",
) -> Path:  # fmt: skip
    """Write the weights between each token of a text and the patches of an image as a PNG.

    Args:
        path: of the PNG.
        amap, image, tokens, grid, side, image_start, text_start, heads, batch, title: as in `image_figure`.
    Returns:
        The path.
    Raises:
        ConfigError, ShapeError: as `image_figure`.
    """
    figure = image_figure(
        amap, image, tokens=tokens, grid=grid, side=side, image_start=image_start, text_start=text_start, heads=heads,
        batch=batch, title=title,
    )  # fmt: skip
    return save(figure, Path(path))


def image_figure(
    amap: AttentionMap, image: Any, *, tokens: Sequence[str], grid: tuple[int, int], side: str = "keys",
    image_start: int = 0, text_start: int = 0, heads: Sequence[int] | None = None, batch: int = 0, title: str = "",
) -> "Figure":  # fmt: skip
    """A matplotlib figure with the image once for each token of a text, under that token's weights.

        >>> import numpy as np, torch, headwise as hw
        >>> q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 24, 8)        # 3 words attend to 4 × 6 patches
        >>> _, amap = hw.attend(q, k, k, return_map=True)
        >>> image = np.random.default_rng(0).random((40, 60, 3))
        >>> figure = hw.reports.image_figure(amap, image, tokens=["a", "red", "house"], grid=(4, 6))
        >>> [axes.get_title(loc="left") for axes in figure.axes[:3]]
        ['a  1.00', 'red  1.00', 'house  1.00']

    Only the weights between the tokens and the patches are computed, so it works for maps of any size: of cross
    attention (an image generator's text, side="queries", or a decoder that reads an image, side="keys"), and of a
    vision language model's decoder, where the patches are `image_start` and the following positions of one sequence.

    Args:
        amap: of the attention between them. batch: an entry of it.
        image: [H, W, 3] or [H, W], numbers from 0 to 1 or bytes; or a PIL image.
        tokens: of the text, as labels; token i is at position `text_start` + i on its side.
        grid: rows and columns of the patches, row by row from `image_start` on.
        side: "keys" if the patches are keys and the tokens queries; "queries" for the opposite.
        heads: numbers of the heads whose weights are averaged; None for all.
        title: of the figure.
    Returns:
        The figure. Each panel has a scale of its own from 0, so that patterns can be compared; its title has the
        token's weight on the image (side="keys"), or the mean weight of the patches on the token.
    Raises:
        ConfigError, ShapeError: naming the argument; ConfigError if matplotlib is missing.
    """
    weights = image_weights(
        amap, count=len(tokens), grid=grid, side=side, image_start=image_start, text_start=text_start, heads=heads,
        batch=batch,
    ).numpy()  # fmt: skip
    faded = 1 - 0.5 * (1 - pixels(image))  # light enough for weights to stand out
    shape = min(len(tokens), ACROSS), -(-len(tokens) // ACROSS)
    wide = 2.1 * max(0.5, min(2.0, faded.shape[1] / faded.shape[0]))
    figure: Figure = figure_class()(
        figsize=(shape[0] * wide + 0.4, shape[1] * 2.5 + (0.4 if title else 0.0)), layout="constrained",
        facecolor="white",
    )  # fmt: skip
    panels = figure.subplots(shape[1], shape[0], squeeze=False)
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("headwise", stops("light"))
    for axes, token, found in zip(panels.flat, tokens, weights, strict=False):
        largest = float(found.max()) or 1.0
        axes.imshow(faded, extent=(0, grid[1], grid[0], 0))
        heat = axes.imshow(
            found, cmap=colours, vmin=0.0, vmax=largest, alpha=0.1 + 0.8 * np.clip(found / largest, 0.0, 1.0),
            extent=(0, grid[1], grid[0], 0), interpolation="nearest",
        )  # fmt: skip
        total = found.sum() if side == "keys" else found.mean()
        axes.set_title(drawable(f"{token}  {total:.2f}"), loc="left", color=INK, fontproperties=font(11))
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color(LINE)
        colour_bar(figure, heat, axes, "")
    for axes in panels.flat[len(tokens) :]:
        axes.set_visible(False)
    if title:
        figure.suptitle(drawable(title), x=0.01, ha="left", color=MUTED, fontproperties=font(12))
    return figure


def image_weights(
    amap: AttentionMap, *, count: int, grid: tuple[int, int], side: str, image_start: int, text_start: int,
    heads: Sequence[int] | None, batch: int,
) -> Tensor:  # fmt: skip
    """The weights between each token and the patches, averaged over heads: [tokens, rows, columns] float32 or float64;
    arguments as in `image_figure`."""
    b, h, n, m = amap.shape
    check_choice("side", side, SIDES)
    check_grid(grid)
    if not count:
        raise ConfigError("tokens: got none; expected at least one")
    patches = grid[0] * grid[1]
    keys, queries = (patches, count) if side == "keys" else (count, patches)
    first_key, first_query = (image_start, text_start) if side == "keys" else (text_start, image_start)
    for what, first, size, there in (("keys", first_key, keys, m), ("queries", first_query, queries, n)):
        if first < 0 or first + size > there:
            raise ShapeError(
                f"{what}: {'grid' if (what == side) else 'tokens'} has {size} of them from position {first} on, but "
                f"the map has {there}"
            )
    chosen = range(h) if heads is None else heads
    if not len(chosen) or any(type(head) is not int or not 0 <= head < h for head in chosen):
        raise ConfigError(f"heads={heads!r}: expected numbers of the map's {h} heads, counted from 0")
    if not 0 <= batch < b:
        raise ConfigError(f"batch={batch}: expected 0 to {b - 1}")
    rows, cols = slice(first_query, first_query + queries), slice(first_key, first_key + keys)
    total = torch.stack([amap[batch, head, rows, cols] for head in chosen]).mean(0).cpu()
    return (total if side == "keys" else total.mT).reshape(count, *grid)
