"""`recognise(model, …)`: one forward pass, and the attention in it."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.errors import ConfigError
from headwise.events import within
from headwise.map import AttentionMap
from headwise.models.adapters.places import computed
from headwise.models.difference import Difference
from headwise.models.recognise.attention import Attention, assembled, names
from headwise.models.recognise.followed import UNEXPECTED, Followed, Lost, Softmax, unexpected
from headwise.models.recognise.following import following
from headwise.models.recognise.frames import modules_in_call, user_line
from headwise.models.recognise.products import Contraction
from headwise.models.recognise.report import NotFollowed, Recognised, Recognition, named
from headwise.models.recognise.tracked import Tracked
from headwise.rule import own_dtypes


def recognise(model: nn.Module, *args: Any, **kwargs: Any) -> Recognition:
    """Run a model once, without gradients, and return every attention call in it, whoever wrote the model.

    The model runs in its present mode, training or evaluation. Known are `F.scaled_dot_product_attention`,
    `flex_attention`, `varlen_attn`, the functions of flash-attn and xFormers, `nn.MultiheadAttention` with the layers
    made of it, and attention that is written out: a product of queries and
    keys, scaling, soft cap, biases and masks in any spelling, softmax, dropout, and a product with the values. A call
    is returned only if headwise's weights for it equal those of the code; the rest is listed with its reason.

    Args:
        model: any module. args, kwargs: its arguments.
    Returns:
        The `Recognition`: a sequence of `Recognised` calls, with `.maps()` and `.not_followed`.
    Raises:
        ConfigError: if no attention was recognised, with what was looked for and what came nearest.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"recognise(model): expected an nn.Module, got {type(model).__name__}")
    calls = _Calls(model)
    with torch.no_grad(), within(own_code=True), following(calls.seen):
        output = model(*args, **kwargs)
    if not calls.found:
        raise nothing(model, calls.seen, "recognise")
    found = tuple(
        Recognised(**a.shared, name=name, map=amap, error=apart.worst, line=line, remark=apart.remark)
        for name, (_, a, amap, apart, line) in zip(named([one[0] for one in calls.found]), calls.found, strict=True)
    )
    return Recognition(found, not_followed(calls.seen), output)


class _Calls:
    """The calls of a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {module: name for name, module in model.named_modules()}
        self.seen = Tracked(self.modules, self._values)
        self.found: list[tuple[str, Attention, AttentionMap, Difference, str]] = []

    def _values(self, product: Contraction, x: Followed, at: int, side: int, out: Tensor) -> None:
        """Weights are multiplied by values."""
        record = x.softmax
        assert record is not None
        assert x.product is not None
        place = names(x.product, modules_in_call(self.modules), self.modules)
        try:
            with own_dtypes(out):
                attention = assembled(product, x, at, side, out)
                a = attention
                mine, amap = attend(a.q, a.k, a.v, mask=a.mask, scale=a.scale, score=a.scores, return_map=True)
                apart = a.check(mine, amap, every=True)
        except (Lost, *UNEXPECTED) as error:
            record.reason = explained(x, str(error) if isinstance(error, Lost) else unexpected(error))
            return
        record.done = True
        self.found.append(("" if place is None else place[1], attention, amap, apart, user_line()))


def explained(x: Followed, reason: str) -> str:
    """The reason, with what was done to the weights after the softmax."""
    return f"the weights are changed after the softmax, by {x.note}; {reason}" if x.note else reason


def not_followed(seen: Tracked) -> tuple[NotFollowed, ...]:
    """Softmaxes of which no attention came, and what else is close to attention."""
    left: list[Softmax] = [*(one for one in seen.softmaxes if not one.done), *seen.near]
    left = [one for one in left if not one.modules or one.modules[0] not in seen.aside]
    found = [NotFollowed(seen.modules[one.modules[0]] if one.modules else "", one.reason, one.line) for one in left]
    done = {seen.modules[one.modules[0]] for one in seen.softmaxes if one.done and one.modules}
    found += _nothing_in(seen, {one.name for one in found} | done)
    opaque = [name for module, name in seen.modules.items() if isinstance(module, torch.jit.ScriptModule)]
    outer = [name for name in opaque if name.rpartition(".")[0] not in opaque or not name]
    found += [NotFollowed(name, "compiled by TorchScript, so that its functions are not seen", "") for name in outer]
    return tuple(dict.fromkeys(found))


def _nothing_in(seen: Tracked, named: set[str]) -> list[NotFollowed]:
    """Modules whose class is called an attention, and in which nothing was seen."""
    inside = [f"{name}." for name in named]
    lost = [
        (name, type(module).__name__) for module, name in seen.modules.items()
        if re.search("attention|attn", type(module).__name__, re.IGNORECASE)
        and not any(f"{one}.".startswith(f"{name}." if name else "") for one in named)
        and not any(f"{name}.".startswith(one) for one in inside)
        and not any(part in seen.aside or computed(part) for part in module.modules())
        and not isinstance(module, torch.jit.ScriptModule)
    ]  # fmt: skip
    outer = [one for one in lost if not any(one[0].startswith(f"{name}.") for name, _ in lost)]
    reason = "nothing was recognised in this {}: it was not called, or compiled code computes its attention"
    return [NotFollowed(name, reason.format(kind), "") for name, kind in outer]


def nothing(model: nn.Module, seen: Tracked, caller: str) -> ConfigError:
    """The error of `caller` for a model without attention: what was looked for, and what came nearest."""
    left = [str(one) for one in not_followed(seen)[:4]]
    if any(map(computed, model.modules())):
        also = f"; beside it: {'; '.join(left)}" if left else ""
        return ConfigError(
            f"{caller}(model): headwise computes the attention of this model; use watch or observe, or, if it is "
            f"attached, detach it first{also}"
        )
    products = seen.products
    nearest = "; ".join(left) or (
        f"{products} product{'s' * (products != 1)} of two tensors without a softmax" if products else
        "no softmax, and no product of two tensors that the model computed"
    )  # fmt: skip
    return ConfigError(
        f"{caller}(model): no attention in {type(model).__name__}; looked for F.scaled_dot_product_attention, "
        f"flex_attention and other fused functions, nn.MultiheadAttention, and softmax of a product of queries and "
        f"keys, multiplied by values; nearest: {nearest}"
    )
