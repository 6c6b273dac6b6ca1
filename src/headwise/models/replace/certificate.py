"""What `certify` returns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.table.show import as_html, as_text


@dataclass(frozen=True)
class Verdict:
    """One attention of a model, or something close to it, beside `attend`.

    Attributes:
        name: the module's qualified name; name#2, name#3, … from its second call on.
        same: whether it is the same function, so that `attach` computes it, unless a remark says that it keeps a
            function of another package.
        function: the call of `attend` that it is, or is closest to; "" if there is none.
        reason: what is different, if it is not the same.
        difference: the largest relative difference between a row of its result and that of `function`; ∞ where one of
            both is NaN, NaN if both are everywhere; None if there is no such call. allowed: the largest that rounding
            explains.
        gradients: the largest relative difference of the gradients of queries, keys and values, in the Frobenius norm;
            None if they were not compared: with dropout, or where gradients are not recorded; NaN if they are NaN.
        remarks: what is unusual, though it may be intended: another scale, an inverted mask, fully masked queries,
            rows that are NaN or infinite on both sides, which were not compared.
        line: `file:line` of the code.
    """

    name: str
    same: bool
    function: str
    reason: str
    difference: float | None
    allowed: float | None
    gradients: float | None
    remarks: tuple[str, ...]
    line: str

    def __str__(self) -> str:
        what = f"the same function as {self.function}" if self.same else self.reason
        return "; ".join((f"{self.name or '(the model)'}: {what}", *self.remarks))


@dataclass(frozen=True, eq=False)
class Certificate(Sequence[Verdict]):
    """The attention of a model, call by call; it prints itself as a table.

    Attributes:
        verdicts: in the order of the pass; what is no attention comes last.
        output: what the model returned.
    """

    verdicts: tuple[Verdict, ...]
    output: object

    @property
    def same(self) -> bool:
        """Whether every attention is the same function as a call of `attend`; what is no attention does not count."""
        return all(one.same for one in self.verdicts if one.function or one.same)

    def __getitem__(self, index: Any) -> Any:
        """A verdict by its number or by its name."""
        if isinstance(index, str):
            return {one.name: one for one in reversed(self.verdicts)}[index]
        return self.verdicts[index]

    def __len__(self) -> int:
        return len(self.verdicts)

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __repr__(self) -> str:
        return as_text(_HEAD, [_row(one) for one in self.verdicts], words=2, gap="  ") + "".join(
            f"\n{note}" for note in self._notes()
        )

    def _repr_html_(self) -> str:
        return as_html(_HEAD, [_row(one) for one in self.verdicts], notes=self._notes())

    def _notes(self) -> list[str]:
        """What is different, and remarks, with the line of the code."""
        found = []
        for one in self.verdicts:
            place = f" ({Path(one.line).name})" if one.line else ""
            said = [*([] if one.same else [one.reason]), *one.remarks]
            found += [f"{one.name or '(the model)'}{place}: {what}" for what in said]
        return list(dict.fromkeys(found))


_HEAD = ["module", "verdict", "largest difference", "of gradients"]


def _row(one: Verdict) -> list[str]:
    if one.same:
        what = f"the same function as {one.function}"
    elif not one.function:
        what = "no softmax attention, or not followed"
    elif one.difference is not None and one.difference != one.difference:
        what = f"NaN or infinite, so that it was not compared with {one.function}"
    elif one.difference is not None and one.allowed is not None and one.difference <= one.allowed:
        what = f"equal here, but not the same function as {one.function}"
    else:
        what = f"differs from {one.function}"
    numbers = ("–" if x is None else f"{x:.1g}" for x in (one.difference, one.gradients))
    return [one.name or "(the model)", what, *numbers]
