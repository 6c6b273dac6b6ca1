"""The maps of a watched model in groups of the same queries and keys; an encoder with a decoder has three groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwise.amounts import counted
from headwise.events import crosses, module_name
from headwise.map import AttentionMap
from headwise.masks import Grid, Span, is_causal
from headwise.masks.grid import NO_GAP
from headwise.reports.messages import message
from headwise.telemetry.lens import Picture

Kept = AttentionMap | Picture


@dataclass(frozen=True)
class Group:
    """Layers whose maps have the same tokens.

    Attributes:
        maps: of the layers, all `AttentionMap`s or all `Picture`s. layers: their indices in the model.
        crosses: whether it is cross attention. causal: whether no query attends to a later key, as far as is known.
        gap: the tokens that a cache has dropped.
    """

    maps: list[Kept]
    layers: list[int]
    crosses: bool
    causal: bool
    gap: Span = NO_GAP

    @property
    def size(self) -> tuple[int, int, int]:
        """Batch entries, queries and keys."""
        b, _, n, m = self.maps[0].shape
        return b, n, m

    def token(self, key: int) -> int:
        """The token of a key."""
        b, n, m = self.size
        return Grid(b, 1, n, m, gap=self.gap).token(key)

    @property
    def lazy(self) -> list[AttentionMap]:
        """The exact maps; [] if there are only pictures."""
        return [amap for amap in self.maps if isinstance(amap, AttentionMap)]

    @property
    def pooled(self) -> list[Picture]:
        """The pictures of the maps; [] if the maps are exact."""
        return [picture for picture in self.maps if isinstance(picture, Picture)]


def groups_of(maps: Mapping[str, Kept]) -> list[Group]:
    """The groups, in the order in which the model called the first layer of each."""
    found: dict[tuple[object, ...], Group] = {}
    for layer, (name, amap) in enumerate(maps.items()):
        b, _, n, m = amap.shape
        causal = _causal(amap)
        gap = amap.rule.grid.gap if isinstance(amap, AttentionMap) else amap.gap
        # Fewer queries than keys under a causal mask, or of a cache that has dropped some, are a step of generation.
        over = crosses(module_name(name)) or (n != m and not causal and not gap.size)
        key = type(amap), b, n, m, over, causal, gap
        group = found.setdefault(key, Group([], [], over, causal, gap))
        group.maps.append(amap)
        group.layers.append(layer)
    return list(found.values())


def title(group: Group, groups: Sequence[Group], n: int, m: int) -> str:
    """The title of n queries and m keys of a group that are shown, among these groups."""
    if group.crosses:
        return message("title_cross", queries=counted("token", n), keys=m)
    if any(other.crosses for other in groups):
        return message("title_decoder" if group.causal else "title_encoder", tokens=counted("token", m))
    return counted("token", m) if len(groups) > 1 else ""


def _causal(amap: Kept) -> bool:
    if isinstance(amap, AttentionMap):
        return is_causal(amap.mask)
    n, m = amap.shape[2:]
    return n == m and amap.largest.shape[2] > 1 and not bool(amap.largest.triu(1).any())
