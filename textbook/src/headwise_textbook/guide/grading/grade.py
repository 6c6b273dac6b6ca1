"""Grading: a reader's function against ours on random inputs, down to the smallest input on which they differ."""

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.wording import Bilingual, Message
from headwise_textbook.guide.grading.compare import described, difference
from headwise_textbook.guide.grading.draw import Draw
from headwise_textbook.guide.grading.process import MEMORY, Raised, Sandbox, Stopped

if TYPE_CHECKING:
    from headwise_textbook.guide.exercises import Exercise

CASES = 40  # random inputs
ATTEMPTS = 60  # smaller inputs that are tried after a failure
# Parts of the messages of the other process, in which nothing else is in English.
IN_CHINESE = {
    r"^line (\d+): ": r"第 \1 行：",
    "^returned a value of type (.+); expected numbers, lists or tensors": r"返回值的类型是 \1；应为数、列表或张量",
    "^returned a value that is nested too deeply": "返回值嵌套过深",
    "^returned a value that is too large for the memory limit": "返回值太大，超出内存限制",
}
PRINTS = 300  # characters of what the code printed that are shown


@dataclass(frozen=True)
class Counterexample:
    """An input on which the functions differ.

    Attributes:
        arguments: each argument's name and value. ours, theirs: values; theirs is None where the function raised.
        why: where the values differ, or the error. printed: the beginning of what the code printed on this input.
    """

    arguments: tuple[tuple[str, str], ...]
    ours: str
    theirs: str | None
    why: Message
    printed: str = ""


@dataclass(frozen=True)
class Grade:
    """The result of an exercise.

    Attributes:
        cases: inputs on which the functions agree. counterexample: the smallest input found on which they do not.
        stopped: why the code was ended, or could not begin.
        printed: the beginning of what it printed on the counterexample, or on the input on which it was ended.
        together: why the code was not apart from files, network and other processes; "" if it was.
    """

    cases: int
    counterexample: Counterexample | None = None
    stopped: Message | None = None
    printed: str = ""
    together: str = ""

    @property
    def passed(self) -> bool:
        """Whether all values agree."""
        return self.counterexample is None and self.stopped is None


def grade(
    exercise: "Exercise", source: str, *, file: str = "answer.py", seconds: float = 10.0, memory: int = MEMORY,
    seed: int = 0,
) -> Grade:  # fmt: skip
    """Run the function of an exercise in a process of its own, and compare it with ours.

    Args:
        source: Python code that defines the function under the name of ours. file: its name in messages.
        seconds: of CPU time in all. memory: bytes that the code may allocate. seed: of the inputs.
    """
    sandbox, done = None, 0
    try:
        with Sandbox(source, file, exercise.function, seconds=seconds, memory=memory) as sandbox:
            for case in range(CASES):
                draw = Draw(seed * CASES + case)
                found = _tried(exercise, sandbox, draw)
                if found is not None:
                    smallest = _smaller(exercise, sandbox, seed * CASES + case, draw, found)
                    return Grade(done, smallest, None, smallest.printed, sandbox.together)
                done += 1
    except Stopped as end:
        return Grade(done, None, end.message, *_left(sandbox))
    except Raised as error:  # while the file was read
        return Grade(done, None, _raised(str(error)), *_left(sandbox))
    return Grade(done, None, None, sandbox.printed, sandbox.together)


def _left(sandbox: Sandbox | None) -> tuple[str, str]:
    return ("", "") if sandbox is None else (sandbox.printed, sandbox.together)


def _tried(exercise: "Exercise", sandbox: Sandbox, draw: Draw) -> Counterexample | None:
    args = exercise.inputs(draw)
    ours = exercise.ours(*args)
    names = list(inspect.signature(exercise.ours).parameters)
    shown = tuple((name, described(value)) for name, value in zip(names, args, strict=True))
    try:
        theirs: Any = sandbox(*args)
    except Raised as error:
        return Counterexample(shown, described(ours), None, _raised(str(error)), sandbox.printed)
    why = difference(theirs, ours, exercise.tolerance)
    return None if why is None else Counterexample(shown, described(ours), described(theirs), why, sandbox.printed)


def _smaller(exercise: "Exercise", sandbox: Sandbox, seed: int, draw: Draw, found: Counterexample) -> Counterexample:
    """The same failure with whole numbers and each size as small as possible, as far as the limits allow."""
    sizes, lows, whole, left = list(draw.sizes), list(draw.lows), False, ATTEMPTS
    changes = [(None, 0)] + [(at, step) for _ in range(2) for at in range(len(sizes)) for step in (-99, -2, -1, -1)]
    for at, step in changes:
        tried = list(sizes)
        if at is not None:
            if at >= len(lows) or sizes[at] <= lows[at]:
                continue
            tried[at] = max(lows[at], sizes[at] + step)
        left -= 1
        if left < 0:
            break
        new = Draw(seed, tried, whole=whole or at is None)
        try:
            smaller = _tried(exercise, sandbox, new)
        except Stopped:
            return found
        if smaller is not None:
            found, sizes, lows, whole = smaller, list(new.sizes), list(new.lows), whole or at is None
    return found


def _raised(error: str) -> Message:
    chinese = error
    for en, zh in IN_CHINESE.items():
        chinese = re.sub(en, zh, chinese)
    return Message("code-raised", "{error}", "{error}", error=Bilingual(error, chinese))


def lines(result: Grade, exercise: "Exercise") -> list[Bilingual]:
    """The result as lines of text; the first one says whether the exercise is solved."""
    return _verdict(result, exercise.name) + _prints(result) + _together(result)


def _together(result: Grade) -> list[Bilingual]:
    """That the code could reach files, network and other processes, if so."""
    if not result.together:
        return []
    return [
        Bilingual(
            f"  the code was limited in time and memory, but not kept from your files and network: {result.together}",
            f"  代码的时间和内存有限制，但未与文件和网络隔离：{result.together}",
        )
    ]


def _prints(result: Grade) -> list[Bilingual]:
    """The beginning of what the code printed, if it is wrong: it may help to find out why."""
    said = " ".join(result.printed[:PRINTS].split())
    if result.passed or not said:
        return []
    more = "…" if len(result.printed) > PRINTS else ""
    return [Bilingual(f"  it printed: {said}{more}", f"  它打印了：{said}{more}")]


def _verdict(result: Grade, name: str) -> list[Bilingual]:
    if result.passed:
        return [
            Bilingual(
                f"✓ {name}: agrees with ours on {result.cases} random inputs",
                f"✓ {name}：在 {result.cases} 组随机输入上与参考实现一致",
            )
        ]
    if result.stopped is not None:
        return [Bilingual(f"✗ {name}: {result.stopped}", f"✗ {name}：{result.stopped.zh}")]
    case = result.counterexample
    assert case is not None
    first = Bilingual(f"✗ {name}: {case.why}", f"✗ {name}：{case.why.zh}")
    inputs = [Bilingual(*(f"    {name} = {value}",) * 2) for name, value in case.arguments]
    out = [first, Bilingual("  the smallest input found:", "  找到的最小输入："), *inputs]
    if case.theirs is not None:
        out.append(Bilingual(f"  yours: {case.theirs}", f"  你的结果：{case.theirs}"))
    out.append(Bilingual(f"  ours:  {case.ours}", f"  参考结果：{case.ours}"))
    return out
