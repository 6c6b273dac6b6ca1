"""What `recognise` returns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.kernels.events import call_name
from headwise.map import AttentionMap
from headwise.masks import Mask
from headwise.scores import Score
from headwise.table.show import as_html, as_text


@dataclass(frozen=True, eq=False)
class Call:
    """A call of `attend` that computes what the code of a model computes. `Recognised` explains its fields."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Mask | None
    scores: tuple[Score, ...]
    dropout_p: float
    traced: bool

    @property
    def shared(self) -> dict[str, Any]:
        """These fields."""
        return {one.name: getattr(self, one.name) for one in fields(Call)}


@dataclass(frozen=True, eq=False)
class Recognised(Call):
    """An attention call that was recognised, and its map.

    Attributes:
        q, k, v: [b, h, n, d], [b, h_kv, m, d] and [b, h_kv, m, d_v], detached, as they were multiplied (after rotary
            positions). Keys and values that were repeated for groups of heads are not repeated here, and those at the
            end that the mask hides from all queries are left out if it shows that the queries precede them.
        scale: factor on q·k, wherever the code applies it.
        mask: as a headwise mask; None if every key is visible. scores: soft cap, biases, learned sinks.
        dropout_p: of the weights.
        traced: whether it is known which axis holds heads, because queries or keys were traced back to a layer whose
            output was split, or the function defines it. If not, heads are the last of two or more leading axes, and
            the table has a question mark.
        name: the module's qualified name; name#2, name#3, … from its second call on.
        map: the weights, before dropout.
        error: the largest relative difference between a row of the map and of the code's own weights, where it made
            any, and between rows of the outputs, where there was no dropout.
        line: `file:line` of the code that multiplies weights and values.
        remark: how many rows are NaN or infinite on both sides, and were not compared; "" if there are none.
    """

    name: str
    map: AttentionMap
    error: float
    line: str
    remark: str

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.k.shape[1]

    def __repr__(self) -> str:
        values = zip(_HEAD[1:], _row(self)[1:], strict=True)
        return f"Recognised({self.name!r}, {', '.join(f'{name}={value}' for name, value in values)})"


@dataclass(frozen=True)
class NotFollowed:
    """A softmax, or something close to attention, that is no attention or is not followed.

    Attributes:
        name: the module's qualified name. reason: what it is, or what is not followed. line: `file:line` of the code.
    """

    name: str
    reason: str
    line: str

    @property
    def reason_and_line(self) -> str:
        """The reason, and the line in parentheses."""
        return self.reason + (f" ({Path(self.line).name})" if self.line else "")

    def __str__(self) -> str:
        return f"{self.name or '(the model)'}: {self.reason_and_line}"


@dataclass(frozen=True, eq=False)
class Recognition(Sequence[Recognised]):
    """The attention calls of one forward pass; it prints itself as a table.

    Attributes:
        calls: those that are recognised, in the order of the pass.
        not_followed: what else was seen, with reasons.
        output: what the model returned.
    """

    calls: tuple[Recognised, ...]
    not_followed: tuple[NotFollowed, ...]
    output: object

    def maps(self) -> dict[str, AttentionMap]:
        """name → map, in the order of the pass."""
        return {call.name: call.map for call in self.calls}

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        """A call by its number or by its name."""
        if isinstance(index, str):
            return {call.name: call for call in self.calls}[index]
        return self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        lines = [as_text(_HEAD, [_row(call) for call in self.calls], words=1, gap="  ")] if self.calls else []
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        return as_html(_HEAD, [_row(call) for call in self.calls], notes=self._notes())

    def _notes(self) -> list[str]:
        remarks = [f"{call.name or '(the model)'}: {call.remark}" for call in self.calls if call.remark]
        return [*remarks, *(f"not followed: {one}" for one in self.not_followed)]


_HEAD = ["module", "heads", "KV heads", "queries", "keys", "head_dim", "scale", "mask", "scores", "dropout", "error"]


def _row(call: Recognised) -> list[str]:
    _, h, n, m = call.map.shape
    scores = ", ".join(map(repr, call.scores)) or "–"
    return [
        call.name or "(the model)", str(h) + "?" * (not call.traced), str(call.num_kv_heads), str(n), str(m),
        str(call.q.shape[3]),
        f"{call.scale:.4g}", "none" if call.mask is None else repr(call.mask), scores, f"{call.dropout_p:g}",
        f"{call.error:.1g}",
    ]  # fmt: skip


def numbered(calls: Iterable[Any]) -> tuple[Any, ...]:
    """Calls with numbers in their names where a module is called again."""
    found: dict[str, Any] = {}
    for call in calls:
        name = call_name(call.name, found)
        found[name] = replace(call, name=name)
    return tuple(found.values())
