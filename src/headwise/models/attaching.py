"""`attach(model)`: compute the attention of a model with headwise until it is detached."""

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakSet

from torch import nn

from headwise.errors import ConfigError
from headwise.models.adapters.huggingface.attention import always_weights
from headwise.models.adapters.places import find, give_back, nothing_found, take_over, taken_anew

_attached: "WeakSet[nn.Module]" = WeakSet()  # attention modules with a handle


def attach(model: nn.Module, *, copy: bool = False, weights: bool = False) -> "Attachment":
    """Compute the attention of a model with headwise until the handle is detached.

    >>> import torch, headwise as hw
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    >>> handle = hw.attach(model)
    >>> handle.attached
    ('layers.0.self_attn', 'layers.1.self_attn')
    >>> handle.detach()

    or as a context manager:

    >>> with hw.attach(model):
    ...     y = model(torch.randn(7, 3, 16))

    Modules, parameters, hooks and state dict stay the same objects, so optimizers continue as before, and outputs are
    equal to rounding. `nn.MultiheadAttention` gets another class; in models of transformers every configuration gets
    attn_implementation="headwise". headwise's own layers need no attachment. A copy of an attached model is attached
    too; attach it to get a handle of its own. docs/models.md lists the tested models and the differences.

    Args:
        model: any module that contains `nn.MultiheadAttention`, models of transformers (>= 5) or headwise's layers.
        copy: attach a deepcopy, the handle's `.model`; the model itself is unchanged.
        weights: attention modules of transformers return their weights from every call, as with "eager", to the hooks
            of other libraries: `AttentionWeights`, which are computed when they are read. Without it, only calls with
            output_attentions=True return them.
    Returns:
        The handle: `.detach()` restores the model, as does the end of a `with` block; `.attached` and `.skipped` name
        the modules that are computed by headwise now, and those that cannot be, with the reason.
    Raises:
        ConfigError: if nothing can be attached, with the reason for each module, or if a module is attached already.
            The model is unchanged then.
    Warns:
        UserWarning: if some of the attention modules cannot be attached, such as image encoders that compute their
            attention themselves.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach(model): expected an nn.Module, got {type(model).__name__}")
    if copy:
        model = deepcopy(model)
    places, targets, skipped = find(model)
    if not places:
        raise nothing_found(model, "attach", "attached", skipped)
    for place in places:
        if place.module in _attached:
            raise ConfigError(
                f"attach(model): {place.name or type(model).__name__} is attached already; call .detach() on its "
                f"handle first"
            )
    targets = [target for target in targets if taken_anew(target)]
    parts = {part for target in targets for part in target.modules()}
    taken = [place for place in places if place.module in parts and place.kind != "headwise"]
    take_over(targets, adopt=True)
    _attached.update(place.module for place in taken)
    if skipped:
        listed = "; ".join(f"{name or type(model).__name__}: {why}" for name, why in skipped.items())
        warnings.warn(f"attach(model): not attached: {listed}", UserWarning, stacklevel=2)
    if weights:
        always_weights.update(place.module for place in places if place.kind == "transformers")
    names = {place.name: place.module for place in taken}
    return Attachment(model, names, targets, tuple(p.name for p in places if p.name not in names), skipped)


class Attachment:
    """The handle of a model whose attention headwise computes, as returned by `attach`; a context manager.

    Attributes:
        model: the model that was given, or its copy.
        attached: qualified names of the modules that headwise computes because of it; () after `detach`.
        own: names of those that headwise computed already: its own layers, and models loaded with
            attn_implementation="headwise".
        skipped: name → why a module is not attached.
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], targets: Sequence[nn.Module], own: tuple[str, ...],
        skipped: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.model, self.own, self.skipped = model, own, dict(skipped)
        self._modules, self._targets = dict(modules), list(targets)
        self._active = True

    @property
    def attached(self) -> tuple[str, ...]:
        """Names of the attached modules, in the order of registration."""
        return tuple(self._modules)

    def detach(self) -> None:
        """Put back what computed the attention before: the same classes, configurations and hooks. Calling it again
        changes nothing."""
        give_back(self._targets)
        for module in self._modules.values():
            _attached.discard(module)
            always_weights.discard(module)
        self._modules, self._targets, self._active = {}, [], False

    def __enter__(self) -> "Attachment":
        if not self._active:
            raise ConfigError("this handle was detached: attach(model) makes a new one")
        return self

    def __exit__(self, *_: Any) -> None:
        self.detach()

    def __repr__(self) -> str:
        if not self._active:
            return "Attachment(detached)"
        skipped = f"; {len(self.skipped)} skipped" if self.skipped else ""
        return f"Attachment({len(self.attached)} modules attached{skipped})"
