"""Images given to a report, and the maps whose tokens are their patches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headwise.errors import ConfigError, ShapeError, check_choice
from headwise.reports.data import Passage
from headwise.reports.patches import SIDES, Patches, check_grid, name_of
from headwise.reports.pixels import embedded, pixels
from headwise.reports.see.groups import Group
from headwise.reports.see.passages import Side
from headwise.reports.see.tokens import Text


@dataclass(frozen=True, eq=False)
class Images:
    """Images and where their patches are.

    Attributes:
        images: [H, W, 3] from 0 to 1, one for each batch entry or one for all. starts: the first patch, likewise.
        grid: rows and columns of the patches. side: in cross attention, which side the patches are.
    """

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
        """The sides of an entry's passage with the places of the patches in place of their tokens, and where the first
        patch is on each side; None where there are no patches, or not all of them.

        firsts: the positions at which the sides begin, counted like the start of the patches.
        """
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
    """Which groups have the patches among their tokens.

    In a model with cross attention, those whose side has them, and self attention over as many tokens. Otherwise self
    attention; texts: which groups have the given tokens, all if there are none. Of groups of several lengths, those
    that end with the patches.

    Raises:
        ShapeError: if there are none, or it is not known which.
    """
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
