"""One call on many ranks: checked by each and agreed on by all, so that a mistake is one error everywhere."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.attention import check_mask, rule_of
from headwise.errors import ConfigError, HeadwiseError, ShapeError
from headwise.kernels.written import write
from headwise.masks import Mask
from headwise.parallel.layout import Layout, Members, check_held, check_layout
from headwise.parallel.ring_measures import check_measures
from headwise.rule import DTYPES, Rule
from headwise.scores import Score, check_scores
from headwise.stats import Measure, resolve

HASHED = 1 << 20  # numbers of a mask that are compared between ranks; of a larger one only the shape is


@dataclass(frozen=True)
class Asked:
    """What one rank was called with; the tensors hold its own part of the sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    scale: float | None
    score: Score | Sequence[Score]
    dropout_p: float
    layout: str
    kernel: str
    return_map: bool
    measures: Sequence[Measure]

    def __post_init__(self) -> None:
        """Raise for what this rank sees by itself."""
        check_measures(self.measures, self.return_map)
        check_layout(self.layout)
        check_mask(self.mask)
        grid = rule_of(self.q, self.k, self.v, None, self.scale, (), self.dropout_p).grid
        # Whether scores fit is a question for the whole; whether they are any, for this rank.
        check_scores([score for score in _listed(self.score) if not isinstance(score, Score)], grid, self.q.device)

    def facts(self) -> dict[str, int]:
        """What must be the same on all ranks, by the names of the arguments, as numbers that fit 63 bits."""
        scores = _listed(self.score)
        b, h, _, d = self.q.shape
        learning = torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v, *_tensors(scores)))
        return {
            "batch": b, "heads of q": h, "heads of k and v": self.k.shape[1], "head_dim of q and k": d,
            "head_dim of v": self.v.shape[3], "dtype": DTYPES.index(self.q.dtype), "mask": _mask_code(self.mask),
            "scale": 0 if self.scale is None else zlib.crc32(struct.pack("d", self.scale)),
            "score": _code([repr(score) for score in scores]), "dropout_p": _code(self.dropout_p),
            "layout": _code(self.layout), "return_map": int(self.return_map),
            "measures": _code([measure.name for measure in self.measures]), "need of gradients": int(learning),
        }  # fmt: skip


def agree(
    who: Members, name: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None,
    score: Score | Sequence[Score], dropout_p: float, layout: str, kernel: str, return_map: bool,
    measures: Sequence[str | Measure],
) -> tuple[Asked, Layout, Layout, Rule]:  # fmt: skip
    """The call as all ranks make it: what was asked here, the layouts of queries and keys, and the rule of the whole.

    One collective of FACTS numbers a rank, on the device of q. A rank whose own check fails tells the others.

    Args:
        name: of the function that is called; the rest is what it was given.
    Raises:
        HeadwiseError: on every rank, for what any of them was given wrongly, or if they differ.
    """
    own: Exception | None = None
    asked: Asked | None = None
    facts: dict[str, int] = {}
    try:
        wanted = resolve(measures) if measures else []
        asked = Asked(q, k, v, mask, scale, score, dropout_p, layout, kernel, return_map, wanted)
        facts = {"failed": 0, "n": asked.q.shape[2], "m": asked.k.shape[2], **asked.facts()}
    except Exception as error:  # whatever it is, the others must not wait for this rank
        own = error
    everyone = _gathered(facts, who, device_of(who, q))
    failed = [rank for rank, row in enumerate(everyone) if row is None]
    if failed:
        _raise_together(who, name, own, failed)
    rows = [row for row in everyone if row is not None]
    names = list(facts)
    for index, fact in enumerate(names[3:], 3):
        told = [row[index] for row in rows]
        if len(set(told)) > 1:
            raise _differ(name, fact, told)
    assert asked is not None
    queries, keys = (Layout(asked.layout, sum(row[i] for row in rows), who.ranks) for i in (1, 2))
    check_held("q", [row[1] for row in rows], queries)
    check_held("k", [row[2] for row in rows], keys)
    return asked, queries, keys, _whole_rule(asked, queries.length, keys.length)


def _whole_rule(asked: Asked, n: int, m: int) -> Rule:
    """The rule over the whole sequence, checked as one process would; tensors of no memory stand for the whole."""
    q, k, v = (
        x.detach().new_empty(x.shape[0], x.shape[1], 1, x.shape[3]).expand(-1, -1, size, -1)
        for x, size in ((asked.q, n), (asked.k, m), (asked.v, m))
    )
    rule = rule_of(q, k, v, asked.mask, asked.scale, asked.score, asked.dropout_p)
    rule.mask.check(rule.grid)
    return rule


FACTS = 17  # numbers that a rank tells: whether it failed, n, m, and those of Asked.facts


def _gathered(facts: dict[str, int], who: Members, device: torch.device) -> list[list[int] | None]:
    """Every rank's numbers; None for one whose check failed."""
    numbers = list(facts.values()) or [1] + [0] * (FACTS - 1)
    assert len(numbers) == FACTS
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    rows = [torch.empty_like(mine) for _ in range(who.ranks)]
    try:
        dist.all_gather(rows, mine, group=who.group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {who.rank} of {who.ranks} waited in vain for all ranks to make this call; look there for the first "
            f"error: {error}"
        ) from error
    found = torch.stack(rows).tolist()
    return [None if row[0] else row for row in found]


def device_of(who: Members, like: object) -> torch.device:
    """Where numbers must lie to be sent, by a group that sends what `like` is; it may be anything."""
    if dist.get_backend(who.group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return like.device if isinstance(like, Tensor) else torch.device("cpu")


def _raise_together(who: Members, name: str, own: Exception | None, failed: list[int]) -> None:
    """This rank's own error, or one that tells those of the others."""
    told: list[Any] = [None] * who.ranks
    dist.all_gather_object(told, None if own is None else (type(own).__name__, str(own)), group=who.group)
    if own is not None:
        raise own
    first = failed[0]
    kind, message = told[first]
    raised = next((kind_of for kind_of in HeadwiseError.__subclasses__() if kind_of.__name__ == kind), ConfigError)
    raise raised(f"{name}: rank {first} of the group refused its part of the call: {message}")


def _differ(name: str, fact: str, told: list[int]) -> HeadwiseError:
    plain = fact in ("batch", "heads of q", "heads of k and v", "head_dim of q and k", "head_dim of v")
    if plain:
        return ShapeError(f"{name}: {fact} differs between the ranks: {', '.join(map(str, told))}")
    others = [rank for rank, code in enumerate(told) if code != told[0]]
    return ConfigError(
        f"{name}: {fact} differs between the ranks: {', '.join(f'rank {rank}' for rank in others)} not as rank 0; give "
        f"the same on all, for the whole sequence"
    )


def _code(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _mask_code(mask: Mask | None) -> int:
    """A number for the mask: of one of headwise's kinds by what it holds, of somebody's own by its class."""
    if mask is None:
        return 0
    written = write(mask)
    if written is None:
        return _code(type(mask).__qualname__)
    numbers, tensors = written
    code = _code((numbers, [tuple(x.shape) for x in tensors]))
    for x in tensors:
        if x.numel() <= HASHED:
            code = zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes(), code)
    return code


def _listed(score: Score | Sequence[Score]) -> Sequence[Score]:
    return score if isinstance(score, Sequence) else (score,)


def _tensors(scores: Sequence[Score]) -> list[Tensor]:
    return [x for score in scores for x in vars(score).values() if isinstance(x, Tensor)]
