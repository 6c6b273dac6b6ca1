"""A text longer than a model was trained on, read in windows that overlap by half: a sliding window.

Each window is read by itself, with positions from 0, as in training. The attention of a token is taken from the window
in which it is in the second half, so that it has at least half a window before it; the first tokens have all there are.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwise.corpus.moments import varied
from headwise.errors import ConfigError, TextError
from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.lm.loading.positions import check_window, whole_window
from headwise.map import AttentionMap
from headwise.masks import Span
from headwise.progress import Progress
from headwise.reports import nonfinite
from headwise.reports.see.heads import leading
from headwise.reports.see.places import Places
from headwise.stats import Measure, Tokens, of_tokens
from headwise.table.show import duration
from headwise.wording import in_language

BATCH = 8  # windows at a time
MOST = 131_072  # tokens of a text
TRIED = 4096  # characters of a longer text that are read to estimate its tokens and the time
SLOWER = 4.0  # reading windows takes at most this many times the seconds of their forward pass: maps and statistics


@dataclass(frozen=True)
class Window:
    """A window: all leading special tokens of the text, then the tokens `start` to `stop`. Its results count from the
    token `own` on."""

    start: int
    stop: int
    own: int


@dataclass(frozen=True)
class Slid:
    """What all windows gave: statistics of each layer, [heads], and the loss in nats per token; pictures of the maps,
    [layers, heads, P, Q], of squares of `cell` × `cell` tokens: the mean and the largest of the weights within windows.
    peaks is None if cell is 1. nonfinite: `nonfinite.counted` of each layer."""

    statistics: list[dict[str, Tensor]]
    loss: float | None
    cell: int
    means: np.ndarray
    peaks: np.ndarray | None
    nonfinite: list[dict[str, Tensor]]


def size_for(subject: LoadedModel, tokens: int, window: int | None) -> int | None:
    """The tokens of a window for a text, None to read it whole.

    Args:
        window: as the user gave it; None for the length that a causal model was trained on, 0 for the whole text.
    Raises:
        ConfigError: if it is too small, too large for the model, or the model is not causal.
    """
    window = whole_window(window)
    if window is not None and window != 0 and window < 8:
        raise ConfigError(
            f"window={window}: expected at least 8 tokens, or 0 to read the text whole",
            f"window={window}：应不少于 8 个词元，或用 0 表示整体读入",
        )
    if window == 0 or (window is None and (subject.context is None or not subject.causal)):
        return None
    size = subject.context if window is None else window
    assert size is not None
    if window is not None:
        check_window(window, subject.limit, subject.name)
    if tokens <= size:
        return None
    if not subject.causal:
        raise ConfigError(
            f"window={window}: {subject.name} is not causal, so a window would hide keys from its tokens; leave it "
            f"out, or use headwise measure",
            f"window={window}：{in_language(subject.name, 'zh')} 不是因果模型，分窗口会隐藏一部分键；"
            "请去掉此选项，或用 headwise measure",
        )
    return size


def windows_of(tokens: int, size: int, lead: int) -> list[Window]:
    """Windows of `size` tokens over a longer text that begins with `lead` special tokens."""
    if size - lead < 2:
        raise ConfigError(
            f"window={size}: expected at least {lead + 2}, two more than the special tokens at the start",
            f"window={size}：应不小于 {lead + 2}，即比开头的特殊词元多两个",
        )
    length = size - lead
    found = [Window(lead, size, 0)]
    while found[-1].stop < tokens:
        start = min(found[-1].start + max(1, length // 2), tokens - length)
        found.append(Window(start, start + length, found[-1].stop))
    return found


def check_length(subject: LoadedModel, text: str) -> None:
    """Raise TextError for a text that is far too long, with the time that it would take, before it is tokenized."""
    if len(text) <= MOST:
        return
    head = subject.read(text[:TRIED])
    tokens = len(head) * len(text) // min(TRIED, len(text))
    if tokens <= MOST:
        return
    size = min(len(head), subject.context or len(head))
    begun = time.monotonic()
    subject.look(head.ids[:size])
    seconds = (time.monotonic() - begun) * SLOWER * 2 * tokens / size
    raise TextError(
        f"the text has about {tokens:,} tokens and would take about {duration(seconds, 'en')}; see reads at most "
        f"{MOST:,}. `headwise view` opens the beginning of a long text at once (--max-tokens), and `headwise measure` "
        f"measures a corpus of any size",
        f"文本约有 {tokens:,} 个词元，约需 {duration(seconds, 'zh')}；see 最多读入 {MOST:,} 个。`headwise view` "
        "可立即打开长文本的开头（--max-tokens），`headwise measure` 可测量任意规模的语料",
    )


@torch.no_grad()
def slide(
    subject: LoadedModel, reading: TokenizedText, size: int, measures: Sequence[Measure], places: Places, cells: int,
    progress: Progress,
) -> Slid:  # fmt: skip
    """Read a text in windows of `size` tokens and collect statistics, loss and pictures."""
    n, lead = len(reading), len(list(leading(reading.special)))
    windows = windows_of(n, size, lead)
    cell = -(-n // cells)
    canvas = _Canvas(places, n, cell)
    sums: list[dict[str, list[tuple[int, Tensor]]]] = [{} for _ in places.counts]
    bad: list[dict[str, Tensor]] = [{} for _ in places.counts]
    lost, counted, done = 0.0, 0, 0
    for own, group in _groups(windows, lead):
        progress("reading", done, len(windows))
        at = [[*range(lead), *range(window.start, window.stop)] for window in group]
        ids = torch.stack([reading.ids[tokens] for tokens in at])
        maps = list(subject.maps(ids).values())
        kinds = _for_tokens(measures, reading, at)
        rows = range(own, size)
        for layer, amap in enumerate(maps):
            part = owned(amap, rows)
            bad[layer] = nonfinite.added(bad[layer], nonfinite.in_windows(nonfinite.counted(part)))
            for name, value in part.measure(*kinds).items():
                sums[layer].setdefault(name, []).append((len(group) * len(rows), value.cpu()))
            for entry, tokens in enumerate(at):
                canvas.add(layer, amap[entry, :, own:, :].cpu().numpy(), tokens[own:], tokens)
        loss, more = _owned_loss(subject, ids, own)
        lost, counted, done = lost + loss * more, counted + more, done + len(group)
    progress("reading", len(windows), len(windows))
    largest = {measure.name for measure in measures if varied(measure).largest}
    statistics = [{name: _joined(found, name in largest) for name, found in layer.items()} for layer in sums]
    return Slid(statistics, lost / counted if counted else None, cell, *canvas.finished(), bad)


def sample(reading: TokenizedText, size: int) -> tuple[Tensor, list[list[str]]]:
    """Ids [w, tokens] and pieces of evenly spaced windows, for what is computed of a few."""
    lead = len(list(leading(reading.special)))
    windows = windows_of(len(reading), size, lead)
    chosen = np.unique(np.linspace(0, len(windows) - 1, BATCH).astype(int)).tolist()
    at = [[*range(lead), *range(windows[i].start, windows[i].stop)] for i in chosen]
    return torch.stack([reading.ids[tokens] for tokens in at]), [[reading.pieces[i] for i in tokens] for tokens in at]


def owned(amap: AttentionMap, rows: range) -> AttentionMap:
    """The map of the last rows of each window, and all keys."""
    if rows.start == 0:
        return amap
    at = Span(rows.start, rows.stop)
    return AttentionMap(
        amap.q[:, :, at.start :], amap.k, amap.lse[:, :, at.start :], amap.rule.rows(at), kernel=amap.kernel,
        named=amap.named, refusals=amap.refusals, nonfinite_values=amap.nonfinite_values,
    )  # fmt: skip


def _groups(windows: Sequence[Window], lead: int) -> Iterator[tuple[int, list[Window]]]:
    """Windows in a row of which as many tokens count, at most BATCH; with the first row that counts."""

    def first(window: Window) -> int:
        return 0 if window.own == 0 else lead + window.own - window.start

    for own, run in itertools.groupby(windows, first):
        every = list(run)
        for i in range(0, len(every), BATCH):
            yield own, every[i : i + BATCH]


def _for_tokens(measures: Sequence[Measure], reading: TokenizedText, at: Sequence[Sequence[int]]) -> list[Measure]:
    """The measures for other tokens, where they depend on them."""
    ids = torch.stack([reading.ids[tokens] for tokens in at])
    pieces = [[reading.pieces[i] for i in tokens] for tokens in at]
    special = torch.tensor([[reading.special[i] for i in tokens] for tokens in at])
    made = [of_tokens(measure.name, Tokens(ids, pieces, special)) for measure in measures]
    return [measure for measure in made if measure is not None]


def _owned_loss(subject: LoadedModel, ids: Tensor, own: int) -> tuple[float, int]:
    """The mean loss of the tokens that count, and how many there are: a causal model predicts the tokens before them as
    if the window ended there."""
    whole = subject.loss(ids)
    if whole is None:
        return 0.0, 0
    b, n = ids.shape
    first = max(own, 1)  # nothing predicts the first token
    before = (subject.loss(ids[:, :first]) or 0.0) * (first - 1) if first > 1 else 0.0
    count = n - first
    return (whole * (n - 1) - before) / count, b * count


def _joined(found: Sequence[tuple[int, Tensor]], largest: bool) -> Tensor:
    """One number a head from those of the entries of each group, weighted by their queries."""
    if largest:
        return torch.cat([value for _, value in found]).amax(0)
    weights = torch.tensor([float(rows) for rows, _ in found])
    return torch.stack([value.mean(0) for _, value in found]).mul(weights[:, None]).sum(0) / weights.sum()


class _Canvas:
    """Pictures of all heads, to which the rows of windows are added."""

    def __init__(self, places: Places, n: int, cell: int) -> None:
        side = -(-n // cell)
        shape = (len(places.counts), places.most, side, side)
        self._cell = cell
        self._sums, self._most = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._pairs = np.zeros((len(places.counts), side, side), np.float32)

    def add(self, layer: int, weights: np.ndarray, rows: Sequence[int], columns: Sequence[int]) -> None:
        """Weights [heads, rows, columns] of these tokens, both ascending."""
        (i, high), (j, wide) = (self._cells(tokens) for tokens in (rows, columns))
        heads = slice(0, len(weights))
        square = np.ix_(np.arange(len(weights)), i, j)
        self._sums[layer][square] += np.add.reduceat(np.add.reduceat(weights, high, 1), wide, 2)
        most = np.maximum.reduceat(np.maximum.reduceat(weights, high, 1), wide, 2)
        self._most[layer, heads][square] = np.maximum(self._most[layer, heads][square], most)
        visible = (np.asarray(columns)[None] <= np.asarray(rows)[:, None]).astype(np.float32)
        self._pairs[layer][np.ix_(i, j)] += np.add.reduceat(np.add.reduceat(visible, high, 0), wide, 1)

    def finished(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Means and maxima; no maxima if each cell is one weight."""
        means = self._sums / np.maximum(self._pairs, 1)[:, None]
        return means, None if self._cell == 1 else self._most

    def _cells(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The cells that tokens are in, and where each cell begins among them."""
        return np.unique(np.asarray(tokens) // self._cell, return_index=True)
