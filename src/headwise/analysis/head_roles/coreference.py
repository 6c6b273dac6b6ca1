"""Whether a head looks from a mention to an earlier one of the same entity (Clark et al. 2019 §4.3)."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headwise.analysis.head_roles.choices import Choice
from headwise.analysis.head_roles.tally import pooled
from headwise.errors import ConfigError, ShapeError
from headwise.map import AttentionMap

NEAREST, SAME_HEAD = "nearest mention", "nearest mention with the same head, else the nearest"


@dataclass(frozen=True)
class Mention:
    """A mention of something.

    Attributes:
        token: the token of its head word, on the key axis. entity: what it is a mention of; equal for equal things.
        batch: the batch entry that it stands in.
    """

    token: int
    entity: Hashable
    batch: int = 0


@torch.no_grad()
def coreference(
    maps: Sequence[AttentionMap], mentions: Sequence[Mention], heads: Sequence[Sequence[Hashable]] | None
) -> Choice:
    """How often, among all earlier mentions that may be seen, the one with the most weight is of the same entity.

    Asked of mentions that have an earlier one of their entity; those of which none may be seen, or that have no query,
    do not count.

    Args:
        heads: what stands at each token, one list or one a batch entry, for the rule of equal head words; or None.
    """
    b, _, n, m = maps[0].shape
    if n > m:
        raise ConfigError(f"mentions: need self attention, and there are {n} queries on {m} keys")
    for mention in mentions:
        if not (0 <= mention.token < m and 0 <= mention.batch < b):
            raise ShapeError(f"mentions: {mention}, expected a token of 0 to {m - 1} and a batch entry of 0 to {b - 1}")
    places = {(mention.batch, mention.token) for mention in mentions}
    if len(places) < len(mentions):
        raise ConfigError("mentions: two of them have the same head token; keep the larger one")
    right, cases, asked = [], [], 0
    rules: Counter[str] = Counter({NEAREST: 0} if heads is None else {NEAREST: 0, SAME_HEAD: 0})
    for batch in sorted({mention.batch for mention in mentions}):
        here = sorted((x for x in mentions if x.batch == batch), key=lambda x: x.token)
        weights, seen = zip(*(_weights(amap, batch, [x.token for x in here]) for amap in maps), strict=True)
        found, may = (
            np.stack(weights),
            np.logical_and.reduce(seen),
        )  # [layers, h, mentions, mentions], [mentions, mentions]
        for i, mention in enumerate(here):
            same = np.array([x.entity == mention.entity for x in here[:i]], bool)
            if not same.any():
                continue
            asked += 1
            candidates = np.flatnonzero(may[i, :i])
            if not same[candidates].any():
                continue
            best = candidates[found[:, :, i, candidates].argmax(-1)]
            right.append(same[best].astype(np.float64))
            cases.append(1.0)
            rules[NEAREST] += int(same[candidates[-1]])
            if heads is not None:
                words = heads[batch if len(heads) > 1 else 0]
                alike = [j for j in candidates if words[here[j].token] == words[mention.token]]
                rules[SAME_HEAD] += int(same[(alike or list(candidates))[-1]])
    layers, h = len(maps), maps[0].shape[1]
    stacked = np.stack(right, 1) if right else np.zeros((layers, 0, h))
    return Choice(pooled(stacked), pooled(np.array([cases]))[0], asked, rules)


def _weights(amap: AttentionMap, batch: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Weights between the tokens [h, tokens, tokens], and whether the first of two may see the second in every head;
    0 and no for tokens without a query."""
    shift = amap.rule.grid.shift
    at = torch.tensor(tokens)
    rows = at[at >= shift] - shift
    weights = torch.zeros(amap.shape[1], len(tokens), len(tokens), dtype=torch.float64)
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i, row in enumerate(rows.tolist(), len(at) - len(rows)):
        weights[:, i] = amap[batch, :, row, : tokens[-1] + 1].double().cpu()[:, at]
    allowed = amap.mask.allowed(rows, at, amap.rule.grid).cpu()
    seen[len(at) - len(rows) :] = allowed[batch if len(allowed) > 1 else 0].all(0)
    return weights.numpy(), seen.numpy()
