"""What commands of other packages share with those of headwise: `--lang`, checks of files, streams, progress.

A package names a function for each of its commands under the entry point group "headwise.commands":

    [project.entry-points."headwise.commands"]
    count = "your_package.commands:count"

`headwise count` imports the module and runs the function, whose arguments typer reads; its docstring is the help.
`headwise --help` lists it without importing it. Names of headwise's own commands are taken. Chinese help is
in the catalogue of the package, `locale/zh/LC_MESSAGES/your_package.po`, under the English text.
"""

from headwise.base.files import check_writable, taken
from headwise.cli.options import Estimate, Lang, check_file, is_stream, progress_bar, read_from, stdin_text, written
from headwise.table.show import duration

__all__ = [
    "Estimate",
    "Lang",
    "check_file",
    "check_writable",
    "duration",
    "is_stream",
    "progress_bar",
    "read_from",
    "stdin_text",
    "taken",
    "written",
]
