"""The measures and heads of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.corpus.moments import OfRows, OfWindows, varied
from headwise.corpus.windows import TextWindow
from headwise.errors import ConfigError
from headwise.lm.loading import LoadedModel
from headwise.stats import GIVEN, Measure, Tokens, known, of_tokens
from headwise.wording import in_language

NOTHING = Tokens(torch.zeros(1, 0, dtype=torch.long), [[]], torch.zeros(1, 0, dtype=torch.bool))


@dataclass(frozen=True)
class Selection:
    """The measures of a sweep, by name."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> "Selection":
        """Raise ConfigError for an unknown name, with similar ones, and for a name that is given twice."""
        if isinstance(names, str):
            names = [names]
        for name in names:
            _made(name, NOTHING)
        if not names:
            raise ConfigError(
                "measures=(): give at least one; `headwise measures` lists all",
                "measures=()：至少给出一个；`headwise measures` 列出全部",
            )
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"measures: {min(twice)!r} is given twice", f"measures：{min(twice)!r} 重复给出")
        return cls(tuple(names))

    def known(self) -> tuple[OfRows | OfWindows, ...]:
        """The measures made for no tokens, for their names, units and what they are per."""
        return tuple(varied(_made(name, NOTHING)) for name in self.names)

    def measures(self, ids: Tensor, batch: Sequence[TextWindow]) -> tuple[Tokens, list[OfRows | OfWindows]]:
        """The tokens of a batch of windows with ids [b, n], and the measures for them; padding has no text."""
        width = ids.shape[1]
        special = torch.zeros(ids.shape, dtype=torch.bool)
        for i, window in enumerate(batch):
            special[i, : len(window.ids)] = window.special
        pieces = [[*window.pieces, *[""] * (width - len(window.ids))] for window in batch]
        tokens = Tokens(ids, pieces, special)
        return tokens, [varied(_made(name, tokens)) for name in self.names]


def _made(name: str, tokens: Tokens) -> Measure:
    """The measure of that name for these tokens. ConfigError if it requires more than a corpus provides."""
    if known(name) is not None and of_tokens(name, NOTHING) is None:
        possible = [other for other in GIVEN if of_tokens(other, NOTHING) is not None]
        raise ConfigError(
            f"measures: {name!r} requires {GIVEN[name].requires}; a corpus supports {', '.join(possible)}",
            f"measures：{name!r} 需要 {GIVEN[name].requires}；语料支持 {'、'.join(possible)}",
        )
    try:
        found = of_tokens(name, tokens)
    except ConfigError as error:
        raise ConfigError(f"measures: {error}", f"measures：{error.zh}") from None
    assert found is not None
    return found


@dataclass(frozen=True)
class Head:
    """A head: the number of its layer in forward order, the name of the attention module, and its own number."""

    layer: int
    name: str
    head: int


def chosen(loaded: LoadedModel, layers: Sequence[int] | None, heads: Sequence[int] | None) -> list[Head]:
    """The heads of these layers with these numbers; None for all.

    Raises:
        ConfigError: for a layer or a head that the model does not have, or if none is left.
    """
    count, most = len(loaded.layers), max(loaded.heads)
    for what, wanted, there in (("layers", layers, count), ("heads", heads, most)):
        for number in wanted or ():
            if not 0 <= number < there:
                raise ConfigError(
                    f"{what}: {number} does not exist in {loaded.name}; expected 0 to {there - 1}",
                    f"{what}：{in_language(loaded.name, 'zh')} 没有 {number}；应为 0 到 {there - 1}",
                )
    kept = [
        Head(i, name, head)
        for i, (name, width) in enumerate(zip(loaded.layers, loaded.heads, strict=True))
        for head in range(width)
        if (layers is None or i in layers) and (heads is None or head in heads)
    ]
    if not kept:
        raise ConfigError(
            f"layers={layers}, heads={heads}: selects no head of {loaded.name}",
            f"layers={layers}、heads={heads}：没有选中 {in_language(loaded.name, 'zh')} 的任何头",
        )
    return kept
