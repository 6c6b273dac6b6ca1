"""What the code of a topic prints: Python in this process, a command in one of its own."""

import contextlib
import hashlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from typing import Any

from headwise.base.run import seeded
from headwise.errors import ConfigError
from headwise.textbook.guide.topic import Topic

COLUMNS = 100


def output(topic: Topic, lang: str, *, columns: int = COLUMNS) -> str:
    """What the code of a topic prints, without spaces at the ends of lines. columns: of the terminal of a command.

    Raises:
        ConfigError: if the code fails, with its last line.
    """
    code = topic.code_in(lang)
    return tidy(_of_command(code, columns) if topic.is_command else of_python(code, topic.name))


def of_python(code: str, name: str) -> str:
    """What Python code prints. Random numbers start from the same seed each time."""
    said = io.StringIO()
    names: dict[str, Any] = {"__name__": "guide"}
    with seeded(0), contextlib.redirect_stdout(said):
        try:
            exec(compile(code, f"guide, {name}", "exec"), names)
        except Exception as error:
            raise ConfigError(f"topic {name!r}: its code fails: {type(error).__name__}: {error}") from error
    return said.getvalue()


def code_hash(code: str) -> str:
    """Identifies the code of which a page shows the output."""
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def tidy(text: str) -> str:
    """Without spaces at the ends of lines, colours, and empty lines at both ends."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "\n".join(line.rstrip() for line in plain.splitlines()).strip("\n")


def _of_command(command: str, columns: int) -> str:
    environment = {**os.environ, "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}
    words = shlex.split(command)[1:]
    with tempfile.TemporaryDirectory(prefix="headwise-guide-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "headwise", *words], capture_output=True, text=True, encoding="utf-8",
            env=environment, cwd=folder, check=False,
        )  # fmt: skip
    if done.returncode:
        raise ConfigError(f"`{command}` fails with code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout
