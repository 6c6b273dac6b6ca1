"""Attention of headwise's own layers told to a record, by the hooks of `nn.Module`.

A layer gives its map and measures to whoever asks, so a hook before the call asks, and one after it takes them out of
the result again unless the caller wanted them too.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from headwise.kernels.eager import eager
from headwise.models.adapters.observer import Observation, in_backward
from headwise.stats import Measure


class _Asked(tuple[Measure, ...]):
    """The measures of a call as one record has asked for them: which one, what stood there before (perhaps another
    record's), whether the map was wanted already, and whether it is cross attention."""

    by: "LayerHooks"
    before: Any
    map_wanted: bool
    crosses: bool


class LayerHooks:
    """The hooks of one layer.

    Args:
        name: of the layer.
        asks: whether calls are to be measured now.
        measures: in self attention, and in cross attention.
        tell: called with an observation and which of both there are in it.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        asks: Callable[[], bool],
        measures: tuple[Sequence[Measure], Sequence[Measure]],
        tell: Callable[[Observation, Sequence[Measure]], None],
    ) -> None:
        self._name, self._asks, self._measures, self._tell = name, asks, measures, tell
        self._module = module
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            # Before those of earlier records, which then find what they have asked for.
            module.register_forward_hook(self._after, with_kwargs=True, prepend=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if module is not self._module or not self._asks():  # a copy of a watched model has the hooks too
            return None
        return self._ask(args, kwargs)

    @eager
    def _ask(self, args: Any, kwargs: dict[str, Any]) -> Any:
        crosses = (args[1] if len(args) > 1 else kwargs.get("context")) is not None
        before = kwargs.get("measures", ())
        theirs = (before,) if isinstance(before, str | Measure) else tuple(before)
        asked = _Asked((*theirs, *(m for m in self._measures[crosses] if m not in theirs)))
        asked.by, asked.before, asked.crosses = self, before, crosses
        asked.map_wanted = bool(kwargs.get("return_map", False))
        return args, {**kwargs, "return_map": True, "measures": asked}

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        asked = kwargs.get("measures")
        while isinstance(asked, _Asked) and asked.by is not self:
            asked = asked.before
        return self._take(module, asked, result) if isinstance(asked, _Asked) else None

    @eager
    def _take(self, module: nn.Module, asked: _Asked, result: Any) -> Any:
        y, amap, *rest = result
        if not in_backward():  # gradient checkpointing repeats the call
            self._tell(Observation(self._name, module, amap), self._measures[asked.crosses])
        if asked.map_wanted:
            return None
        return (y, *rest) if rest else y
