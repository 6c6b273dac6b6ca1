"""Python code in lines of a given width that are still the same code: lines are broken within brackets only.

>>> print(narrow("total = add(first_number, second_number)  # of both", 30))
# of both
total = add(first_number,
            second_number)
>>> print(narrow('print(f"one long text of {10 + 3} letters")', 30))
print(f"one long text of "
      f"{10 + 3} letters")
>>> print(narrow('pairs = (("one", 1), ("two", 2), ("three", 3))', 30))
pairs = (("one", 1),
         ("two", 2),
         ("three", 3))
"""

import io
import re
import tokenize
from dataclasses import dataclass
from itertools import pairwise
from keyword import iskeyword

from rich.cells import cell_len

_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")
_BOUND = _CLOSE | {",", ":", "."}  # no line begins with one
_F_STRING = {"FSTRING_START": 1, "FSTRING_END": -1}  # since Python 3.12, the parts of an f-string are tokens


@dataclass(frozen=True)
class _Break:
    """A column at which a line can be broken. end, begin: what then ends this line and begins the next one.

    bracket: the column after the bracket in which it is, None if that is on a line above.
    """

    column: int
    depth: int
    bracket: int | None
    comma: bool = False
    end: str = ""
    begin: str = ""

    @property
    def cost(self) -> float:
        """The outermost bracket is best, then a comma; a line that ends with an open bracket is worst."""
        return self.depth + 0.5 * (not self.comma) + (self.column == self.bracket)

    def ended(self, line: str) -> str:
        """The beginning of a line up to this column."""
        return line + self.end if self.end else line.rstrip()


def narrow(code: str, width: int) -> str:
    """The code in lines of at most `width` columns, where it can be broken; comments move above their lines."""
    lines: list[str] = []
    tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    comments = {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}
    breaks = _breaks(tokens)
    for number, line in enumerate(code.splitlines(), 1):
        indent, comment = line[: len(line) - len(line.lstrip())], comments.get(number, 0)
        if cell_len(line) > width and line[:comment].strip():
            lines.append(indent + line[comment:])
            line = line[:comment].rstrip()
        at, begin = 0, ""
        shifts = {0: 0}  # from columns of this line to columns of the new ones, by where these begin
        while cell_len(begin + line[at:]) > width:
            room = [one for one in breaks.get(number, []) if at + width // 3 < one.column]
            first = {one: begin + one.ended(line[at : one.column]) for one in room}
            fitting = [one for one in room if cell_len(first[one]) <= width]
            if not fitting:
                break
            best = min(fitting, key=lambda one: (one.cost, -one.column))
            lines.append(first[best])
            margin = len(indent)
            if best.bracket is not None:
                margin = best.bracket + shifts[max(start for start in shifts if start <= best.bracket)]
                if margin > width // 2 or best.column == best.bracket:
                    margin = len(indent) + 4
            at, begin = best.column, " " * margin + best.begin
            shifts[at] = len(begin) - at
        lines.append(begin + line[at:])
    return "\n".join(lines)


def _breaks(tokens: list[tokenize.TokenInfo]) -> dict[int, list[_Break]]:
    """For each line, where it can be broken: before tokens within brackets, and at spaces of strings there."""
    found: dict[int, list[_Break]] = {}
    brackets: list[tuple[int, int]] = []  # the row and the column after each open one
    start = None
    for token, following in pairwise(tokens):
        if (change := _F_STRING.get(tokenize.tok_name[token.type], 0)) > 0:
            start = start or token
        inside = start is not None
        if token.type == tokenize.STRING and not inside:
            found.setdefault(token.start[0], []).extend(_in_string(token, token.start[1], brackets))
        elif change < 0 and start is not None:
            found.setdefault(token.start[0], []).extend(_in_string(token, start.start[1], brackets))
            start, inside = None, False
        if token.type == tokenize.OP and not inside:
            if token.string in _OPEN:
                brackets.append(token.end)
            elif token.string in _CLOSE:
                brackets.pop()
        free = brackets and not inside and token.string != "." and following.string not in _BOUND
        if free and token.end[0] == following.start[0] and not _called(token, following):
            row, column = following.start
            one = _Break(column, len(brackets), _bracket(brackets, row), comma=token.string == ",")
            found.setdefault(row, []).append(one)
    return found


def _called(token: tokenize.TokenInfo, following: tokenize.TokenInfo) -> bool:
    """Whether the next token opens the arguments of a call or an index."""
    ends = token.type in (tokenize.NAME, tokenize.STRING) and not iskeyword(token.string)
    return following.string in ("(", "[") and (ends or token.string in _CLOSE)


def _bracket(brackets: list[tuple[int, int]], row: int) -> int | None:
    """The column after the innermost open bracket, None if it is not in this row."""
    opened, column = brackets[-1]
    return column if opened == row else None


def _in_string(token: tokenize.TokenInfo, start: int, brackets: list[tuple[int, int]]) -> list[_Break]:
    """The words of a string within brackets, outside of the braces of an f-string. token: its last one."""
    line, end = token.line, token.end[1]
    opening = re.match(r"[fF]?([\"'])(?!\1)", line[start:end])
    if opening is None or not brackets:
        return []
    depth, bracket = len(brackets), _bracket(brackets, token.start[0])
    braces, found = 0, []
    for column in range(start + opening.end(), end - 1):
        braces += (line[column] == "{") - (line[column] == "}")
        if line[column - 1] == " " and not braces - (line[column] == "{") and line[column] != " ":
            found.append(_Break(column, depth + 1, bracket, end=opening[1], begin=opening[0]))
    return found
