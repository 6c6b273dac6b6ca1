"""A measure: the sum of the third powers of the weights."""

from torch import Tensor

from headwise.rule.tiles import Tile
from headwise.stats import RowMeasure
from headwise.stats.registry import register


@register
class ThirdPower(RowMeasure):
    """Σ_j p_ij³, mean over queries: 1 for one key, 1/m² for m keys alike (the Rényi entropy of order 3 is −½ ln of it).

    Source: Rényi 1961.
    """

    name, unit, range = "third_power", "1", "0 to 1"
    source = "Rényi 1961"
    short, dispensable, placed = "p³", 9, False
    shown = {"report": 20}

    def partial(self, tile: Tile) -> Tensor:
        return tile.weights.pow(3).sum(-1)
