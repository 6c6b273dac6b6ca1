"""What a sweep has done so far, on the disk beside its result: a manifest, and a file for each finished unit.

Each file is written whole or not at all, so a run may be killed at any time. The next one reads the manifest, sees
that it measures the same, and measures the units that have no file yet.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headwise.errors import CheckpointError
from headwise.files import atomic_path, sweep
from headwise.outputs import taken
from headwise.sweep.tally import Tally, Trouble

FORMAT = "headwise-measure-1"
MANIFEST = "manifest.json"


class Journal:
    """The folder `OUT.partial`.

    Args:
        out: the file that the result will be written to.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out.with_name(f"{out.name}.partial")
        self._held = contextlib.ExitStack()
        self._opened = False

    @property
    def exists(self) -> bool:
        """Whether there is something to go on from."""
        return (self.folder / MANIFEST).is_file()

    def open(self) -> None:
        """Take the output for this run, and make the folder. By rank 0.

        Raises:
            ConfigError: if another run has it. CheckpointError: if it cannot be written.
        """
        with self._writing():
            self._held.enter_context(taken(self.out, "out"))
            self.folder.mkdir(parents=True, exist_ok=True)
            self._opened = True

    def clean(self, restart: bool) -> None:
        """Remove what killed runs left half written; with `restart`, all that there is."""
        sweep(self.folder)
        with self._writing():
            for path in self.folder.iterdir():
                if restart and path.suffix in (".safetensors", ".json"):
                    path.unlink()

    def read(self) -> dict[str, Any]:
        """The manifest."""
        path = self.folder / MANIFEST
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{str(path)!r} cannot be read ({error}); --restart measures anew") from None
        if found.get("format") != FORMAT:
            raise CheckpointError(f"{str(path)!r} is not of this version of headwise; --restart measures anew")
        return found

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest."""
        with self._writing(), atomic_path(self.folder / MANIFEST) as temporary:
            temporary.write_text(json.dumps({"format": FORMAT, **manifest}, ensure_ascii=False, indent=1), "utf-8")

    def finished(self) -> set[int]:
        """The numbers of the units that are there."""
        names = (re.fullmatch(r"unit-(\d+)\.safetensors", path.name) for path in self.folder.iterdir())
        return {int(name[1]) for name in names if name}

    def so_far(self) -> tuple[int, int] | None:
        """How many units are done, of how many; None if nothing was begun."""
        return (len(self.finished()), int(self.read()["units"])) if self.exists else None

    def write(self, unit: int, found: Mapping[int, Tally], how: Mapping[str, Any]) -> None:
        """A finished unit. how: what may differ between units without making them wrong, such as the batch size."""
        tensors, sums = {}, {}
        for source, tally in found.items():
            tensors[f"{source}.numbers"], tensors[f"{source}.lost"] = tally.numbers, tally.lost
            sums[source] = {
                "windows": tally.windows, "tokens": tally.tokens, "kernels": sorted(tally.kernels),
                "troubles": [asdict(trouble) for trouble in tally.troubles],
            }  # fmt: skip
        header = {"format": FORMAT, "sums": json.dumps(sums, ensure_ascii=False), "how": json.dumps(how)}
        with self._writing(), atomic_path(self._path(unit)) as temporary:
            save_file({name: x.contiguous() for name, x in tensors.items()}, temporary, metadata=header)

    def tallies(self, unit: int) -> tuple[dict[int, Tally], dict[str, Any]]:
        """What a unit gave, and how it was measured."""
        path = self._path(unit)
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            sums = json.loads(header["sums"])
            return {int(source): _tally(source, sums[source], tensors) for source in sums}, json.loads(header["how"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{str(path)!r} cannot be read ({error}); remove it, and the same command measures this unit again"
            ) from None

    def remove(self) -> None:
        """The result is written: the folder has done its work."""
        # Without a manifest, what a kill leaves of the folder is taken for nothing that was begun.
        with contextlib.suppress(OSError):
            (self.folder / MANIFEST).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let other runs have the folder; it goes if nothing was begun in it."""
        if self._opened and not self.exists:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._opened = False
        self._held.close()

    def _path(self, unit: int) -> Path:
        return self.folder / f"unit-{unit:06}.safetensors"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or error
            done = len(self.finished()) if self.folder.is_dir() else 0
            kept = f"; {done} finished units are safe there, and the same command goes on" if done else ""
            raise CheckpointError(f"{str(self.folder)!r} cannot be written: {why}{kept}") from None


def _tally(source: str, sums: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Tally:
    troubles = [Trouble(**{**one, "heads": tuple(one["heads"])}) for one in sums["troubles"]]
    numbers, lost = tensors[f"{source}.numbers"], tensors[f"{source}.lost"]
    return Tally(numbers, lost, sums["windows"], sums["tokens"], troubles, frozenset(sums["kernels"]))
