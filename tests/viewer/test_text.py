"""What the viewer knows of a text's tokens without a model."""

import pytest
import torch

pytest.importorskip("starlette")
from server_samples import small_subject

from headwise.lm.loading import TokenizedText
from headwise.reports.viewer.session import Text
from headwise.reports.viewer.tiles import Levels

SPANS = [(0, 0), (0, 5), (5, 6), (7, 10), (12, 17), (0, 0)]
PIECES = ["[CLS]", "Speak", ".", "All", "right", "[SEP]"]


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 6, ["", "", "", " ", "  ", ""]), (3, 5, [" ", "  "]), (4, 5, ["  "]), (1, 1, [])],
)
def test_what_stands_ahead_of_a_token(start: int, stop: int, expected: list[str]) -> None:
    special = [not begin < end for begin, end in SPANS]
    reading = TokenizedText("Speak. All  right", torch.zeros(6, dtype=torch.long), PIECES, SPANS, special)
    assert Text(small_subject(), reading, "", Levels(6, 6, 1, 1)).ahead(start, stop) == expected
