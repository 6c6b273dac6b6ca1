"""A reader's function in a process of its own: calls with a time limit, and an end that leaves nothing running."""

import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

import headwise
from headwise.wording import Message
from headwise_textbook.guide.grading import child
from headwise_textbook.guide.grading.child import decoded, encoded

PRINTED = 1 << 20  # bytes that the code may print
REPLY = 256 << 20  # bytes of one value
MEMORY = 2 << 30  # bytes that the code may allocate
START_SECONDS = 180.0  # to import PyTorch on a busy machine
PRINTS_SECONDS = 1.0  # of waiting for what the code has printed
HEADWISE = Path(headwise.__file__).parents[1]  # the folder that has it
ANSWERS = Path(__file__).parents[2]  # headwise_textbook
KEPT = ("PATH", "LANG", "LANGUAGE", "SYSTEMROOT")  # of the environment, which may hold secrets
WALL = 4.0  # seconds of waiting for each second of CPU time, on a busy machine or in a sleep


class Stopped(Exception):
    """The process has ended, or was ended, before it returned a value; `message` says why."""

    def __init__(self, message: Message) -> None:
        super().__init__(str(message))
        self.message = message


class Raised(Exception):
    """The function raised; the text names the line, the type and the message."""


class Sandbox:
    """A process that has read the code and calls its function.

    with Sandbox(source, "answer.py", "split_heads", seconds=10) as sandbox:
        value = sandbox(x, 2)

    Args:
        source: the code. file: its name, in messages. function: the name of the function. seconds: of CPU time in all.
    Attributes:
        together: why the process is not apart from files, network and other processes; "" if it is.
        printed: the beginning of what the code printed in the last call, or while it was read.
    Raises:
        Raised: if the code or the function raises. Stopped: if the process ends, prints too much or takes too long.
    """

    def __init__(self, source: str, file: str, function: str, *, seconds: float = 10.0, memory: int = MEMORY) -> None:
        self._seconds, self._until = seconds, 0.0
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._printed, self._flooded = bytearray(), threading.Event()
        self._waits = True
        self._mark, self._replies = secrets.token_hex(16), 0  # the process prints the mark before each reply
        self._folder = tempfile.mkdtemp(prefix="headwise-check-")
        self._process = _started(self._folder)
        threads = ((self._read_replies, self._process.stdout), (self._read_prints, self._process.stderr))
        self._threads = [threading.Thread(target=read, args=(pipe,), daemon=True) for read, pipe in threads]
        for thread in self._threads:
            thread.start()
        try:
            self._write({"source": source, "file": file, "function": function, "seconds": seconds, "memory": memory,
                         "mark": self._mark})  # fmt: skip
            self.together: str = self._reply(START_SECONDS)["apart"]
            self._until = time.monotonic() + seconds * WALL
            begun = self._reply(self._left())
            if "defined" in begun:
                raise Stopped(
                    Message(
                        "no-function",
                        "{file} defines no function {name}; it defines: {defined}",
                        "{file} 没有定义函数 {name}；其中定义了：{defined}",
                        file=file, name=function, defined=", ".join(begun["defined"]) or "-",
                    )
                )  # fmt: skip
            if begun.get("error"):
                raise Raised(begun["error"])
        except BaseException:
            self.close()
            raise

    def __call__(self, *args: Any) -> Any:
        """The value of the function. Raised, Stopped: as the class."""
        self._write(encoded(args))
        reply = self._reply(self._left())
        if "error" in reply:
            raise Raised(reply["error"])
        try:
            return decoded(reply["value"])
        except RecursionError:
            raise Raised(child.TOO_DEEP) from None
        except (KeyError, ValueError, TypeError):
            raise Stopped(_ended("wrote to the channel of its results", "向结果通道写入了内容")) from None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def printed(self) -> str:
        """The beginning of what the code printed in the last call, or while it was read."""
        mark, until = self._mark.encode(), time.monotonic() + PRINTS_SECONDS
        while self._waits and self._printed.count(mark) < self._replies and self._threads[1].is_alive():
            time.sleep(0.002)  # the reply may be here before the prints
            self._waits = time.monotonic() < until  # False where the code has closed the stream
        calls = bytes(self._printed).split(mark)
        finished = calls[self._replies - 1] if 0 < self._replies <= len(calls) else b""
        return (calls[-1] or finished)[:2000].decode("utf-8", "replace")

    def close(self) -> None:
        """End the process and all that it may have started, and remove its folder."""
        self._process.terminate()  # `apart` ends the others with it
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(5.0)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        shutil.rmtree(self._folder, ignore_errors=True)

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _write(self, value: Any) -> None:
        with suppress(BrokenPipeError):  # the reply says how it ended
            self._process.stdin.write(json.dumps(value).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _reply(self, seconds: float) -> dict[str, Any]:
        """The next line of the process, as JSON."""
        until = time.monotonic() + seconds
        while True:
            if self._flooded.is_set():
                raise Stopped(
                    _ended(f"printed more than {PRINTED >> 20} MiB", f"打印了超过 {PRINTED >> 20} MiB 的内容")
                )
            try:
                line = self._lines.get(timeout=min(0.1, max(0.0, until - time.monotonic())))
                break
            except queue.Empty:
                if time.monotonic() >= until:
                    raise Stopped(self._too_long()) from None
        if line is None:
            raise Stopped(self._end())
        self._replies += 1
        try:
            reply = json.loads(line)
        except RecursionError:
            raise Raised(child.TOO_DEEP) from None
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise Stopped(_ended("wrote to the channel of its results", "向结果通道写入了内容"))
        return reply

    def _too_long(self) -> Message:
        seconds = self._seconds
        return _ended(f"took longer than {seconds:g} seconds", f"运行超过 {seconds:g} 秒")

    def _end(self) -> Message:
        """Why the process has ended by itself."""
        code = self._process.wait()
        if code == -getattr(signal, "SIGXCPU", 0) or (code == -9 and self._left() <= 0):
            return self._too_long()
        if code < 0:
            name = signal.Signals(-code).name
            return _ended(f"was ended by {name}", f"被信号 {name} 终止")
        return _ended(f"ended the process with code {code}", f"以代码 {code} 结束了进程")

    def _read_replies(self, pipe: IO[bytes]) -> None:
        with suppress(ValueError, OSError):
            while line := pipe.readline(REPLY):
                self._lines.put(line.decode("utf-8", "replace"))
        self._lines.put(None)

    def _read_prints(self, pipe: IO[bytes]) -> None:
        with suppress(ValueError, OSError):
            while chunk := pipe.read1(1 << 16):  # type: ignore[attr-defined]
                self._printed += chunk
                if len(self._printed) > PRINTED:
                    self._flooded.set()
                    return


def _started(folder: str) -> "subprocess.Popen[bytes]":
    """The process, apart where the system allows it."""
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
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **pipes)  # type: ignore[call-overload]


def _ended(en: str, zh: str) -> Message:
    return Message("code-stopped", "the code {en}", "代码{zh}", en=en, zh=zh)
