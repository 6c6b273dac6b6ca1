"""A cache of dispatch decisions for repeated calls, small or on a GPU, such as those of the layers of a model.

Validation, the choice of a kernel and its request depend, for a plain call (no scores or dropout), only on shapes,
strides, dtypes, mask, scale, measures, the kernels to choose from, and whether autograd records it, and not on the
addresses. `keep` stores what the kernel has `prepared` after a call has been dispatched, and `again` runs the next call
like it in a tenth of the time of a dispatch. Any other call is dispatched as usual, also one that autograd records and
that returns a map or reports δ.

The look-up comes before validation, which would take half as long again. Only calls that were validated are stored, and
all that validation reads is in the key.

One query that attends to all keys is a call like that with another number of keys: decoding steps have one key more
each. The end of a gap is no part of what a call is: a cache drops one more token in each step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.kernels import candidates
from headwise.kernels.call import Call, are_plain
from headwise.kernels.events import here
from headwise.kernels.gradients import learns
from headwise.kernels.kernel import Answer, Kernel, Prepared
from headwise.kernels.quantized import Vectors, in_memory
from headwise.masks import Mask, shows_whole_past
from headwise.stats import Measure, Statistic

PAIRS = 1 << 21  # (query, key) pairs over all heads: in larger calls on a CPU the time of dispatch is negligible
KEPT = 512  # the most decisions that are stored

_prepared: dict[Any, Prepared] = {}


def again(
    q: Tensor, k: Vectors, v: Vectors, mask: Mask | None, scale: float | None, kernel: str,
    measures: Sequence[str | Measure] | None = None, gap: tuple[int, int] | None = None,
) -> Answer | None:  # fmt: skip
    """Run a plain call, which need not be valid, like an earlier one; None for any other call, and none in a graph.
    measures: those of a call that returns a map; None for the output alone, on which a gap has no effect."""
    memory = in_memory(k, v)
    if not are_plain(getattr(q, "device", None), q, *memory):
        return None
    # The last two of quantized vectors are their scales.
    learned = torch.is_grad_enabled() and (q.requires_grad or memory[-2].requires_grad or memory[-1].requires_grad)
    if learned:
        if measures is not None or here().on_delta is not None:
            return None
    elif (measures is not None or q.is_cuda) and here().progress is not None:
        return None
    try:
        found = _prepared.get(_key(q, k, v, memory, mask, scale, kernel, measures, gap, learned))
        if found is None or (measures is not None and gap is not None and not (len(gap) == 2 and gap[0] < gap[1])):
            return None
    except (TypeError, IndexError, RuntimeError):  # an invalid argument: not hashable; a nested or sparse tensor
        return None
    return found.run(q, memory, k.shape[2], gap)


def keep(
    call: Call, chosen: Kernel, mask: Mask | None, scale: float | None, kernel: str, refusals: Mapping[str, str],
    measures: Sequence[str | Measure] | None = None, wanted: Sequence[Measure] | None = None,
) -> None:  # fmt: skip
    """Store the decisions for a call that `chosen` has run, if `again` supports it. measures, wanted: as given, and
    resolved, of a call that returns a map."""
    prepare, gap = getattr(chosen, "prepared", None), call.rule.grid.gap
    memory = in_memory(call.keys, call.values)
    b, h, n, m = call.rule.grid
    if prepare is None or call.dropout_p > 0 or call.rule.scores or not call.rule.mask.value:
        return
    if call.q.is_cpu and b * h * n * m > PAIRS:
        return
    if type(scale) not in (float, type(None)) or any(type(x) is not Tensor for x in (call.q, *memory[:2])):
        return
    if not call.q.stride(3) == memory[0].stride(3) == memory[1].stride(3) == 1:  # else the kernel received copies
        return
    learned = learns(call)
    if measures is not None and (learned or (mask is not None and mask.of_step)):
        return  # maps of training calls are not prepared; and of a step no call like it comes again
    given = (gap.start, gap.stop) if gap.size else None
    try:
        key = _key(call.q, call.keys, call.values, memory, mask, scale, kernel, measures, given, learned)
    except TypeError:  # measures that cannot be a key
        return
    if (prepared := prepare(call, wanted, refusals)) is not None:
        if len(_prepared) >= KEPT:
            _prepared.clear()
        _prepared[key] = prepared


def _key(
    q: Tensor, k: Vectors, v: Vectors, memory: Sequence[Tensor], mask: Mask | None, scale: float | None, kernel: str,
    measures: Sequence[str | Measure] | None, gap: tuple[int, int] | None, learned: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The key of a plain call, with the number of keys, unless its one query attends to all and autograd records
    nothing."""
    of_q, strides = q.shape, tuple(map(Tensor.stride, memory))
    of_k: tuple[int, ...] = k.shape
    of_v: tuple[int, ...] = v.shape
    of_map = None if measures is None else (_names(measures), None if gap is None else gap[0])
    if not learned and of_q[2] == 1 and 0 < of_k[2] == of_v[2] <= PAIRS and shows_whole_past(mask):
        of_k, of_v = (of_k[0], of_k[1], of_k[3]), (of_v[0], of_v[1], of_v[3])  # strides show that there are four
        strides = tuple(x[2:] for x in strides)  # others depend on m in what has been joined by torch.cat
    return (
        q.device, of_q, of_k, of_v, q.stride(), strides, q.dtype, k.dtype, v.dtype, mask, scale,
        candidates(kernel), of_map, learned,
    )  # fmt: skip


def _names(measures: Sequence[str | Measure]) -> tuple[Any, ...]:
    """The measures as a part of the key; TypeError if they hold more than numbers and names, or are read once."""
    if isinstance(measures, str):
        return (measures,)
    if not isinstance(measures, (tuple, list)):
        raise TypeError
    return tuple(x if type(x) is str else (type(x), *_settings(x)) for x in measures)


def _settings(measure: object) -> tuple[Any, ...]:
    held = tuple(vars(measure).items())
    if not isinstance(measure, Measure) or not all(isinstance(x, (int, float, str, Statistic)) for _, x in held):
        raise TypeError
    return held
