"""The state of an unfinished sweep, on disk beside its result: a manifest with the settings and files that a resumed
run must share, and a file for each finished unit.

Each file is written whole or not at all, so a run can be killed at any time. The next run compares its settings with
the manifest, and measures the units that have no file yet.
"""

import contextlib
import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headwise.base.files import atomic_path, sweep, taken
from headwise.base.read import (
    CHECKSUM,
    Entry,
    parsed,
    read_tensors,
    reading,
    tensor_like,
    text_of,
    whole,
    word,
    write_tensors,
)
from headwise.corpus.passages import Collected, Passages
from headwise.corpus.sources import Limit, Print, Source, changed
from headwise.corpus.tally import Tally, Trouble
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.loading import LoadedModel
from headwise.wording import Bilingual, in_language

FORMAT = "headwise-measure-3"
PASSAGES = "passages"
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
        """Whether there is a sweep to resume."""
        return (self.folder / MANIFEST).is_file()

    def open(self) -> None:
        """Lock the output for this run and create the folder. Called by rank 0.

        Raises:
            ConfigError: if another run holds the lock. CheckpointError: if it cannot be written.
        """
        with self._writing():
            self._held.enter_context(taken(self.out, "out"))
            self.folder.mkdir(parents=True, exist_ok=True)
            self._opened = True

    def clean(self, restart: bool) -> None:
        """Remove temporary files of killed runs; with `restart`, everything."""
        sweep(self.folder)
        with self._writing():
            for path in self.folder.iterdir():
                if restart and path.suffix in (".safetensors", ".json"):
                    path.unlink()

    def read(self) -> dict[str, Any]:
        """The manifest. CheckpointError if it is damaged, or of another version."""
        path = self.folder / MANIFEST
        with reading(path, "manifest", way_out=Bilingual("--restart measures again", "--restart 重新测量")):
            found = Entry(parsed(text_of(path)))
            if found.word("format") != FORMAT:
                raise CheckpointError("it was written by another version of headwise", "由另一版本的 headwise 写出")
            manifest = {name: found.raw(name) for name in found if name not in ("format", CHECKSUM)}
            if found.word(CHECKSUM) != _checksum(manifest):
                raise CheckpointError(
                    "it is damaged: its contents do not match its checksum", "已损坏：内容与校验和不符"
                )
            return manifest

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest."""
        with self._writing(), atomic_path(self.folder / MANIFEST) as temporary:
            content = {"format": FORMAT, CHECKSUM: _checksum(manifest), **manifest}
            temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")

    def finished(self) -> set[int]:
        """The numbers of the finished units."""
        names = (re.fullmatch(r"unit-(\d+)\.safetensors", path.name) for path in self.folder.iterdir())
        return {int(name[1]) for name in names if name}

    def so_far(self) -> tuple[int, int] | None:
        """The numbers of finished units and of all units; None if there is no sweep."""
        return (len(self.finished()), int(self.read()["units"])) if self.exists else None

    def write(self, unit: int, found: Mapping[int, Tally], passages: Collected, how: Mapping[str, Any]) -> None:
        """Write a finished unit. how: settings that may differ between units, such as the batch size."""
        packed = bytearray(zlib.compress(passages.to_json().encode()))
        tensors, sums = {PASSAGES: torch.frombuffer(packed, dtype=torch.uint8)}, {}
        for source, tally in found.items():
            tensors[f"{source}.numbers"], tensors[f"{source}.lost"] = tally.numbers, tally.lost
            sums[source] = {
                "windows": tally.windows, "tokens": tally.tokens, "kernels": sorted(tally.kernels),
                "troubles": [asdict(trouble) for trouble in tally.troubles],
            }  # fmt: skip
        header = {"format": FORMAT, "sums": json.dumps(sums, ensure_ascii=False), "how": json.dumps(how)}
        with self._writing():
            write_tensors(self._path(unit), tensors, header)

    def tallies(self, unit: int, like: Tally) -> tuple[dict[int, Tally], dict[str, Any]]:
        """The tallies of a unit, and the settings that it was measured with. like: a tally of the same size."""
        with self._reading(unit) as (tensors, header):
            text = Entry(dict(header))
            sums = Entry(parsed(text.word("sums")), "sums")
            found = {}
            for source in sums:
                if not source.removeprefix("-").isdecimal():
                    raise CheckpointError(f"sums: {source!r} is not the number of a file")
                found[int(source)] = _tally(sums.entry(source), source, tensors, like)
            return found, Entry(parsed(text.word("how")), "how").plain()

    def passages(self, unit: int, like: Collected) -> Collected:
        """The passages of a unit. like: passages of as many heads."""
        with self._reading(unit) as (tensors, _):
            try:
                text = zlib.decompress(tensors[PASSAGES].numpy().tobytes()).decode()
            except (KeyError, zlib.error, UnicodeDecodeError):
                raise CheckpointError("its passages are missing or damaged") from None
            return Collected.from_json(text, like.most, len(like.strongest))

    def remove(self) -> None:
        """Remove the folder after the result is written."""
        # The manifest first: without it, the remains after a kill do not count as a sweep to resume.
        with contextlib.suppress(OSError):
            (self.folder / MANIFEST).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the lock; remove the folder if no sweep was begun in it."""
        if self._opened and not self.exists:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._opened = False
        self._held.close()

    def _path(self, unit: int) -> Path:
        return self.folder / f"unit-{unit:06}.safetensors"

    @contextlib.contextmanager
    def _reading(self, unit: int) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, str]]]:
        path = self._path(unit)
        again = "the same command measures this unit again"
        with reading(path, "finished unit", missing=again, way_out=f"remove it, and {again}"):
            yield read_tensors(path, FORMAT)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError) as error:
            why = error.strerror or error if isinstance(error, OSError) else error
            done = len(self.finished()) if self.folder.is_dir() else 0
            kept = f"; {done} finished units are kept there; run the same command to resume" if done else ""
            raise CheckpointError(f"{str(self.folder)!r} cannot be written: {why}{kept}") from None


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _tally(sums: Entry, source: str, tensors: Mapping[str, torch.Tensor], like: Tally) -> Tally:
    numbers = tensor_like(tensors, f"{source}.numbers", like.numbers)
    lost = tensor_like(tensors, f"{source}.lost", like.lost)
    troubles = [
        Trouble(
            one.word("path"), one.word("where"), one.whole("layer", least=0), tuple(one.each("heads", whole)),
            one.word("what"),
        )
        for one in sums.entries("troubles")
    ]  # fmt: skip
    kernels = frozenset(sums.each("kernels", word))
    return Tally(numbers, lost, sums.whole("windows", least=0), sums.whole("tokens", least=0), troubles, kernels)


def weights_print(loaded: LoadedModel) -> str:
    """SHA-256 of all weights, with their names, dtypes and sizes."""
    digest = hashlib.sha256()
    for name, x in sorted(loaded.model.state_dict().items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        flat = x.detach().cpu().contiguous().flatten()
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def check_model(passages: Passages, loaded: LoadedModel) -> None:
    """Raise ConfigError unless passages were measured with the weights of this model."""
    if passages.model["sha256"] != weights_print(loaded):
        raise ConfigError(
            f"sweep: its passages are of {passages.model.get('name', 'another model')!r}, whose weights differ from "
            f"those of {loaded.name!r}; give the sweep of this model, or --model the model of the sweep",
            f"sweep：其中的段落属于 {passages.model.get('name', '另一个模型')!r}，"
            f"其权重与 {in_language(loaded.name, 'zh')!r} 不同；"
            f"请给出此模型的测量结果，或用 --model 给出测量时的模型",
        )


def differences(
    then: Mapping[str, Any], options: Mapping[str, Any], model: Mapping[str, Any], given: Sequence[Source]
) -> list[str]:
    """The differences between the current settings and those of the manifest, in words."""
    found = []
    if then["model"]["sha256"] != model["sha256"]:
        names = {one["name"] for one in (then["model"], model)}
        found.append(f"the model: {' and '.join(sorted(names))} differ in weights or sizes")
    for name, value in options.items():
        if then["options"].get(name) != value:
            found.append(f"--{name.replace('_', '-')}: it was {_word(then['options'].get(name))} and is {_word(value)}")
    for name, value in model["versions"].items():
        if then["model"]["versions"].get(name) != value:
            found.append(f"{name}: it was {then['model']['versions'].get(name)} and is {value}")
    before, now = [known["path"] for known in then["given"]], [source.path for source in given]
    found += [f"{path!r} is new" for path in now if path not in before]
    found += [f"{path!r} is not among the files" for path in before if path not in now]
    if not found and before != now:
        found.append("the files are in another order")
    return found


def changes(then: Mapping[str, Any]) -> list[str]:
    """The files that have changed since they were checked, in words."""
    prints = [(Print(**known), upto) for known, upto in zip(then["files"], then["checked"], strict=True)]
    return [change for known, upto in prints if (change := changed(known, upto)) is not None]


def refuse(out: str, found: Sequence[str], *, finished: bool = False) -> ConfigError:
    """The error for an unfinished or finished sweep with other settings."""
    shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
    if finished:
        return ConfigError(
            f"{out!r} already exists, with different settings: {shown}. Give another --out, or --restart to "
            "measure again"
        )
    return ConfigError(
        f"{out!r} contains a run with different settings: {shown}. Use the same settings, another --out, or "
        "--restart to measure again"
    )


def limit_of(then: Mapping[str, Any]) -> Limit | None:
    """The limit of the corpus in the manifest."""
    return None if then["limit"] is None else Limit(**then["limit"])


def sources_of(then: Mapping[str, Any]) -> list[Source]:
    """The files in the manifest."""
    return [Source(**{**one, "groups": tuple(one["groups"])}) for one in then["given"]]


def manifest_of(
    options: Mapping[str, Any], model: Mapping[str, Any], given: Sequence[Source], prints: Sequence[Print],
    checked: Sequence[int], step: int, limit: Limit | None,
    count: int,
) -> dict[str, Any]:  # fmt: skip
    """The manifest. checked: the bytes that were checked of each measured file. count: of units."""
    return {
        "options": dict(options), "model": dict(model), "given": [asdict(source) for source in given],
        "files": [one.to_dict() for one in prints], "checked": list(checked), "step": step,
        "units": count,
        "limit": None if limit is None else asdict(limit),
    }  # fmt: skip


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "not given" if value is None else str(value)
