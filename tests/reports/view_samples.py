"""Maps to look at: heads whose pattern is known, over texts that are hard to show."""

import numpy as np

from headwise.analysis.head_roles.score import DEFINITIONS, Label
from headwise.reports.data import Comparison, Passage, Report
from headwise.reports.passages import in_words
from headwise.table import HeadColumn, HeadTable

HOSTILE = "</script><img src=x onerror=alert(1)><!-- & \u2028'\"{{title}}"
FAMILY = "👩\u200d👩\u200d👧"  # one picture, five code points


def weights(n: int, layers: int = 2, heads: int = 3, *, causal: bool = True, seed: int = 5) -> np.ndarray:
    """[layers, heads, n, n] with rows that sum to one: previous token, first token, and spread, in turn."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(layers, heads, n, n))
    i, j = np.arange(n)[:, None], np.arange(n)
    scores[:, 0] += 6 * (j == i - 1)
    scores[:, 1 % heads] += 5 * (j == 0)
    if causal:
        scores = np.where(j <= i, scores, -np.inf)
    exact = np.exp(scores - scores.max(-1, keepdims=True))
    return (exact / exact.sum(-1, keepdims=True)).astype(np.float32)


def passage(text: str | list[str], title: str = "a text", *, cell: int = 1, **options) -> Passage:
    """An exact passage, or one whose weights are pooled over the allowed cells."""
    tokens = list(text)
    maps = weights(len(tokens), **options)
    if cell == 1:
        return Passage(title, tokens, maps)
    side = -(-len(tokens) // cell)
    whole = np.zeros((*maps.shape[:2], side * cell, side * cell), np.float32)
    whole[..., : len(tokens), : len(tokens)] = maps
    tiles = whole.reshape(*maps.shape[:2], side, cell, side, cell)
    allowed = (whole > 0).reshape(tiles.shape).sum((3, 5))
    means = (tiles.sum((3, 5)) / np.maximum(allowed, 1)).astype(np.float32)
    return Passage(title, tokens, means, cell, tiles.max((3, 5)))


def column(values: np.ndarray, counts: list[int], unit: str, description: str) -> HeadColumn:
    """The first numbers of each layer."""
    rows = [row[:count] for row, count in zip(values, counts, strict=True)]
    return HeadColumn(rows, unit=unit, description=description)


def heads_of(*counts: int, columns: dict[str, np.ndarray] | None = None) -> HeadTable:
    """A table of layers with these numbers of heads."""
    return HeadTable(columns or {}, heads=[range(count) for count in counts])


def report_of(*passages: Passage, title: str = "A report", counts=None, layers=None, **options) -> Report:
    """A report with two statistics, one of which is not known for one head. counts: heads of each layer."""
    maps = passages[0].maps
    first = maps[..., 0].mean(-1).astype(np.float64)
    spread = -(maps * np.log(np.maximum(maps, 1e-30))).sum(-1).mean(-1).astype(np.float64)
    first[0, -1] = np.nan
    counts = counts or [maps.shape[1]] * len(maps)
    statistics = HeadTable(
        {
            "entropy": column(spread, counts, "nat", "How widely a head looks."),
            "sink_mass": column(first, counts, "mass", "Weight on the first token."),
        },
        layers=layers,
    )
    named = [[label("previous", 0.91)], [label("first", 0.80), label("local", 0.95)], [label("local", 0.4, sure=False)]]
    labels = [[named[h % 3] if h < counts[layer] else [] for h in range(maps.shape[1])] for layer in range(len(maps))]
    labels = options.setdefault("labels", labels)
    return Report(title, list(passages), statistics, [list(map(in_words, row)) for row in labels], **options)


def label(role: str, score: float, *, sure: bool = True) -> Label:
    """A label, or a tendency, of 12 queries."""
    d = DEFINITIONS[role]
    return Label(d.word, role, score, d.threshold, 0.97 if sure else 0.41, d.limit, 12, 0.08, sure)


def compared(text: str = "武松打虎", *, seed: int = 7) -> Report:
    """A report with two comparisons, one signed and one where small is alike, importance, and labels."""
    rng = np.random.default_rng(seed)
    cosine = rng.uniform(-1, 1, (6, 6))
    cosine = (cosine + cosine.T) / 2
    apart = np.abs(cosine - cosine.mean())
    np.fill_diagonal(cosine, 1)
    np.fill_diagonal(apart, 0)
    return report_of(
        passage(text),
        comparisons=[
            Comparison("cosine", cosine, [3, 1, 5, 0, 4, 2], "", "Of outputs."),
            Comparison("divergence", apart, [5, 4, 3, 2, 1, 0], "nats", "Of maps.", small_is_alike=True),
        ],
        importance=HeadTable(
            {
                "loss without it": HeadColumn(rng.normal(size=(2, 3)), unit="nats", description="Without the head."),
                "gradient": HeadColumn(rng.uniform(size=(2, 3)), unit="nats", description="Slope."),
            }
        ),
    )
