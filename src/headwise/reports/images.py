"""Images in reports: validated, their patches as tokens, and attention drawn over them (requires matplotlib).

>>> import numpy as np
>>> pixels(np.zeros((2, 3), np.uint8)).shape
(2, 3, 3)
"""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError, check_choice
from headwise.map import AttentionMap
from headwise.reports.colours import data_url, rgb_png, stops
from headwise.reports.data import SIDES, Passage, Patches, check_grid, name_of
from headwise.reports.figure import LINE, MUTED, colour_bar, colour_map, drawable, figure_of, font, save, titled
from headwise.reports.passages import Group, Side, Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 448  # pixels of the longer side of an embedded picture, at most
QUALITY = 85  # of a JPEG


def pixels(image: Any) -> np.ndarray:
    """An image as [H, W, 3] float64 from 0 to 1. image: [H, W, 3], [H, W, 4] (the last channel is ignored) or [H, W],
    numbers from 0 to 1 or bytes; or a PIL image."""
    values = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)) or 0 in values.shape:
        raise ShapeError(f"image: shape {values.shape}, expected [H, W, 3] or [H, W]")
    if values.dtype.kind not in "fiub":
        raise ConfigError(f"image: {values.dtype}, expected numbers from 0 to 1 or bytes")
    numbers = values.astype(np.float64) / (255.0 if values.dtype == np.uint8 else 1.0)
    if not np.isfinite(numbers).all() or numbers.min() < 0 or numbers.max() > 1:
        raise ConfigError("image: expected numbers from 0 to 1, or bytes")
    return np.repeat(numbers[..., None], 3, 2) if numbers.ndim == 2 else numbers[..., :3]


def embedded(image: np.ndarray) -> str:
    """[H, W, 3] from 0 to 1 as a data URL, at most `SIDE` pixels along a side: a JPEG with Pillow, else a PNG."""
    height, width = image.shape[:2]
    by = min(1.0, SIDE / max(height, width))
    size = max(1, round(height * by)), max(1, round(width * by))
    small = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(image).permute(2, 0, 1), size)
    bytes_ = (small.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    try:
        from PIL import Image
    except ImportError:
        return data_url(rgb_png(bytes_))
    file = io.BytesIO()
    Image.fromarray(bytes_).save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


@dataclass(frozen=True, eq=False)
class Images:
    """Images [H, W, 3] from 0 to 1 and the first patch, one for each batch entry or one for all; rows and columns of
    the patches; in cross attention, the side that they are on."""

    images: list[np.ndarray]
    starts: list[int]
    grid: tuple[int, int]
    side: str

    @property
    def count(self) -> int:
        """The number of patches."""
        return self.grid[0] * self.grid[1]

    def has(self, entries: int) -> bool:
        """Whether there are images and positions for a batch of that many entries."""
        return {len(self.images), len(self.starts)} <= {1, entries}

    def start(self, entry: int) -> int:
        """The position of the first patch of a batch entry."""
        return self.starts[entry if len(self.starts) > 1 else 0]

    def length(self, group: Group) -> int:
        """The number of tokens of a group on the side with the patches."""
        _, n, m = group.size
        return n if group.crosses and self.side == "queries" else m

    def text(self, given: Text | None) -> Text | None:
        """The text of a sequence with patches: each of them is a token of its own and no marker, so that roles and
        measures of equal or special tokens do not count them as such."""
        if given is None:
            return None
        ids = None if given.ids is None else given.ids.clone()
        pieces, special = (
            None if rows is None else [list(row) for row in rows] for rows in (given.pieces, given.special)
        )
        for entry in range(given.entries):
            at = slice(self.start(entry), self.start(entry) + self.count)
            if ids is not None:
                ids[entry, at] = int(ids.max()) + 1 + torch.arange(self.count)
            for rows, names in ((pieces, self.names), (special, [False] * self.count)):
                if rows is not None:
                    rows[entry][at] = names
        return Text(ids, pieces, special)  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        """The texts of the patches."""
        return [name_of(*divmod(i, self.grid[1])) for i in range(self.count)]

    def named(
        self, group: Group, entry: int, sides: tuple[Side, Side | None], firsts: tuple[int, int]
    ) -> tuple[tuple[Side, Side | None], tuple[int | None, int | None]]:
        """The sides of an entry's passage, which begin at `firsts`, with the places of the patches in place of their
        tokens; and where the first patch is on each side, None if not all of them are there."""
        found: list[Side | None] = list(sides)
        at: list[int | None] = [None, None]
        for i, (side, first) in enumerate(zip(sides, firsts, strict=True)):
            here, place = not group.crosses or i == (self.side == "keys"), self.start(entry) - first
            if side is not None and here and 0 <= place <= len(side.words) - self.count:
                found[i], at[i] = self._named(side, place), place
        queries, keys = found
        assert queries is not None
        return (queries, keys), (at[0], at[0] if keys is None else at[1])

    def over(
        self, shown: Passage, entry: int, sides: tuple[Side, Side | None], at: tuple[int | None, int | None]
    ) -> Passage:
        """The passage with the image of the entry. sides, at: as `named` returned them."""
        if at == (None, None):
            return shown

        def index(side: Side, place: int | None) -> int | None:
            if place is None or shown.cell > 1:
                return place
            return [start for start, _ in side.units].index(place)

        image = self.images[entry if len(self.images) > 1 else 0]
        height, width = image.shape[:2]
        query, key = index(sides[0], at[0]), index(sides[1] or sides[0], at[1])
        return replace(shown, image=Patches(embedded(image), width, height, *self.grid, query, key))

    def _named(self, side: Side, at: int) -> Side:
        """Each patch is a unit of its own."""
        end = at + self.count
        words = [*side.words[:at], *self.names, *side.words[end:]]
        special = [*side.special[:at], *[False] * self.count, *side.special[end:]]
        before = [(a, min(b, at)) for a, b in side.units if a < at]
        after = [(max(a, end), b) for a, b in side.units if b > end]
        return Side(words, [*before, *((i, i + 1) for i in range(at, end)), *after], special)


def images_of(image: Any, grid: Any, image_start: Any, side: str) -> Images | None:
    """The images given by these arguments of `report` ; None without an image."""
    check_choice("side", side, SIDES)
    if image is None:
        if grid is not None:
            raise ConfigError("grid: requires image=…, the image of these patches")
        return None
    if grid is None:
        raise ConfigError("image: requires grid=(rows, columns), the patches that the model makes of it")
    check_grid(grid)
    several = isinstance(image, list | tuple)
    starts = list(image_start) if isinstance(image_start, list | tuple) else [image_start]
    if any(type(start) is not int or start < 0 for start in starts):
        raise ConfigError(f"image_start={image_start!r}: expected the position of the first patch, from 0 on")
    if several and not image:
        raise ConfigError("image: got an empty list; give an image, or one for each batch entry")
    return Images([pixels(one) for one in (image if several else [image])], starts, (grid[0], grid[1]), side)


def with_patches(images: Images, groups: Sequence[Group], texts: Sequence[bool]) -> list[bool]:
    """Which groups have the patches among their tokens: with cross attention, those whose side has them, and self
    attention over as many tokens; otherwise self attention. Of several lengths, those that end with the patches."""
    end = max(images.starts) + images.count
    batches = sorted({group.size[0] for group in groups})
    for name, count in (("image", len(images.images)), ("image_start", len(images.starts))):
        if count not in (1, *batches):
            raise ShapeError(
                f"{name}: {count} of them for a batch of {' or '.join(map(str, batches))}; expected one, or one for "
                f"each entry"
            )
    for crossing in (True, False):
        found = [
            i
            for i, group in enumerate(groups)
            if group.crosses == crossing and texts[i] and images.length(group) >= end and images.has(group.size[0])
        ]
        exact = [i for i in found if images.length(groups[i]) == end]
        lengths = {images.length(groups[i]) for i in exact or found}
        if len(lengths) > 1:
            raise ShapeError(
                f"image: {images.grid[0]} × {images.grid[1]} patches from position {max(images.starts)} on are in maps "
                f"of {' and of '.join(map(str, sorted(lengths)))} tokens; give tokens or pieces of the sequence with "
                f"the image, or watch only these layers"
            )
        if lengths:
            (length,) = lengths
            return [
                i in (exact or found) or (crossing and not group.crosses and group.size[1:] == (length, length))
                for i, group in enumerate(groups)
            ]
    sizes = sorted({images.length(group) for group in groups})
    raise ShapeError(
        f"image: {images.grid[0]} × {images.grid[1]} patches from position {max(images.starts)} on need {end} tokens, "
        f"but the maps{'' if all(texts) else ' of the given tokens'} have {' or '.join(map(str, sizes))}"
    )


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
    figure = figure_of(shape[0] * wide + 0.4, shape[1] * 2.5 + (0.4 if title else 0.0))
    panels = figure.subplots(shape[1], shape[0], squeeze=False)
    for axes, token, found in zip(panels.flat, tokens, weights, strict=False):
        largest = float(found.max()) or 1.0
        axes.imshow(faded, extent=(0, grid[1], grid[0], 0))
        heat = axes.imshow(
            found, cmap=colour_map(stops("light")), vmin=0.0, vmax=largest, extent=(0, grid[1], grid[0], 0),
            alpha=0.1 + 0.8 * np.clip(found / largest, 0.0, 1.0), interpolation="nearest",
        )  # fmt: skip
        total = found.sum() if side == "keys" else found.mean()
        titled(axes, f"{token}  {total:.2f}", 11)
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
    """The weights between each token and the patches, mean over heads, [tokens, rows, columns]; see `image_figure`."""
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
