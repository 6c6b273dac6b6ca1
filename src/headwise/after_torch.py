"""Calls a function as soon as PyTorch is imported.

`import headwise` must not import PyTorch, which takes seconds: the command line answers `--help` and bad arguments
without it, and sets the number of threads before.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_torch(run: Callable[[], object]) -> None:
    """Call `run()` now if torch is imported, otherwise at the end of `import torch`."""
    if "torch" in sys.modules:
        run()
    else:
        sys.meta_path.insert(0, _Torch(run))


class _Torch(MetaPathFinder):
    """Finds torch as the other finders do, and extends the execution of the module by `run()`."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of torch; None for any other module, and where torch is not found."""
        if name != "torch":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_run(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.run()

        spec.loader.exec_module = execute_and_run  # type: ignore[method-assign]
        return spec
