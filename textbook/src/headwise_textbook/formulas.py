"""Shapes in formulas of TeX: matrices that are stated as elements of ℝ^(a × b), their products, and rows of blocks."""

import re
from collections import Counter

from headwise.wording import Message, tr

_IN = re.compile(
    r"(?P<names>[^$\n=]*?)(?:=\s*(?P<body>[^$=]*?))?\s*(?:\\in|∈)\s*\\mathbb\{R\}\^\{(?P<dims>(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}",
    re.DOTALL,
)
_MATH = re.compile(r"\$\$(.*?)\$\$|\$([^$\n]+)\$", re.DOTALL)
Shapes = dict[str, tuple[str, str]]


def stacked(text: str, findings: list[tuple[int, Message]], read: Counter[str], unread: Counter[str]) -> None:
    """Compare products and blocks with the shapes that are stated for their matrices."""
    shapes: Shapes = {}
    for math in _MATH.finditer(text):
        body = math[1] or math[2]
        before, formula = len(findings), False
        for one in _IN.finditer(body):
            dims = tuple(_size(part) for part in re.split(r"\\times|×", one["dims"]))
            names = [_name(part) for part in re.split(r"[、,，;；]", one["names"]) if part.strip()]
            if len(dims) != 2 or not names:
                continue
            formula = True
            line = text.count("\n", 0, math.start()) + 1
            said = _blocks(names[-1], one["body"], dims, shapes) if one["body"] else None
            said = said or (_product(names[-1], one["body"], dims, shapes) if one["body"] else None)
            if said is not None:
                findings.append((line, said))
            for name in names:
                shapes[name] = (dims[0], dims[1])
        if math[1] is not None or "\\in" in body:
            (read if formula or len(findings) > before else unread)["formula"] += 1


def _size(tex: str) -> str:
    """A size as factors in order: (h \\cdot d_k) and hd_k are "d_k·h"."""
    plain = re.sub(r"\\text\{(\w+)\}|\\mathrm\{(\w+)\}", lambda m: m[1] or m[2], tex)
    plain = re.sub(r"[{}()\s$]|\\(?:left|right)", "", plain).replace("\\cdot", "·").replace("d_v", "d_k")
    plain = re.sub(r"^h(?=d_)", "h·", plain)
    return "·".join(sorted(plain.split("·")))


def _name(tex: str) -> str:
    """A name without spaces and words of TeX; an index of heads is i."""
    plain = re.sub(r"\\text\{(\w+)\}|\\mathcal\{(\w+)\}", lambda m: m[1] or m[2], tex.strip().strip("(&"))
    plain = re.sub(r"[{}\s$]", "", plain)
    return re.sub(r"_(\d+|h)(?=\^|$)", "_i", re.sub(r"^.*[^\w^_\\]", "", plain))


def _blocks(name: str, body: str, dims: tuple[str, ...], shapes: Shapes) -> Message | None:
    """Blocks in rows have as many columns as one of them."""
    match = re.search(r"\\begin\{[bp]matrix\}(.*?)\\end\{[bp]matrix\}", body, re.DOTALL)
    if match is None or "&" in match[1]:
        return None
    rows = [_name(row) for row in match[1].split("\\\\") if row.strip() and "dots" not in row]
    if not rows or rows[0] not in shapes or set(rows) != {rows[0]}:
        return None
    high, wide = shapes[rows[0]]
    if dims[1] == wide:
        return None
    return tr(
        "{name} is stated as {rows} × {columns}, but blocks of {high} × {wide} in rows give (h·{high}) × {wide}; they "
        "belong side by side, which gives {high} × (h·{wide})",
        name=name, rows=dims[0], columns=dims[1], high=high, wide=wide,
    )  # fmt: skip


def _product(name: str, body: str, dims: tuple[str, ...], shapes: Shapes) -> Message | None:
    """A product of two matrices with stated shapes, of which the second one would have to be transposed."""
    plain = _name(body)
    for left in sorted(shapes, key=len, reverse=True):
        right = plain.removeprefix(left).removeprefix("\\cdot")
        if plain.startswith(left) and right in shapes:
            (n, inner), (high, wide) = shapes[left], shapes[right]
            if inner != high and inner == wide and dims == (n, high):
                return tr(
                    "{name} = {left} {right} is {n} × {inner} times {high} × {wide}: {inner} columns and {high} rows; "
                    "the result stated, {n} × {high}, is that of {right} transposed",
                    name=name, left=left, right=right, n=n, inner=inner, high=high, wide=wide,
                )  # fmt: skip
    return None
