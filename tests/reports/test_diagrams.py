"""Pictures of the guide as SVG: names of axes, numbers in cells, and fonts that are read while a browser draws."""

import re

import torch

from headwise.reports.curves import Curve, Matrices, Matrix, diagram
from headwise.wording import Bilingual


def drawn(svg: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The texts that are hidden and those that are shown, each with its size."""
    texts = re.findall(r"<text([^>]*)>([^<]+)</text>", svg)
    sized = [("".join(re.findall(r"font-size:[^p]*", where)), word, 'opacity="0"' in where) for where, word in texts]
    return tuple({(size, word) for size, word, hidden in sized if hidden is kind} for kind in (True, False))


def test_a_hidden_text_of_each_size_comes_before_the_font_is_read():
    """Chromium draws the first text of each size without the embedded font, and keeps that drawing of the word."""
    weights = Matrix("第 0 层", torch.eye(2), rows="武松", columns="武松")
    hidden, shown = drawn(diagram(Matrices((weights,), columns="武"), "zh"))
    assert {size for size, _ in shown} == {size for size, _ in hidden} != {""}
    assert not {word for _, word in hidden} & {word for _, word in shown}


def test_latin_text_needs_none():
    hidden, shown = drawn(diagram(Matrices((Matrix("layer 0", torch.eye(2), rows="ab"),)), "en"))
    assert (hidden, len(shown)) == (set(), 3)


def test_a_plot_names_both_axes():
    curve = Curve.of("t", Bilingual("heads", "头数"), Bilingual("millions", "百万"), {"a": {1: 1.0, 2: 3.0}})
    assert {"百万", "头数"} <= {word for _, word in drawn(diagram(curve, "zh"))[1]}
    assert {"millions", "heads"} <= {word for _, word in drawn(diagram(curve, "en"))[1]}


def test_eight_columns_have_room_for_two_digits():
    values = torch.full((3, 8), 0.02)
    shown = [word for _, word in drawn(diagram(Matrices((Matrix("t", values, numbers=True),)), "en"))[1]]
    assert "0.02" in shown
