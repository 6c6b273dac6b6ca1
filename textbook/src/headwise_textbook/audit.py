"""The command audit: what a chapter says against what its listings compute, and against itself.

Read are listings (fenced, with prompts, or plain), which run in the process of exercises; the shapes in their comments
and outputs; products of shapes, and steps such as "merged: [4, 16, 512]"; sums with numbers; tables of configurations;
numbers of parameters; and matrices in formulas. What is not read is counted.

>>> audit("All heads together have 8 × 64 = 521 numbers.").lines()[0]
'✗ line 1: 8 × 64 = 521: it is 512'
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any

from headwise.errors import ConfigError
from headwise.wording import COMMA, Bilingual, Message, joined, tr
from headwise_textbook.exercises.classes import INSIDE
from headwise_textbook.exercises.grade import MEMORY, Raised, Sandbox, Stopped, raised
from headwise_textbook.formulas import stacked

MOST_CHARACTERS = 300_000
KINDS = {
    "listing": tr("listings"), "shape": tr("shapes"), "output": tr("outputs"), "product": tr("products of shapes"),
    "step": tr("steps of shapes"), "sum": tr("calculations"), "table": tr("rows of configurations"),
    "count": tr("numbers of parameters"), "formula": tr("formulas"),
}  # fmt: skip
# Errors of a listing itself; others say that something is missing here.
_WRONG = ("RuntimeError", "TypeError", "ValueError", "IndexError", "AssertionError")
_ON_PURPOSE = r"Traceback|\b(?:raises?|errors?|fails)\b|报错|出错|错误"
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)[ ]*([\w+-]*).*?$(.*?)^ {0,3}\1\s*$", re.MULTILINE | re.DOTALL)
_SHAPE = re.compile(r"(?<![\w\]])\[((?:[^\[\],]+,)+[^\[\],]+)\]")
_NUMBERS = r"\[\s*\d+(?:\s*,\s*\d+)+\s*\]"
_SIZES = re.compile(r"\[\w+(?:, ?\w+)+\]")
# A shape in a comment is all of it, or follows a colon or an arrow: there are other lists, such as "token [0, 1]".
_COMMENTED = re.compile(rf"(?:\s*|.*(?:[:：=→]|->|shape|size|形状|形狀)\s*)`?{_SHAPE.pattern}`?(?=\s*+(?:\W|$))")
_PRODUCT = re.compile(rf"{_SHAPE.pattern}\s*[@×]\s*{_SHAPE.pattern}\s*(?:=|→|->)\s*{_SHAPE.pattern}")
_STEP = re.compile(rf"^[ \t]*([^\[\]\n:：#|]{{1,30}})[:：][ \t]*({_NUMBERS})[ \t]*$", re.MULTILINE)
_NUMBER = r"\d[\d,]*(?:\.\d+)?[²³]?"
_SUM = re.compile(
    r"(?<![\w.)\]^²³_×*/÷+·−-])(?<![×*/÷+·−-] )"
    rf"({_NUMBER}(?:\s*[×*/÷+]\s*{_NUMBER})+)\s*(=|≈)\s*((?>{_NUMBER}))"
    r"(?:\s*(百万|[万亿%]|thousand|million|billion|[KkMBGT](?:i?B)?\b))?+(?![A-Za-z×*/÷^²⁰¹⁴-⁹]|:\d)"
    r"([ \t]*[×*/÷+·−-][ \t]*\d)?"
)
_UNITS = {  # what each may mean: 2K is 2,000 or 2,048, and 0.5 × 100 = 50 % has 50 as its number
    "万": (1e4,), "百万": (1e6,), "亿": (1e8,), "%": (0.01, 1), "thousand": (1e3,), "million": (1e6,),
    "billion": (1e9,), "K": (1e3, 2**10), "M": (1e6, 2**20), "G": (1e9, 2**30), "T": (1e12, 2**40), "B": (1e9, 1),
}  # fmt: skip
_COLUMNS = (r"d_?model|width|hidden|宽度|隐藏", r"(num_?)?heads?|h|头数", r"d_?k(ey)?|d_?head|head[_ ]dim.*|头维度")
_TOTAL = re.compile(
    r"(?:总参数量?|參數總量|total (?:number of )?parameters?)\D{0,12}?(\d+)\s*[×*]\s*\$?d(?:_model)?\s*[²^]"
)
_RULE = re.compile(r"d_?\{?k\w*\}?[^\n=]{0,20}=[^\n]{0,20}d_?\{?(?:\\text\{)?model\}*\s*/\s*(?:h|num_heads|n_heads)\b")
_FOUR = re.compile(r"四个|四個|4 个|\bfour\b|\b4 matrices", re.IGNORECASE)
Sizes = dict[str, dict[str, tuple[int, int]]]  # by function and name: the size, and the line that has it first


@dataclass
class Audit:
    """What was read, what disagrees, and what was not read."""

    read: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, Message]] = field(default_factory=list)  # by line
    reasons: list[tuple[int, Message]] = field(default_factory=list)  # why a listing was not read

    def lines(self) -> list[Bilingual]:
        """The findings by line, then what was read and what was not."""
        out: list[Bilingual] = [
            tr("✗ line {line}: {said}", line=line, said=said)
            for line, said in sorted(self.findings, key=lambda one: one[0])
        ]
        for counts, head in ((self.read, tr("read — {what}")), (self.unread, tr("not read — {what}"))):
            named = [tr("{kind}: {count}", kind=KINDS[kind], count=counts[kind]) for kind in KINDS if counts[kind]]
            what = joined(named, COMMA) if named else Bilingual("-", "-")
            out.append(Bilingual(str(head).format(what=what), head.zh.format(what=what.zh)))
        out += [tr("  line {line}: not run: {why}", line=line, why=why) for line, why in self.reasons]
        if not self.findings:
            out.insert(
                0, tr("✓ nothing that was read disagrees") if sum(self.read.values()) else tr("nothing was read")
            )
        return out


def audit(text: str, *, file: str = "chapter.md", seconds: float = 10.0, memory: int = MEMORY) -> Audit:
    """Audit a chapter. seconds: of CPU time for its listings. ConfigError if it is too long, or has nothing to read."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            "{file} has {count:,} characters; expected a chapter of at most {most:,}", file=file, count=len(text),
            most=MOST_CHARACTERS,
        )  # fmt: skip
    found = Audit()
    listings = list(_listings(text))
    _run(listings, file, found, seconds=seconds, memory=memory)
    spans = [(line, line + source.count("\n")) for line, source, _ in listings]
    lines = [*_products(text, found), *_steps(text, found)]
    inside = {*lines, *(line for first, last in spans for line in range(first, last + 1))}
    found.unread["shape"] += sum(_line(text, match.start()) not in inside for match in _SIZES.finditer(text))
    _sums(text, found)
    _tables(text, found)
    stacked(text, found.findings, found.read, found.unread)
    for match in _TOTAL.finditer(text):
        before = text[max(0, match.start() - 300) : match.start()]
        if not _FOUR.search(before):
            found.unread["count"] += 1
            continue
        found.read["count"] += 1
        if match[1] != "4":
            said = tr("{count} × d_model² parameters in all, and four matrices of d_model² before it", count=match[1])
            found.findings.append((_line(text, match.start()), said))
    if not sum(found.read.values()) + sum(found.unread.values()) and not spans:
        raise ConfigError("{file} has no listing, shape, calculation or table that can be read", file=file)
    return found


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _listings(text: str) -> Iterator[tuple[int, str, dict[int, str]]]:
    """The first line, code, and expected outputs by line of each listing, fenced or plain."""
    fenced = list(_FENCE.finditer(text))
    for match in fenced:
        line, body, kind = _line(text, match.start()) + 1, dedent(match[3].removeprefix("\n")), match[2].lower()
        if ">>>" in body:
            yield (line, *_prompted(body, line))
        elif kind in ("python", "py", "python3", "pycon") or (
            not kind and re.search(r"^\s*(import|def|class)\s", body, re.M)
        ):
            yield line, body, {}
    if not fenced:
        lines = text.split("\n")
        at = 0
        while at < len(lines):
            if not re.match(r"(import|from) [\w.]+", lines[at]):
                at += 1
                continue
            end = _parsed(lines, at)
            if end > at + 2:
                yield at + 1, "\n".join(lines[at:end]), {}
            at = max(end, at + 1)


def _parsed(lines: list[str], start: int) -> int:
    """The end of the longest plain listing from a line on, or of the lines that look like Python."""
    best, looks = start, start
    for end in range(start + 1, min(len(lines), start + 400) + 1):
        code = "\n".join(lines[start:end])
        if re.match(r"\s*(import|from|def|class|return|for|if|[\w., ]+ ?=|[\w.]+\(|#|@|\"|$)", lines[end - 1]):
            looks = end
        elif end - looks > 3:
            break
        try:
            ast.parse(code)
            best = end
        except (SyntaxError, ValueError):
            continue
    return best if best - start > 20 or looks - best < 5 else looks


def _prompted(body: str, line: int) -> tuple[str, dict[int, str]]:
    """A session with >>> as code on the same lines, and what it shows after each line."""
    code, expected, last = [], dict[int, str](), 0
    for at, row in enumerate(body.split("\n")):
        if match := re.match(r"\s*(?:>>>|\.\.\.) ?(.*)", row):
            code.append(match[1])
            last = line + at if row.lstrip().startswith(">>>") else last
        else:
            code.append("")
            if row.strip() and last:
                expected[last] = f"{expected.get(last, '')}\n{row}".strip()
    return "\n".join(code), expected


def _run(listings: list[Any], file: str, found: Audit, *, seconds: float, memory: int) -> None:
    """Run the listings one after another, and compare shapes and outputs with what stands beside them."""
    sandbox, shared, loose = None, Sizes(), set[str]()  # loose: names of listings that leave names out
    try:
        for line, source, expected in listings:
            padded = "\n" * (line - 1) + source
            sizes = shared if _taken(padded) & loose else Sizes()
            try:
                if sandbox is None:
                    sandbox = Sandbox("", file, "candidates", seconds=seconds, memory=memory, beside=INSIDE)
                records, shown, error = sandbox.call("run", padded, False)
                if error and error[1] == "NameError":
                    first = error
                    records, shown, error = sandbox.call("run", padded, True)
                    error = error and first
                    sizes = shared
                    loose |= {name for _, name, _, function in records if function == "<module>"}
            except (Raised, Stopped) as end:
                why = end.message if isinstance(end, Stopped) else raised(str(end))
                found.unread["listing"] += 1
                found.reasons.append((line, why))
                if isinstance(end, Stopped) and sandbox is not None:
                    sandbox.close()
                    sandbox = None
                continue
            meant = bool(error) and _meant(padded, expected, error)
            wrong = bool(error) and not meant and error[1] in _WRONG and "alloc" not in error[2]
            if error and not wrong and not meant:
                found.unread["listing"] += 1
                found.reasons.append((error[0] or line, raised(f"{error[1]}: {error[2]}")))
            else:
                found.read["listing"] += 1
            if wrong:
                said = tr("the listing raises {error}", error=f"{error[1]}: {error[2]}")
                found.findings.append((error[0] or line, said))
            _commented(padded, records, sizes, found)
            _shown(padded, shown, expected, found)
    finally:
        if sandbox is not None:
            sandbox.close()


def _meant(source: str, expected: dict[int, str], error: list[Any]) -> bool:
    """Whether the text says at a line of an error, in a comment or as its output, that it raises one."""
    rows = source.split("\n")
    _, kind, _, places = error
    for line in places:
        notes = [expected.get(line, ""), rows[line - 1].partition("#")[2]]
        notes += [row for row in rows[max(0, line - 2) : line + 1 : 2] if row.lstrip().startswith("#")]
        if any(re.search(rf"{kind}|{_ON_PURPOSE}", one, re.IGNORECASE) for one in notes):
            return True
    return False


def _taken(source: str) -> set[str]:
    """The names that a listing takes from others: those that it reads and does not set."""
    try:
        names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    except (SyntaxError, ValueError):
        return set()
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - stored


def _statements(source: str) -> Iterator[tuple[int, int]]:
    """First and last line of each simple statement."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield node.lineno, node.end_lineno or node.lineno


def _commented(source: str, records: list[Any], sizes: Sizes, found: Audit) -> None:
    """The shapes in comments against those of the values; a name of a size has one value in a function."""
    lines = source.split("\n")
    wrong: list[tuple[int, Message]] = []
    for first, last in sorted(set(_statements(source))):
        comments = [(at, lines[at - 1].partition("#")[2]) for at in range(first, last + 1)]
        stated = [(at, match[1]) for at, said in comments if "(" not in said and (match := _COMMENTED.match(said))]
        if not stated:
            continue
        at, said = stated[-1]
        seen = dict[str, tuple[list[int], str]]()
        for line, name, shape, function in records:
            if first <= line <= last and shape and not (name == "return" and seen):
                seen.setdefault(name, (shape, function))
        found.read["shape"] += bool(seen)
        found.unread["shape"] += not seen
        whys = [
            (name, shape, _differs(said, shape, sizes.setdefault(function, {}), at))
            for name, (shape, function) in seen.items()
        ]
        if whys and all(why is not None for _, _, why in whys):
            name, shape, why = whys[0]
            said = tr("{name} is {shape}, and the text says [{said}]{why}", name=name, shape=str(shape), said=said,
                why=why or "",
            )  # fmt: skip
            wrong.append((at, said))
    if wrong:
        line, said = wrong[0]
        more = tr("; {count} more of this listing after it", count=len(wrong) - 1) if wrong[1:] else ""
        found.findings.append((line, tr("{said}{more}", said=said, more=more)))


def _differs(said: str, shape: list[int], sizes: dict[str, tuple[int, int]], line: int) -> Message | None:
    """Why a stated shape is not that of a value; names that are new get the sizes that they have here."""
    entries = [one.strip().strip("`$ ") for one in said.split(",")]
    if len(entries) != len(shape):
        return tr(": {stated} axes instead of {are}", stated=len(entries), are=len(shape))
    new = dict[str, tuple[int, int]]()
    for entry, size in zip(entries, shape, strict=True):
        value = entry.rpartition("=")[2].strip()
        name = (entry.partition("=")[0] if "=" in entry else entry).strip().lower()
        if value.isdigit():
            if int(value) != size:
                return tr(": {size} instead of {value}", size=size, value=value)
        elif re.fullmatch(r"[^\W\d]\w*", name):
            known = sizes.get(name) or new.get(name)
            if known is not None and known[0] != size:
                return tr(", with {name} = {size} in line {line}", name=name, size=known[0], line=known[1])
            new.setdefault(name, (size, line))
    sizes.update({name: size for name, size in new.items() if name not in sizes})
    return None


def _shown(source: str, shown: list[Any], expected: dict[int, str], found: Audit) -> None:
    """Shapes and whole numbers that lines print against a comment at their end, or the output below them."""
    lines = source.split("\n")
    for line, text in shown:
        said = expected.get(line) or lines[line - 1].partition("#")[2].strip()
        pair = [_plain(one) for one in (said, text)]
        if not said or None in pair:
            found.unread["output"] += bool(said)
            continue
        found.read["output"] += 1
        if pair[0] != pair[1]:
            found.findings.append((line, tr("the line prints {text}, and the text says {said}", text=text, said=said)))


def _plain(text: str) -> list[int] | None:
    """A shape or a whole number; None for anything else."""
    if match := re.fullmatch(r"(?:torch\.Size\()?[\[(](\d+(?:, ?\d+)*),?[\])]\)?", text.strip()):
        return [int(one) for one in match[1].split(",")]
    digits = text.strip().replace(",", "").replace("_", "")
    return [int(digits)] if re.fullmatch(r"\d+", digits) else None


def _products(text: str, found: Audit) -> Iterator[int]:
    """[a, b] @ [b, c] = [a, c], with numbers or names. Yields the lines that were read."""
    for match in _PRODUCT.finditer(text):
        yield _line(text, match.start())
        one, two, out = ([entry.strip() for entry in part.split(",")] for part in match.groups())
        found.read["product"] += 1
        fits = one[-1] == two[-2]
        lead = one[:-2] or two[:-2]
        if not fits or out != [*lead, one[-2], two[-1]]:
            ours = f"[{', '.join([*lead, one[-2], two[-1]])}]"
            said = tr("{stated}: the product is {ours}", stated=match[0], ours=ours) if fits else tr(
                "{stated}: {left} columns and {right} rows do not fit", stated=match[0], left=one[-1], right=two[-2]
            )  # fmt: skip
            found.findings.append((_line(text, match.start()), said))


def _steps(text: str, found: Audit) -> Iterator[int]:
    """Shapes in lines one after another, such as "split: [4, 16, 4, 128]", which keep all numbers. Yields lines."""
    last: tuple[int, list[int]] | None = None
    for match in _STEP.finditer(text):
        line, label = _line(text, match.start()), match[1].lower()
        shape = [int(one) for one in re.findall(r"\d+", match[2])]
        near = last is not None and line - last[0] <= 4
        if near:
            yield line
        if near and last is not None and re.search(r"转置|轉置|transpos|切分|split|合并|合併|merge|concat|拼接", label):
            found.read["step"] += 1
            moved = re.search(r"转置|轉置|transpos", label)
            if math.prod(shape) != math.prod(last[1]) or (moved and sorted(shape) != sorted(last[1])):
                said = tr("{label}: {shape} cannot come from {before}: {count:,} numbers instead of {others:,}",
                    label=match[1].strip(), shape=str(shape), before=str(last[1]), count=math.prod(shape),
                    others=math.prod(last[1]),
                )  # fmt: skip
                found.findings.append((line, said))
                shape = last[1]  # what follows is held against the last shape that is right
        last = (line, shape)


def _value(number: str) -> float:
    power = {"²": 2, "³": 3}.get(number[-1], 1)
    return float(number.rstrip("²³").replace(",", "")) ** power


def _sums(text: str, found: Audit) -> None:
    """Calculations with numbers only: to the digits that the text has, within 2 % after ≈."""
    for match in _SUM.finditer(text):
        numbers, signs = re.findall(_NUMBER, match[1]), re.findall(r"[×*/÷+]", match[1])
        code = "".join(f"{_value(one)!r}{sign}" for one, sign in zip(numbers, [*signs, ""], strict=True))
        value = _calculated(code.replace("×", "*").replace("÷", "/"))
        if value is None or match[5]:  # or the calculation goes on behind its number
            found.unread["sum"] += 1
            continue
        found.read["sum"] += 1
        if not _as_stated(value, match[3].rstrip(","), match[4] or "", about=match[2] == "≈"):
            stated = " ".join(match[0].split())
            said = tr("{stated}: it is {value:,.10g}", stated=stated, value=value)
            found.findings.append((_line(text, match.start()), said))


def _as_stated(value: float, number: str, unit: str, *, about: bool) -> bool:
    """Whether a value is the stated number, rounded or cut off at its last digit; exact for whole numbers."""
    decimals = len(number.partition(".")[2].rstrip("²³"))
    about = about or (value != int(value) and not decimals and not unit)
    for factor in _UNITS.get(unit) or _UNITS[unit[0].upper()] if unit else (1,):
        off, digit = value - _value(number) * factor, factor / 10**decimals
        near = 0.02 * abs(value) if about else 0.0
        if decimals or unit:
            near = max(near, digit / 2, digit * (decimals > 0 and off > 0))
        if abs(off) <= near + 1e-9 * abs(value):
            return True
    return False


def _calculated(code: str) -> float | None:
    """The value of a calculation with numbers, + , * and /."""
    total = 0.0
    for term in code.split("+"):
        factors = re.split(r"([*/])", term)
        value = float(factors[0])
        for sign, factor in zip(factors[1::2], factors[2::2], strict=True):
            if sign == "/" and not float(factor):
                return None
            value = value * float(factor) if sign == "*" else value / float(factor)
        total += value
    return total


def _tables(text: str, found: Audit) -> None:
    """Markdown tables with the width, the heads and the width of a head, where the text says how they belong together.

    There are models whose heads have another width, so that a table alone says nothing.
    """
    ruled = _RULE.search(text) is not None
    columns: list[int] | None = None
    for number, row in enumerate(text.split("\n"), 1):
        cells = [cell.strip(" `*$").lower() for cell in row.strip().strip("|").split("|")]
        if not row.strip().startswith("|"):
            columns = None
        elif columns is None:
            at = [next((i for i, cell in enumerate(cells) if re.fullmatch(one, cell)), -1) for one in _COLUMNS]
            columns = at if -1 not in at else []
        elif columns and len(cells) > max(columns) and not set(row) <= set("|-: "):
            values = [cells[at].replace(",", "") for at in columns]
            if not ruled or not all(value.isdigit() for value in values):
                found.unread["table"] += 1
                continue
            found.read["table"] += 1
            d, h, d_k = map(int, values)
            if d != h * d_k:
                said = tr("{name}: {h} heads of {d_k} are {product:,}, and the width is {d:,}", name=cells[0], h=h,
                    d_k=d_k, product=h * d_k, d=d,
                )  # fmt: skip
                found.findings.append((number, said))
