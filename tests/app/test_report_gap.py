"""Reports of maps whose cache has dropped tokens name the tokens, not the columns."""

from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.cache import SlidingCache
from headwise.telemetry import Record

KEYS, QUERIES = [0, 1, 10, 11, 12, 13, 14, 15, 16], [14, 15, 16]


class Step(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = hw.MultiHeadAttention(16, 2)

    def forward(self, x: torch.Tensor, cache: SlidingCache) -> torch.Tensor:
        return self.layer(x, mask=hw.Causal(), cache=cache)


def decoded(maps: str) -> Record:
    """After 17 tokens with a window of 5 and two sinks, the last three of which came in one call."""
    torch.manual_seed(0)
    model, cache, x = Step(), SlidingCache(5, sinks=2), torch.randn(1, 17, 16)
    with torch.no_grad(), hw.watch(model, maps=maps) as record:
        for part in (*x[:, :14].split(1, 1), x[:, 14:]):
            model(part, cache)
    return record


@pytest.mark.thorough
@pytest.mark.parametrize("maps", ["lazy", "pooled"])
def test_rows_and_columns_are_named_by_their_tokens(maps: str, tmp_path: Path) -> None:
    record = decoded(maps)
    (shown,) = hw.report(record, tmp_path / "page.html").passages
    assert (shown.tokens, shown.keys) == (list(map(str, QUERIES)), list(map(str, KEYS)))
    letters = [chr(ord("a") + i) for i in range(17)]
    report = hw.report(record, tokens=torch.arange(100, 117), pieces=letters)
    (shown,) = report.passages
    assert (shown.tokens, shown.keys) == ([letters[i] for i in QUERIES], [letters[i] for i in KEYS])
    if maps == "lazy":
        amap = record.maps["layer"]
        assert torch.equal(torch.as_tensor(shown.maps[0]), amap.to_dense()[0])


def test_ids_of_the_keys_alone_do_not_fit() -> None:
    with pytest.raises(hw.ShapeError, match="1 × 9 of them, but the maps are of batches of 1 and 3 or 17 tokens"):
        hw.report(decoded("lazy"), tokens=torch.arange(9))
