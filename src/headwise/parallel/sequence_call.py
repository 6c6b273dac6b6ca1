"""One call on several ranks: its arguments are checked on each rank and compared, so that all ranks raise together."""

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import ConfigError, HeadwiseError, ShapeError
from headwise.fields import Described, inside, write
from headwise.kernels.spread import check_no_dtensor
from headwise.map.arguments import check_mask, rule_of
from headwise.masks import Mask
from headwise.parallel.layout import Layout, Members, check_held, check_layout, lengths
from headwise.parallel.travel import check_measures
from headwise.rule import DTYPES, Rule
from headwise.scores import Score, check_scores
from headwise.stats import Measure, resolve

Result = TypeVar("Result")
HASHED = 1 << 20  # tensors of masks and scores with more numbers are compared between ranks by shape only


def agree(
    who: Members, name: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None,
    score: Score | Sequence[Score], dropout_p: float, layout: str, kernel: str, return_map: bool,
    measures: Sequence[str | Measure],
) -> tuple[Sequence[Measure], Layout, Layout, Rule]:  # fmt: skip
    """Check the call of this name on all ranks: its measures, the layouts of queries and keys, and the whole rule. One
    collective of FACTS numbers per rank, so that an error of one is an error on all."""
    own: Exception | None = None
    wanted: Sequence[Measure] = []
    facts: dict[str, int] = {}
    try:
        check_no_dtensor(q=q, k=k, v=v)
        wanted = resolve(measures) if measures else []
        check_measures(wanted, return_map)
        check_layout(layout)
        check_mask(mask)
        grid = rule_of(q, k, v, None, scale, (), dropout_p).grid
        scores = score if isinstance(score, Sequence) else (score,)
        # Sizes of scores are checked for the whole sequence; here only their types.
        check_scores([score for score in scores if not isinstance(score, Score)], grid, q.device)
        inputs = (q, k, v, *(x for score in scores for x in vars(score).values() if isinstance(x, Tensor)))
        facts = {
            "failed": 0, "n": q.shape[2], "m": k.shape[2],
            # Everything that must be equal on all ranks, as numbers of at most 63 bits.
            "batch": q.shape[0], "heads of q": q.shape[1], "heads of k and v": k.shape[1],
            "head_dim of q and k": q.shape[3], "head_dim of v": v.shape[3], "dtype": DTYPES.index(q.dtype),
            "mask": 0 if mask is None else _contents([mask]),
            "scale": 0 if scale is None else zlib.crc32(struct.pack("d", scale)),
            "score": _contents(scores), "dropout_p": _code(dropout_p), "layout": _code(layout),
            "return_map": int(return_map), "measures": _code([measure.name for measure in wanted]),
            "need of gradients": int(torch.is_grad_enabled() and any(x.requires_grad for x in inputs)),
        }  # fmt: skip
    except Exception as error:  # of any type, as the other ranks must not wait for this one
        own = error
    numbers = list(facts.values()) or [1] + [0] * (FACTS - 1)
    assert len(numbers) == FACTS
    mine = torch.tensor(numbers, dtype=torch.int64, device=device_of(who, q))
    everyone = [torch.empty_like(mine) for _ in range(who.ranks)]
    try:
        dist.all_gather(everyone, mine, group=who.group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {who.rank} of {who.ranks}: not all ranks made this call; see the first error there: {error}"
        ) from error
    rows = torch.stack(everyone).tolist()
    if failed := [rank for rank, row in enumerate(rows) if row[0]]:
        _raise_together(who, name, own, failed)
    names = list(facts)
    for index, fact in enumerate(names[3:], 3):
        numbers = [row[index] for row in rows]
        if len(set(numbers)) > 1:
            if fact in ("batch", "heads of q", "heads of k and v", "head_dim of q and k", "head_dim of v"):
                raise ShapeError(f"{name}: {fact} differs between the ranks: {', '.join(map(str, numbers))}")
            others = ", ".join(f"rank {rank}" for rank, code in enumerate(numbers) if code != numbers[0])
            raise ConfigError(
                f"{name}: {fact} differs between the ranks: {others} and rank 0; give the same on all, for the whole "
                f"sequence"
            )
    queries, keys = (Layout(layout, sum(row[i] for row in rows), who.ranks) for i in (1, 2))
    check_held("q", [row[1] for row in rows], queries)
    check_held("k", [row[2] for row in rows], keys)
    # Checked as in one process; expanded tensors without memory represent the whole sequence.
    stand_ins = [
        x.detach().new_empty(x.shape[0], x.shape[1], 1, x.shape[3]).expand(-1, -1, size, -1)
        for x, size in ((q, queries.length), (k, keys.length), (v, keys.length))
    ]
    rule = rule_of(stand_ins[0], stand_ins[1], stand_ins[2], mask, scale, score, dropout_p)
    rule.mask.check(rule.grid)
    return wanted, queries, keys, rule


def together(who: Members, name: str, device: torch.device, call: Callable[[], Result]) -> Result:
    """Return call(), which sends nothing; if it raises on a rank, raise on all. A collective of one number."""
    own: Exception | None = None
    try:
        result = call()
    except Exception as error:  # of any type, as in `agree`
        own = error
    failed = [rank for rank, one in enumerate(lengths(int(own is not None), who, device)) if one]
    if failed:
        _raise_together(who, name, own, failed)
    return result


FACTS = 17  # numbers that are compared: whether the check failed, n, m, and those that must be equal


def device_of(who: Members, like: object) -> torch.device:
    """The device of tensors that the group can send: that of `like` if it is a tensor."""
    if dist.get_backend(who.group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return like.device if isinstance(like, Tensor) else torch.device("cpu")


def _raise_together(who: Members, name: str, own: Exception | None, failed: list[int]) -> NoReturn:
    """Raise this rank's own error, or the first error of another rank."""
    errors: list[Any] = [None] * who.ranks
    dist.all_gather_object(errors, None if own is None else (type(own).__name__, str(own)), group=who.group)
    if own is not None:
        raise own
    first = failed[0]
    kind, message = errors[first]
    raised = next((kind_of for kind_of in HeadwiseError.__subclasses__() if kind_of.__name__ == kind), ConfigError)
    raise raised(f"{name}: rank {first} of the group raised: {message}")


def _code(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _contents(things: Sequence[Described]) -> int:
    """A checksum of masks or scores: of their classes, and of the contents of all their fields."""
    tensors: list[Tensor] = []

    def put(x: Tensor) -> int:
        tensors.append(x)
        return len(tensors)

    codes = [write(thing, put) for thing in things]
    kinds = [type(one).__qualname__ for thing in things for one in inside(thing)]
    code = _code((kinds, codes, [(tuple(x.shape), x.dtype) for x in tensors]))
    for x in tensors:
        if x.numel() <= HASHED:
            code = zlib.crc32(x.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes(), code)
    return code
