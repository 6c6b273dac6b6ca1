"""What a report says first: three findings in words with their evidence, and the heads that are worth a look.

A finding is about labels, which rest on enough queries (see `headwise.analysis.roles`); about the loss without a head;
about one query and one key, compared with what all other queries give to that key; or about a head among all heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headwise.analysis.checks import head_name
from headwise.analysis.head_roles.score import DEFINITIONS, ROWS, Label
from headwise.reports.data import Report, visible
from headwise.reports.messages import message
from headwise.wording import LIST, Bilingual, joined, tr

FINDINGS = 3
HEADS = 8  # worth a look
NAMED = 3  # heads of a finding by name
LEAST_LOSS = 0.01  # nats per token, below which no head matters
# Roles in the order of what they say about a model.
ORDER = (
    "first", "previous", "next", "induction", "duplicate", "offset", "separator", "punctuation", "self", "semantic",
    "rare", "local", "broad", "even",
)  # fmt: skip

Place = tuple[int, int]


@dataclass(frozen=True)
class Finding:
    """One sentence or two, the heads that they are about, (layer, head), and the query, if they are about one."""

    text: Bilingual
    heads: list[Place]
    query: int | None = None


def findings(report: Report) -> list[Finding]:
    """The three findings of a report; fewer if its statistics are few."""
    roles = list(_of_roles(report))
    if not roles:
        roles = [Finding(message("found_none", least=ROWS, tokens=len(report.passages[0].tokens)), [])]
    sink = [roles.pop(0)] if roles and "first" in _labelled(report) else []
    every = [*sink, *roles[:1], *_of_loss(report), *_of_pair(report), *roles[1:], *_of_keys(report)]
    return every[:FINDINGS]


def telling(report: Report, found: Sequence[Finding]) -> list[Place]:
    """The heads of the findings, the best of each label and tendency, then the most important, the least equal."""
    kinds: dict[tuple[bool, int], Place] = {}
    for at in sorted(report.heads, key=lambda at: -_excess(_first(report, at))):
        if label := _first(report, at):
            kinds.setdefault((not label.sure, ORDER.index(label.role)), at)
    best = [at for _, at in sorted(kinds.items())]
    costs = losses_without(report)
    loss = {at: 0.0 if costs is None else float(np.nan_to_num(costs[at])) for at in report.heads}
    rest = sorted(report.heads, key=lambda at: (-max(loss[at], LEAST_LOSS), -_excess(_first(report, at))))
    first = [at for finding in found for at in finding.heads[:1]]
    return list(dict.fromkeys([*first, *best, *rest]))[:HEADS]


def _first(report: Report, at: Place) -> Label | None:
    return next(iter(report.labels[at[0]][at[1]]), None) if report.labels else None


def _excess(label: Label | None) -> float:
    """How far a score is from that of equal weights, 1 for the largest possible mass."""
    if label is None or DEFINITIONS[label.role].unit != "mass":
        return 0.0
    return (label.score - label.uniform) / max(1e-9, 1.0 - label.uniform)


def _labelled(report: Report) -> dict[str, list[tuple[Place, Label]]]:
    """Role → the heads with that label, the highest score first; roles in the order of ORDER."""
    every = [(at, x) for at in report.heads if report.labels for x in report.labels[at[0]][at[1]] if x.sure]
    found = {}
    for role in ORDER:
        heads = sorted((one for one in every if one[1].role == role), key=lambda one: -one[1].score)
        if heads:
            found[role] = heads
    return found


def _of_roles(report: Report) -> Iterator[Finding]:
    """The heads with a label, role by role."""
    for role, heads in _labelled(report).items():
        label, shown = heads[0][1], report.passages[0]
        text = message(
            "found_sink" if role == "first" else "found_role", role=DEFINITIONS[role].word, what=DEFINITIONS[role].what,
            count=len(heads), heads=len(report.heads), uniform=label.uniform, rows=label.rows,
            best=joined((f"{head_name(*at)} {label.score:.2f}" for at, label in heads[:NAMED]), LIST),
            token=_quoted(shown.tokens if shown.keys is None else shown.keys, 0),
        )  # fmt: skip
        yield Finding(text, [at for at, _ in heads])


def losses_without(report: Report) -> np.ndarray | None:
    """The rise of the loss without each head, [layers, heads]; None if it was not measured."""
    if "loss without it" not in report.importance:
        return None
    return report.importance.dense("loss without it").numpy(force=True)


def _of_loss(report: Report) -> Iterator[Finding]:
    losses = losses_without(report)
    if losses is None:
        return
    known = sorted(((float(losses[at]), at) for at in report.heads if np.isfinite(losses[at])), reverse=True)
    if len(known) < 2 or known[0][0] < LEAST_LOSS:
        return
    (most, at), little = known[0], sum(value < LEAST_LOSS for value, _ in known)
    median = float(np.median([x for x, _ in known]))
    text = message(
        "found_loss", head=head_name(*at), most=most, median=median, little=little, heads=len(known), least=LEAST_LOSS
    )
    yield Finding(text, [at])


def _of_pair(report: Report) -> Iterator[Finding]:
    """The query and the key, neither neighbours nor the first token, with the largest weight above two means: what the
    other queries give to that key, and the weight of other pairs at that distance; in exact maps of one text."""
    shown = report.passages[0]
    if shown.cell > 1 or shown.keys is not None or shown.image is not None:
        return
    i, j = (np.arange(len(shown.tokens)) for _ in range(2))
    word = np.array([any(c.isalnum() for c in token) for token in shown.tokens], bool)
    word[shown.special] = False
    sees = i[:, None] >= j if shown.causal else np.ones((len(i), len(j)), bool)
    others, distance = sees.sum(0) - 1, j - i[:, None] + len(i) - 1
    pairs = sees & word[:, None] & word & (np.abs(i[:, None] - j) > 1) & (j > 0) & (others >= ROWS)
    alike = np.maximum(np.bincount(distance[sees], minlength=2 * len(i))[distance] - 1, 1)
    if not pairs.any():
        return
    most, at, query, key = -1.0, (0, 0), 0, 0
    values: dict[str, float] = {}
    for layer, block in zip(report.shown_in(shown), shown.maps, strict=True):
        for head, weights in enumerate(map(np.nan_to_num, block)):
            of_key = (weights.sum(0) - weights) / np.maximum(others, 1)
            far = (np.bincount(distance.ravel(), weights.ravel())[distance] - weights) / alike
            above = np.where(pairs, weights - np.maximum(of_key, far), -1.0)
            if above.max() > most:
                most, at = float(above.max()), (layer, head)
                query, key = map(int, np.unravel_index(int(above.argmax()), weights.shape))
                values = {"weight": weights[query, key], "mean": of_key[query, key], "far": far[query, key]}
    text = message(
        "found_pair", head=head_name(*at), query=_quoted(shown.tokens, query), key=_quoted(shown.tokens, key),
        count=int(others[key]), **{name: float(value) for name, value in values.items()},
    )  # fmt: skip
    yield Finding(text, [at], query)


def _of_keys(report: Report) -> Iterator[Finding]:
    """The head that divides its weight among the fewest keys."""
    if "effective_keys" not in report.statistics:
        return
    values = report.statistics.dense("effective_keys").numpy(force=True)
    known = sorted((float(values[at]), at) for at in report.heads if np.isfinite(values[at]))
    if len(known) < 2:
        return
    least, at = known[0]
    median = float(np.median([x for x, _ in known]))
    yield Finding(message("found_keys", head=head_name(*at), least=least, median=median), [at])


def _quoted(tokens: Sequence[str], at: int) -> Bilingual:
    """A token in quotation marks, with its position where the text has several of it."""
    token = visible(tokens[at].strip() or tokens[at])
    several = [x.strip() for x in tokens].count(tokens[at].strip()) > 1
    return tr("“{token}” (token {at})", token=token, at=at) if several else tr("“{token}”", token=token)
