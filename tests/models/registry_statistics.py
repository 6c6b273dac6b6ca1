"""Statistics of a model's attention that `watch` measures, and those of the softmaxes in its own code ("eager")."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from registry_case import Case
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.models.adapters.huggingface import NAME, install
from headwise.models.adapters.huggingface.attention import HARMLESS, PACKED
from headwise.models.adapters.huggingface.library import library

MEASURES = ("entropy", "max_logit", "sink_mass")
TOLERANCE = 1e-5
LOWEST = torch.finfo(torch.float32).min / 2  # what masks a key if it is added to its score


# Arguments of attention that many models pass.
USUAL = HARMLESS | PACKED | {
    "attention_mask", "dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias",
}  # fmt: skip


@contextmanager
def arguments() -> Iterator[set[str]]:
    """Within it: the other arguments that modules give headwise's attention; "sliding_window" where a call without a
    mask has keys before it."""
    install()
    functions, found = library("modeling_utils").ALL_ATTENTION_FUNCTIONS, set[str]()
    before = functions[NAME]

    def seen(module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **kwargs: Any) -> Any:
        found.update(name for name, x in kwargs.items() if name not in USUAL and x is not None and x is not False)
        if (*mask, kwargs.get("attention_mask"))[0] is None and (
            kwargs.get("sliding_window") or key.shape[2]
        ) < key.shape[2]:
            found.add("sliding_window")
        return before(module, query, key, value, *mask, **kwargs)

    functions[NAME] = seen
    try:
        yield found
    finally:
        functions[NAME] = before


class Softmaxed(TorchDispatchMode):
    """Within it: the scores and the weights, [b, h, n, m], of every softmax, and of PyTorch's attention without a mask,
    that these modules compute themselves."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in modules}
        self.inside: list[str] = []
        self.shifted: tuple[Tensor, Tensor] | None = None  # what was subtracted from last, and the result
        self.handles = ExitStack()
        for name, module in modules.items():
            before = module.register_forward_pre_hook(lambda *_, name=name: self.inside.append(name))
            after = module.register_forward_hook(lambda *_: self.inside.pop() and None, always_call=True)
            self.handles.callback(before.remove)
            self.handles.callback(after.remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.name() == "aten::sub.Tensor":
            self.shifted = args[0], out
        elif self.inside and func.name() == "aten::_softmax" and out.ndim == 4:
            x = args[0]
            scores = self.shifted[0] if self.shifted is not None and self.shifted[1] is x else x
            self.found[self.inside[-1]].append((scores.double(), out.double()))
        elif self.inside and "scaled_dot_product" in func.name():
            q, k, *_ = args
            masked = any(args[4:]) or kwargs.get("attn_mask") is not None
            assert not masked, "the mask of a fused attention is not read"
            scores = q.double() @ k.double().mT * (kwargs.get("scale") or q.shape[-1] ** -0.5)
            self.found[self.inside[-1]].append((scores, scores.softmax(-1)))
        return out


def expected(calls: list[tuple[Tensor, Tensor]], keys: list[int]) -> Tensor:
    """The measures of a module over all rows of its calls that are not padding, [measures, h].

    Args:
        keys: how many columns of each call are keys; more are learned sinks.
    """
    parts = []
    for (scores, weights), m in zip(calls, keys, strict=True):
        seen = scores[..., :m] > LOWEST
        real = seen.any(-1)
        if seen.shape[2] == m and bool(seen.triu(1).any()):  # a query at a key that no query sees, such as later ones
            real = real & seen.any(2)
        w = weights[..., :m] * real[..., None]
        largest = scores[..., :m].masked_fill(~(seen & real[..., None]), -torch.inf)
        parts.append((
            real.sum((0, 2)), torch.special.entr(w).sum((0, 2, 3)), largest.amax((0, 2, 3)), w[..., 0].sum((0, 2)),
        ))  # fmt: skip
    count, entropy, largest, first = (torch.stack(part) for part in zip(*parts, strict=True))
    rows = count.sum(0)
    return torch.stack([entropy.sum(0) / rows, largest.amax(0), first.sum(0) / rows])


def compare(case: Case, call: Callable[[], Any]) -> dict[str, str]:
    """layer → "equal", or the remark of one whose weights its own code does not have, in a call of a model.

    Raises:
        AssertionError: for a layer that differs, or has NaN where its own code has weights, or NaN without a remark.
    """
    with torch.no_grad(), hw.watch(case.model, measures=list(MEASURES), maps="lazy") as record:
        call()
    mode = Softmaxed({name: module for name, module in record.modules().items() if name in record.latest.layers})
    with mode.handles, mode, torch.no_grad():
        call()
    found = {}
    for at, name in enumerate(record.latest.layers):
        heads = sum(place[0] == name for place in record.latest.places)
        ours = torch.stack([record.latest[measure][at][:heads] for measure in MEASURES]).double()
        shapes = [tuple(amap.shape) for kept, amap in record.maps.items() if kept.partition("#")[0] == name]
        calls = [x for x in mode.found[name] if not shapes or x[1].shape[:3] in {shape[:3] for shape in shapes}]
        if bool(ours.isnan().any()) and not calls:
            assert record.remarks.get(name), f"{name}: NaN without a remark"
            found[name] = record.remarks[name]
            continue
        assert len(calls) == len(shapes), f"{name}: {len(calls)} softmaxes and {len(shapes)} maps"
        theirs = expected(calls, [shape[3] for shape in shapes])
        off = ((ours - theirs).abs() / theirs.abs().clamp_min(1.0)).amax(1).tolist()
        assert all(x <= TOLERANCE for x in off), f"{name}: {dict(zip(MEASURES, off, strict=True))} apart"
        found[name] = "equal"
    return found
