"""Parts that other packages bring: designs, measures, masks, scores, kernels, kinds of models, views.

A package names its modules under the entry point group "headwise"; importing one registers its parts:

    [project.entry-points.headwise]
    dilated = "somebodys_package.dilated"

The command line loads them. Python code imports the package, or calls `load`. Commands have a group of their own, which
`headwise.commands` describes.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from headwise.errors import ConfigError, HeadwiseError

GROUP, COMMANDS = "headwise", "headwise.commands"
_loaded: set[str] = set()


def load() -> tuple[str, ...]:
    """Import every module that an installed package names under "headwise", each once, and return the names of the
    entry points. ConfigError names the package, the module and its error."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    for entry in found:
        if entry.value not in _loaded:
            imported(entry)
            _loaded.add(entry.value)
    return tuple(entry.name for entry in found)


def commands() -> dict[str, EntryPoint]:
    """The commands that installed packages name, by name; none is imported."""
    return {entry.name: entry for entry in entry_points(group=COMMANDS)}


def imported(entry: EntryPoint) -> Any:
    """What an entry point names. ConfigError as `load`."""
    package = entry.dist.name if entry.dist else "an unnamed package"
    try:
        return entry.load()
    except HeadwiseError as error:
        raise ConfigError(f"{entry.value} of {package} does not fit headwise: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{entry.value} of {package} cannot be imported ({type(error).__name__}: {error}); "
            f"mend or uninstall {package}"
        ) from error
