"""Grading: a reader's function against ours on random inputs, down to the smallest input on which they differ.

The function runs in a process of its own: calls have a time limit, and its end leaves nothing running.
"""

import inspect
import io
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import headwise
from headwise.wording import Bilingual, Message, in_language, joined, tr
from headwise_textbook.exercises import child
from headwise_textbook.exercises.child import decoded, encoded
from headwise_textbook.exercises.exercise import Draw, Exercise

CASES = 40  # random inputs
ATTEMPTS = 60  # smaller inputs that are tried after a failure
PRINTS = 300  # characters of what the code printed that are shown
LARGEST = 2**63 - 1  # the largest whole number in a tensor
PRINTED, PRINTS_READ = 1 << 20, 2000  # bytes that the code may print, and those that are read
REPLY = 256 << 20  # bytes of one value
MEMORY = 2 << 30  # bytes that the code may allocate
START_SECONDS = 180.0  # to import PyTorch on a busy machine
WALL = 4.0  # seconds of waiting for each second of CPU time, on a busy machine or in a sleep
HEADWISE = Path(headwise.__file__).parents[1]  # the folder that has it
ANSWERS = Path(__file__).parents[1]  # headwise_textbook
KEPT = ("PATH", "LANG", "LANGUAGE", "SYSTEMROOT")  # of the environment, which may hold secrets
# Parts of the messages of the other process, in which nothing else is in English.
OF_THE_OTHER = {
    r"^line (\d+): ": tr(r"line \1: "),
    "^returned a value of type (.+); expected numbers, lists or tensors": tr(
        r"returned a value of type \1; expected numbers, lists or tensors"
    ),
    "^returned a value that is nested too deeply": tr("returned a value that is nested too deeply"),
    "^returned a value that is too large for the memory limit": tr(
        "returned a value that is too large for the memory limit"
    ),
}


@dataclass(frozen=True)
class Counterexample:
    """An input on which the functions differ."""

    arguments: tuple[tuple[str, str], ...]  # names and values
    ours: str
    theirs: str | None  # None where the function raised
    why: Message  # where the values differ, or the error
    printed: str = ""  # the beginning of what the code printed on this input


@dataclass(frozen=True)
class Grade:
    """The result of an exercise."""

    cases: int  # inputs on which the functions agree
    counterexample: Counterexample | None = None  # the smallest input found on which they do not
    stopped: Message | None = None  # why the code was ended, or could not begin
    printed: str = ""  # the beginning of what it printed on the counterexample, or on the input on which it was ended
    together: str = ""  # why the code was not apart from files, network and other processes; "" if it was

    @property
    def passed(self) -> bool:
        """Whether all values agree."""
        return self.counterexample is None and self.stopped is None


def grade(
    exercise: Exercise, source: str, *, file: str = "answer.py", seconds: float = 10.0, memory: int = MEMORY,
    seed: int = 0,
) -> Grade:  # fmt: skip
    """Run the function of an exercise in a process of its own, and compare it with ours.

    source: Python code that defines the function under the name of ours. file: its name in messages. seconds: of CPU
    time in all. memory: bytes that the code may allocate. seed: of the inputs.
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
        stopped: Message | None = end.message
    except Raised as error:  # while the file was read
        stopped = raised(str(error))
    else:
        stopped = None
    return Grade(done, None, stopped, *(("", "") if sandbox is None else (sandbox.printed, sandbox.together)))


def _tried(exercise: Exercise, sandbox: "Sandbox", draw: Draw) -> Counterexample | None:
    args = exercise.inputs(draw)
    ours = exercise.ours(*args)
    names = list(inspect.signature(exercise.ours).parameters)
    shown = tuple((name, described(value)) for name, value in zip(names, args, strict=True))
    try:
        theirs: Any = sandbox(*args)
    except Raised as error:
        return Counterexample(shown, described(ours), None, raised(str(error)), sandbox.printed)
    why = difference(theirs, ours, exercise.tolerance)
    return None if why is None else Counterexample(shown, described(ours), described(theirs), why, sandbox.printed)


def _smaller(exercise: Exercise, sandbox: "Sandbox", seed: int, draw: Draw, found: Counterexample) -> Counterexample:
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


def raised(error: str) -> Message:
    """The error of the other process, in both languages."""
    chinese = error
    for english, words in OF_THE_OTHER.items():
        chinese = re.sub(english, in_language(words, "zh"), chinese)
    return joined([Bilingual(error, chinese)])


def lines(result: Grade, exercise: Exercise) -> list[Bilingual]:
    """The result as lines of text; the first one says whether the exercise is solved."""
    name, case, out = exercise.name, result.counterexample, list[Bilingual]()
    if result.stopped is not None:
        out.append(tr("✗ {name}: {stopped}", name=name, stopped=result.stopped))
    elif case is not None:
        out += [
            tr("✗ {name}: {why}", name=name, why=case.why),
            tr("  the smallest input found:"),
            *(Bilingual(*(f"    {argument} = {value}",) * 2) for argument, value in case.arguments),
        ]
        if case.theirs is not None:
            out.append(tr("  yours: {theirs}", theirs=case.theirs))
        out.append(tr("  ours:  {ours}", ours=case.ours))
    else:
        out.append(tr("✓ {name}: agrees with ours on {cases} random inputs", name=name, cases=result.cases))
    said = " ".join(result.printed[:PRINTS].split())
    if said and not result.passed:  # it may help to find out why
        more = "…" if len(result.printed) > PRINTS else ""
        out.append(tr("  it printed: {said}{more}", said=said, more=more))
    if why := result.together:
        out.append(
            tr("  the code was limited in time and memory, but not kept from your files and network: {why}", why=why)
        )
    return out


# Whether a reader's value is ours: shapes, numbers within a tolerance, and where they first differ.


def difference(theirs: Any, ours: Any, tolerance: float) -> Message | None:
    """None if the values agree, otherwise where they differ first; lists, tuples and tensors are not told apart."""
    if isinstance(ours, tuple | list):
        return _listed(theirs, ours, tolerance)
    if isinstance(ours, str) or ours is None:
        return None if theirs == ours and type(theirs) is type(ours) else _kind(theirs, ours)
    mine, other = _tensor(ours), _tensor(theirs)
    if mine is None or other is None:
        return _kind(theirs, ours)
    if mine.shape != other.shape:
        return tr("the shape is {theirs}, expected {ours}",
            theirs=str(list(other.shape)), ours=str(list(mine.shape)),
        )  # fmt: skip
    exact = all(not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool) for x in (mine, other))
    near = 0.0 if exact else tolerance
    wrong = ~torch.isclose(_wide(other), _wide(mine), rtol=near, atol=near, equal_nan=True)
    if not wrong.any():
        return None
    at = wrong.nonzero()[0].tolist()
    return tr("{count} of {all} numbers differ, first at {at}: {theirs}, expected {ours}",
        count=int(wrong.sum()), all=wrong.numel(), at=str(at), theirs=described(other[tuple(at)].item()),
        ours=described(mine[tuple(at)].item()),
    )  # fmt: skip


def _listed(theirs: Any, ours: Any, tolerance: float) -> Message | None:
    if isinstance(theirs, Tensor) and theirs.ndim:
        theirs = list(theirs)
    if not isinstance(theirs, tuple | list):
        return _kind(theirs, ours)
    if len(theirs) != len(ours):
        return tr("{theirs} values, expected {ours}",
            theirs=len(theirs), ours=len(ours),
        )  # fmt: skip
    for place, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if found := difference(one, other, tolerance):
            return tr("value {place}: {found}", place=place, found=found)
    return None


def _kind(theirs: Any, ours: Any) -> Message:
    return tr("{theirs}, expected {ours}", theirs=described(theirs),
        ours=described(ours),
    )  # fmt: skip


def described(value: Any) -> str:
    """A value in a line: small tensors with their numbers, large ones with their shape."""
    if isinstance(value, Tensor):
        shape = "×".join(map(str, value.shape)) or "scalar"
        if value.numel() <= 24:
            return f"[{shape}] {_rounded(value.tolist())}" if value.ndim else _rounded(value.tolist())
        return f"[{shape}] {_rounded(value.flatten()[:4].tolist())[:-1]}, …]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    return _rounded(value)


def _rounded(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_rounded, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, int) and abs(value) > LARGEST:
        return torch.tensor(math.copysign(math.inf, value))
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if isinstance(value, tuple | list):
        parts = [_tensor(one) for one in value]
        known = [one for one in parts if one is not None]
        if not parts:
            return torch.empty(0)
        if len(known) == len(parts) and len({one.shape for one in known}) == 1:
            return torch.stack(known if len({one.dtype for one in known}) == 1 else list(map(_wide, known)))
    return None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


class Stopped(Exception):
    """The process has ended, or was ended, before it returned a value; `message` says why."""

    def __init__(self, message: Message) -> None:
        super().__init__(str(message))
        self.message = message


class Raised(Exception):
    """The function raised; the text names the line, the type and the message."""


class Sandbox:
    """A process that has read the code and calls its function, `with Sandbox(source, "answer.py", "f") as f: f(x, 2)`.

    beside: code that runs after the file, in names of its own, and has the function instead of the file.
    Raised: if the code or the function raises. Stopped: if the process ends, prints too much or takes too long.
    """

    def __init__(
        self, source: str, file: str, function: str, *, seconds: float = 10.0, memory: int = MEMORY, beside: str = ""
    ) -> None:
        self._seconds, self._until, self._before = seconds, 0.0, 0
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._folder = tempfile.mkdtemp(prefix="headwise-check-")
        with open(f"{self._folder}/printed", "wb") as prints:  # the process writes it, and it is read meanwhile
            self._prints: IO[bytes] = open(prints.name, "rb")  # noqa: SIM115
            self._process = _started(self._folder, prints)
        self._reading = threading.Thread(target=self._read_replies, args=(self._process.stdout,), daemon=True)
        self._reading.start()
        try:
            self._write({"source": source, "file": file, "function": function, "seconds": seconds, "memory": memory,
                         "beside": beside})  # fmt: skip
            # Why the process is not apart from files, network and other processes; "" if it is.
            self.together: str = self._reply(START_SECONDS)["apart"]
            self._until = time.monotonic() + seconds * WALL
            begun = self._reply(self._left())
            if "defined" in begun:
                raise Stopped(
                    tr("{file} defines no function {name}; it defines: {defined}",
                        file=file, name=function, defined=", ".join(begun["defined"]) or "-",
                    )
                )  # fmt: skip
            if begun.get("error"):
                raise Raised(begun["error"])
        except BaseException:
            self.close()
            raise

    def __call__(self, *args: Any) -> Any:
        """The value of the function."""
        return self.call(None, *args)

    def call(self, name: str | None, *args: Any) -> Any:
        """The value of a function of the code that runs beside the file; None is the one of the sandbox."""
        self._write(encoded((name, args)))
        reply = self._reply(self._left())
        if "error" in reply:
            raise Raised(reply["error"])
        try:
            return decoded(reply["value"])
        except RecursionError:
            raise Raised(child.TOO_DEEP) from None
        except (KeyError, ValueError, TypeError):
            raise _stopped(tr("wrote to the channel of its results")) from None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def printed(self) -> str:
        """The beginning of what the code printed in the last call, or while it was read."""
        self._prints.seek(self._before)
        return self._prints.read(PRINTS_READ).decode("utf-8", "replace")

    def close(self) -> None:
        """End the process and all that it may have started, and remove its folder."""
        self._process.terminate()  # `apart` ends the others with it
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reading.join(5.0)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        with self._prints as prints:
            prints.seek(self._before)
            self._prints, self._before = io.BytesIO(prints.read(PRINTS_READ)), 0
        shutil.rmtree(self._folder, ignore_errors=True)

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _write(self, value: Any) -> None:
        self._before = os.fstat(self._prints.fileno()).st_size
        with suppress(BrokenPipeError):  # the reply says how it ended
            self._process.stdin.write(json.dumps(value).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _reply(self, seconds: float) -> dict[str, Any]:
        """The next line of the process, as JSON."""
        until = time.monotonic() + seconds
        line: str | None = ""
        while line == "":
            with suppress(queue.Empty):
                line = self._lines.get(timeout=min(0.1, max(0.0, until - time.monotonic())))
            if os.fstat(self._prints.fileno()).st_size > PRINTED:
                raise _stopped(tr("printed more than {printed} MiB", printed=PRINTED >> 20))
            if line == "" and time.monotonic() >= until:
                raise self._ended(None)
        if line is None:
            raise self._ended(self._process.wait())
        try:
            reply = json.loads(line)
        except RecursionError:
            raise Raised(child.TOO_DEEP) from None
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise _stopped(tr("wrote to the channel of its results"))
        return reply

    def _ended(self, code: int | None) -> Stopped:
        """Why the process has ended by itself with that code, or is to be ended."""
        if code is None or code == -getattr(signal, "SIGXCPU", 0) or (code == -9 and self._left() <= 0):
            return _stopped(tr("took longer than {seconds:g} seconds", seconds=self._seconds))
        if code < 0:
            name = signal.Signals(-code).name
            return _stopped(tr("was ended by {name}", name=name))
        return _stopped(tr("ended the process with code {code}", code=code))

    def _read_replies(self, pipe: IO[bytes]) -> None:
        with suppress(ValueError, OSError):
            while line := pipe.readline(REPLY):
                self._lines.put(line.decode("utf-8", "replace"))
        self._lines.put(None)


def _started(folder: str, prints: IO[bytes]) -> "subprocess.Popen[bytes]":
    """The process, apart where the system allows it. prints: what gets its standard error."""
    homes = (sys.prefix, sys.base_prefix, str(HEADWISE), str(Path(torch.__file__).parents[1]))
    program = [sys.executable, "-c", Path(child.__file__).read_text(encoding="utf-8")]
    hidden = [str(ANSWERS)] if any(ANSWERS.is_relative_to(os.path.abspath(home)) for home in homes) else []
    task = {"folder": folder, "shown": homes, "hidden": hidden, "program": program}
    kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("LC_")}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(homes[2:]), "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONIOENCODING": "utf-8", "TMPDIR": folder, "HOME": folder}  # fmt: skip
    command = [sys.executable, "-I", "-S", str(Path(__file__).parent / "apart.py"), json.dumps(task)]
    if not hasattr(os, "fork"):
        command, environment["HEADWISE_APART"] = program, f"{sys.platform} has no namespaces"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": prints}
    return subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **pipes)  # type: ignore[call-overload]


def _stopped(how: Message) -> Stopped:
    return Stopped(tr("the code {how}", how=how))
