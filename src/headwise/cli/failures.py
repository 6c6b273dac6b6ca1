"""An error as one line in the user's language: our own, those of typer, and those of the system."""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from headwise.errors import HeadwiseError, reason

# Parts of typer's messages, in the order in which they are replaced.
IN_CHINESE = {
    r"^No such option(?:: (\S+)| '([^']*)'\.?)": r"没有选项 \1\2",
    r"^No such command ('[^']*')": r"没有命令 \1",
    r"^Missing argument ": "缺少参数 ",
    r"^Missing option ": "缺少选项 ",
    r"^Missing command$": "缺少命令",
    r"^Got unexpected extra argument(?:s|\(s\))? \((.*)\)$": r"多余的参数：\1",
    r"^Option (\S+) requires an argument$": r"选项 \1 需要一个值",
    r"^Option (\S+) does not take a value$": r"选项 \1 不带值",
    r"^Invalid value for ('[^']*'): ": r"\1 的值无效：",
    r"(\S+) is not a valid int(eger)?( range)?\b": r"\1 不是整数",
    r"(\S+) is not a valid float( range)?\b": r"\1 不是数",
    r"Input should be a valid integer.*": "应为整数",
    r"Input should be a valid number.*": "应为数",
    r"Input should be greater than or equal to (\S+)": r"应不小于 \1",
    r"Input should be less than or equal to (\S+)": r"应不大于 \1",
    r"(\S+) is not in the range (\S+)": r"\1 不在范围 \2 之内",
    r",? ?\(Possible options: (.+)\)": r"；相近的有 \1",
    r"[.;,]? ?\(?Did you mean (?:one of: )?([^?]+)\?\)?": r"；是否要用 \1？",
}


def in_words(error: Exception, arguments: Sequence[str], options: Collection[str], lang: str) -> str | None:
    """The message of an error that the user can mend; None for others. arguments: of the command line. options: those
    of the command."""
    if isinstance(error, HeadwiseError):
        return _with_options(error.zh if lang == "zh" else str(error), options)
    if isinstance(error, OSError):
        return _of_system(error, arguments, lang)
    return _of_typer(error, lang) if hasattr(error, "format_message") else None


def _with_options(message: str, options: Collection[str]) -> str:
    """A way out that names an argument of Python names the command's option instead, or the one of the design."""

    def option(found: re.Match[str]) -> str:
        name = f"--{found[2].replace('_', '-')}"
        return found[1] + (name if name in options else f"--set {found[2]}=…" if "--set" in options else found[2])

    return re.sub(r"(; or give |；或给出 )(\w+)$", option, message)


def _of_typer(error: Any, lang: str) -> str:
    """An argument error of typer, of any version, in the form of our own errors."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    if lang == "zh":
        for english, chinese in IN_CHINESE.items():
            message = re.sub(english, chinese, message)
        end = "" if message.endswith("？") else "；"
        return message if context is None else f"{message}{end}{context.command_path} -h 列出全部选项"
    return message if context is None else f"{message}; {context.command_path} -h lists the options"


def _of_system(error: OSError, arguments: Sequence[str], lang: str) -> str:
    """An error of the system, such as a missing file, with the argument that names the file."""
    why = reason(error)[lang == "zh"]
    if not error.filename:
        return why
    name = str(error.filename)
    option = next((given for given, value in pairwise(arguments) if value == name), "")
    option = next((given[: -len(name) - 1] for given in arguments if given.endswith(f"={name}")), option)
    if name not in arguments and not option:
        return f"{why}: {name!r}" if lang == "en" else f"{why}：{name!r}"
    argument = option if option.startswith("-") else "FILE"
    return f"{argument} {name!r}: {why}" if lang == "en" else f"{argument} {name!r}：{why}"
