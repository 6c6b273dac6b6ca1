"""Python code in lines of a given width that are still the same code: lines are broken within brackets only.

>>> print(narrow("total = add(first_number, second_number)  # of both", 30))
# of both
total = add(first_number,
    second_number)
>>> print(narrow('print(f"one long text of {10 + 3} letters")', 30))
print(f"one long text of "
    f"{10 + 3} letters")
"""

import io
import re
import tokenize
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len

_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")
_BOUND = _CLOSE | {",", ":", ".", "(", "["}  # no line begins with one
_F_STRING = {"FSTRING_START": 1, "FSTRING_END": -1}  # since Python 3.12, the parts of an f-string are tokens


@dataclass(frozen=True)
class _Break:
    """A column at which a line can be broken. end, begin: what then ends this line and begins the next one."""

    column: int
    depth: int
    comma: bool = False
    end: str = ""
    begin: str = ""

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
        while cell_len(begin + line[at:]) > width:
            room = [one for one in breaks.get(number, []) if at + width // 3 < one.column]
            first = {one: begin + one.ended(line[at : one.column]) for one in room}
            fitting = [one for one in room if cell_len(first[one]) <= width]
            if not fitting:
                break
            best = min(fitting, key=lambda one: (one.depth + 0.5 * (not one.comma), -one.column))
            lines.append(first[best])
            at, begin = best.column, f"{indent}    {best.begin}"
        lines.append(begin + line[at:])
    return "\n".join(lines)


def _breaks(tokens: list[tokenize.TokenInfo]) -> dict[int, list[_Break]]:
    """For each line, where it can be broken: before tokens within brackets, and at spaces of strings there."""
    found: dict[int, list[_Break]] = {}
    depth, start = 0, None
    for token, following in pairwise(tokens):
        if (change := _F_STRING.get(tokenize.tok_name[token.type], 0)) > 0:
            start = start or token
        inside = start is not None
        if token.type == tokenize.STRING and not inside:
            found.setdefault(token.start[0], []).extend(_in_string(token.line, token.start[1], token.end[1], depth))
        elif change < 0 and start is not None:
            found.setdefault(token.start[0], []).extend(_in_string(token.line, start.start[1], token.end[1], depth))
            start, inside = None, False
        if token.type == tokenize.OP and not inside:
            depth += (token.string in _OPEN) - (token.string in _CLOSE)
        free = depth and not inside and token.string != "." and following.string not in _BOUND
        if free and token.end[0] == following.start[0]:
            one = _Break(following.start[1], depth, comma=token.string == ",")
            found.setdefault(following.start[0], []).append(one)
    return found


def _in_string(line: str, start: int, end: int, depth: int) -> list[_Break]:
    """The words of a string within brackets, outside of the braces of an f-string."""
    opening = re.match(r"[fF]?([\"'])(?!\1)", line[start:end])
    if opening is None or not depth:
        return []
    braces, found = 0, []
    for column in range(start + opening.end(), end - 1):
        braces += (line[column] == "{") - (line[column] == "}")
        if line[column - 1] == " " and not braces - (line[column] == "{") and line[column] != " ":
            found.append(_Break(column, depth + 1, end=opening[1], begin=opening[0]))
    return found
