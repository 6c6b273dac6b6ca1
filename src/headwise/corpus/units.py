"""An unfinished sweep on disk: its settings, which a resumed run must share, and a file for each finished unit, or for
the part of it that was last saved.

Each file is written whole or not at all, so a run can be killed at any time: the next one measures the units that have
no whole file yet. The processes agree on them at the beginning; at the end the units become a table.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from headwise.base.files import atomic_path, check_writable, sweep, taken
from headwise.base.read import CHECKSUM, Entry, parsed, reading, text_of
from headwise.base.run import Progress
from headwise.corpus.passages import Collected, Passages, passages_path, weights_print
from headwise.corpus.result import Columns, CorpusMeasures, Output, columns
from headwise.corpus.sources import (
    Advance,
    Limit,
    Print,
    Source,
    Unit,
    changed,
    check,
    find_sources,
    lines,
    piece_count,
    piece_end,
    units,
)
from headwise.corpus.tally import Tally, unit_of
from headwise.corpus.work import Measured, Options, Ranks, Work
from headwise.errors import CheckpointError, ConfigError, TextError
from headwise.wording import in_language, joined, tr

FORMAT = "headwise-measure-4"


@dataclass(frozen=True)
class Settings:
    """What the numbers of a sweep depend on; a run that resumes it has the same. given: the files, of which `files` are
    measured, with the bytes that were checked of each. step: bytes of a piece. units: their number."""

    options: Options
    model: Mapping[str, Any]
    given: Sequence[Source]
    files: Sequence[Print]
    checked: Sequence[int]
    step: int
    units: int
    limit: Limit | None

    @classmethod
    def of(cls, found: Entry) -> "Settings":
        """Read them from the manifest. CheckpointError if they are of another version."""
        known = found.plain()
        try:
            return cls(**{
                **known, "options": Options(**known["options"]), "files": [Print(**one) for one in known["files"]],
                "given": [Source(**{**one, "groups": tuple(one["groups"])}) for one in known["given"]],
                "limit": None if known["limit"] is None else Limit(**known["limit"]),
            })  # fmt: skip
        except (KeyError, TypeError):
            raise _of_another_version() from None

    @property
    def checksum(self) -> str:
        """SHA-256 of the settings."""
        return _checksum(asdict(self))


class Units:
    """The folder `OUT.partial` beside the file that the result will be written to."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out.with_name(f"{out.name}.partial")
        self._manifest = self.folder / "manifest.json"

    @property
    def begun(self) -> bool:
        """Whether there is a sweep to resume."""
        return self._manifest.is_file()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the output for the block, by the first process, and create the folder, which is removed if no sweep was
        begun in it. ConfigError if another run holds the lock; CheckpointError if it cannot be written."""
        with taken(self.out, "out"):
            with self._writing():
                self.folder.mkdir(parents=True, exist_ok=True)
            try:
                yield
            finally:
                if not self.begun:
                    shutil.rmtree(self.folder, ignore_errors=True)

    def clean(self, restart: bool) -> None:
        """Remove temporary files of killed runs; with `restart`, or without settings for the units, everything."""
        sweep(self.folder)
        if self.begun and not restart:
            return
        with self._writing():
            for path in self.folder.iterdir():
                if path.suffix in (".safetensors", ".json"):
                    path.unlink()

    def settings(self) -> Settings:
        """The settings of the sweep. CheckpointError if they are damaged, or of another version."""
        way_out = tr("--restart measures again")
        with reading(self._manifest, "manifest", way_out=way_out):
            return Settings.of(_read(self._manifest))

    def begin(self, settings: Settings) -> None:
        """Write the settings."""
        self._write(self._manifest, asdict(settings), indent=1)

    def finished(self) -> set[int]:
        """The numbers of the units that have a file."""
        names = (re.fullmatch(r"unit-(\d+)\.json", path.name) for path in self.folder.iterdir())
        return {int(name[1]) for name in names if name}

    def left(self, count: int) -> list[int]:
        """The numbers of the units, of so many, that have no whole file."""

        def is_whole(unit: int) -> bool:
            with contextlib.suppress(CheckpointError, OSError):
                _read(self._path(unit))
                return True
            return False

        there = self.finished()
        return [unit for unit in range(count) if unit not in there or not is_whole(unit)]

    def so_far(self) -> tuple[int, int] | None:
        """The numbers of finished units and of all units; None if there is no sweep."""
        return (len(self.finished()), self.settings().units) if self.begun else None

    def write(self, unit: int, found: Measured, how: Mapping[str, Any]) -> None:
        """Write a finished unit. how: settings that may differ between units, such as the batch size."""
        self._write(self._path(unit), self._content(found, how))
        with contextlib.suppress(OSError):
            self._path(unit, "part").unlink()

    def save(self, unit: int, found: Measured, how: Mapping[str, Any]) -> None:
        """Write what is measured of a unit so far, in place of what was before."""
        more = {"batches": found.batches, "places": found.places}
        self._write(self._path(unit, "part"), self._content(found, how) | more)

    def read(self, unit: int, measures: int, like: Collected) -> tuple[dict[int, Tally], Collected, dict[str, Any]]:
        """The sums of a unit, its passages, and the settings that it was measured with. like: passages of as many
        heads."""
        path = self._path(unit)
        again = "the same command measures this unit again"
        with reading(path, "finished unit", missing=again, way_out=f"remove it, and {again}"):
            return _unit(_read(path), measures, like)

    def part(self, unit: int, measures: int, like: Collected, how: Mapping[str, Any]) -> Measured | None:
        """What an ended run has saved of a unit; None if there is no whole file of it, measured with `how`."""
        with contextlib.suppress(CheckpointError, OSError):
            found = _read(self._path(unit, "part"))
            sums, passages, then = _unit(found, measures, like)
            if then == how:
                places = found.each("places", lambda each, at: [(*one[:3], one[3]) for one in each])
                return Measured(found.whole("batches", least=1), sums, passages, places)
        return None

    def remove(self) -> None:
        """Remove the folder after the result is written."""
        # The manifest first: without it, the remains after a kill do not count as a sweep to resume.
        with contextlib.suppress(OSError):
            self._manifest.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, unit: int, what: str = "unit") -> Path:
        return self.folder / f"{what}-{unit:06}.json"

    @staticmethod
    def _content(found: Measured, how: Mapping[str, Any]) -> dict[str, Any]:
        sums = {str(source): tally.to_dict() for source, tally in found.sums.items()}
        return {"sums": sums, "how": dict(how), "passages": found.passages.to_dict()}

    def _write(self, path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
        whole = {"format": FORMAT, CHECKSUM: _checksum(content), **content}
        with self._writing(), atomic_path(path) as temporary:
            temporary.write_text(json.dumps(whole, ensure_ascii=False, indent=indent), "utf-8")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError) as error:
            why = error.strerror or error if isinstance(error, OSError) else error
            done = len(self.finished()) if self.folder.is_dir() else 0
            kept = f"; {done} finished units are kept there; run the same command to resume" if done else ""
            raise CheckpointError(f"{str(self.folder)!r} cannot be written: {why}{kept}") from None


def _read(path: Path) -> Entry:
    """The content of a file of a sweep; for use in a `reading` block."""
    found = Entry(parsed(text_of(path)))
    if found.word("format") != FORMAT:
        raise _of_another_version()
    content = {name: found.raw(name) for name in found if name not in ("format", CHECKSUM)}
    if found.word(CHECKSUM) != _checksum(content):
        raise CheckpointError(tr("it is damaged: its contents do not match its checksum"))
    return Entry(content)


def _unit(found: Entry, measures: int, like: Collected) -> tuple[dict[int, Tally], Collected, dict[str, Any]]:
    heads = len(like.strongest)
    sums = {int(name): Tally.of(one, measures, heads) for name, one in found.named("sums", Entry).items()}
    return sums, Collected.of(found.entry("passages"), like.most, heads), found.entry("how").plain()


def _of_another_version() -> CheckpointError:
    return CheckpointError(tr("it was written by another version of headwise"))


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Begun:
    """A sweep that all processes have agreed on: its units in order, and the numbers of the unfinished ones."""

    work: Work
    settings: Settings
    units: Sequence[Unit]
    left: Sequence[int]


def look(files: Any, there: Units, output: Output, restart: bool) -> list[Source]:
    """Find the files, so that wrong names and an output that is there or cannot be written raise before a model is
    loaded."""
    for path in (output.path, output.about, passages_path(output.path)):
        check_writable(path, "out")
    if _finished(there, output, restart) and output.read_about() is None:
        raise _exists(output)
    return find_sources([files] if isinstance(files, str | os.PathLike) else list(files))


def begin(
    work: Work, there: Units, output: Output, restart: bool, ranks: Ranks, progress: Progress
) -> Begun | CorpusMeasures:
    """Read the settings on disk, or check the corpus and write them; or return the result, if the table exists with the
    same settings. The first process decides, the others follow."""
    model = {
        "name": work.loaded.name, "about": work.loaded.about, "sha256": weights_print(work.loaded),
        "zh": {key: in_language(getattr(work.loaded, key), "zh") for key in ("name", "about")},
        "versions": {name: metadata.version(name) for name in ("headwise", "torch")},
    }  # fmt: skip
    if ranks.first and _finished(there, output, restart):
        found = _found(work, output, model)
        ranks.publish("plan", None)
        return found
    left = None
    if ranks.first:
        settings = _decided(work, there, model, restart, progress)
    else:
        decided = ranks.wait_for("plan")
        if decided is None:
            return CorpusMeasures.of_nothing(work, output.path)
        if not there.begun or (settings := there.settings()).checksum != decided["settings"]:
            raise CheckpointError(
                f"{str(there.folder)!r} is not the folder that the first process wrote; all processes need "
                f"access to the same folder"
            )
        if settings.model["sha256"] != model["sha256"]:
            raise ConfigError(f"model: this process has different weights of {model['name']} than the first process")
        left = decided["left"]
    work = replace(work, sources=settings.given, step=settings.step, limit=settings.limit)
    every = units(work.sources, work.step, work.limit)
    if left is None:
        left = there.left(len(every))
        ranks.publish("plan", {"settings": settings.checksum, "left": left})
    return Begun(work, settings, every, left)


def finish(begun: Begun, there: Units, output: Output, progress: Progress) -> CorpusMeasures:
    """Merge the units in their order, write the table, and remove the folder."""
    work, settings = begun.work, asdict(begun.settings)
    if changed := _changes(settings):
        raise TextError(
            "the corpus changed while it was being measured: {changed}; use --restart to measure again",
            changed=joined(changed, tr("; ")),
        )
    sums, hows, collected = work.nothing(), [], work.no_passages()
    for number in range(len(begun.units)):
        progress("merging", number, len(begun.units))
        found, passages, how = there.read(number, len(work.options.measures), collected)
        for tally in found.values():
            sums.add(tally)
        hows += [how] if how not in hows else []
        collected.add(passages)
    if not sums.windows:
        there.remove()
        raise TextError(tr("the corpus is empty: the model's tokenizer produced no tokens from its files"))
    about = {
        "model": settings["model"], "options": settings["options"], "how": hows, "kernels": sorted(sums.kernels),
        "files": settings["files"], "windows": sums.windows, "tokens": sums.tokens, "units": len(begun.units),
        "troubles": [str(trouble) for trouble in sums.troubles], "sums": sums.to_dict(),
        "given": [{"path": one["path"]} for one in settings["given"]], "checked": settings["checked"],
    }  # fmt: skip
    kept, by = Passages.nothing(work.options.strongest_by), work.options.strongest_by
    if work.options.passages:
        model = {name: str(settings["model"][name]) for name in ("name", "sha256")}
        kept = collected.of_heads(work.heads, by, unit_of(by), model)
    about["passages"] = output.write_passages(kept)
    result = CorpusMeasures.of(work, output.path, sums, kept, about)
    parts = iter([result.columns()]) if work.options.per == "all" else _by_file(begun, there, result)
    output.write(parts, about)
    there.remove()
    return result


def _finished(there: Units, output: Output, restart: bool) -> bool:
    """Whether there is a finished table and no newer sweep."""
    return output.path.exists() and not there.begun and not restart


def _exists(output: Output) -> ConfigError:
    return ConfigError(
        "{path!r} already exists; give another --out, or --restart to measure again", path=str(output.path)
    )


def _found(work: Work, output: Output, model: Mapping[str, Any]) -> CorpusMeasures:
    """The result of a finished table; ConfigError if it has other settings."""
    about, by = output.read_about(), work.options.strongest_by
    try:
        if about is None:
            raise KeyError
        if not (differ := _differences(about, work, model) or _changes(about)):
            sums = Tally.of(Entry(about["sums"]), len(work.options.measures), len(work.heads))
            passages = output.read_passages(about["passages"]) if work.options.passages else Passages.nothing(by)
    except (KeyError, TypeError, ValueError):
        raise _exists(output) from None
    if differ:
        raise _refused(output.path, differ, finished=True)
    return CorpusMeasures.of(work, output.path, sums, passages, about, new=False)


def _by_file(begun: Begun, there: Units, result: CorpusMeasures) -> Iterator[Columns]:
    """The table of each file, one at a time in memory; a file can be in several units."""
    work, place, current = begun.work, 0, begun.work.nothing()
    for number in range(len(begun.units)):
        for source, tally in there.read(number, len(work.options.measures), work.no_passages())[0].items():
            if source != place and current.windows:
                yield columns(current, result.heads, result.measures, work.sources[place].path)
                current = work.nothing()
            place = source
            current.add(tally)
    yield columns(current, result.heads, result.measures, work.sources[place].path)


def _decided(work: Work, there: Units, model: Mapping[str, Any], restart: bool, progress: Progress) -> Settings:
    """The settings on disk; without any, those of this run, after its files have been checked and they are written."""
    there.clean(restart)
    if there.begun:
        then = there.settings()
        if found := _differences(asdict(then), work, model) or _changes(asdict(then)):
            raise _refused(there.out, found)
        return then
    of, done = sum(source.size for source in work.sources), 0

    def read(more: int) -> None:
        nonlocal done
        done += more
        progress("checking the files", done, of)

    prints, checked, limit = _survey(work, read)
    count = len(units(work.sources, work.step, limit))
    there.begin(Settings(work.options, model, work.sources, prints, checked, work.step, count, limit))
    return there.settings()


def _survey(work: Work, advance: Advance) -> tuple[list[Print], list[int], Limit | None]:
    """The prints of the measured files, the bytes that were checked of each, and the limit. TextError naming the file
    and the place that cannot be read."""
    limit = None if work.options.max_tokens is None else _limit(work, work.options.max_tokens)
    sources = work.sources if limit is None else work.sources[: limit.source + 1]
    prints, checked = [], []
    for i, source in enumerate(sources):
        upto = source.size
        if limit is not None and i == limit.source:
            upto = piece_end(source, limit.piece, work.step)
        prints.append(check(source, work.options.field, upto, advance))
        if source.kind == "jsonl":
            for _ in lines(source, 0, upto, work.options.field):
                pass  # it raises for errors in them
        checked.append(upto)
    return prints, checked, limit


def _limit(work: Work, max_tokens: int) -> Limit | None:
    """The place at which the corpus reaches `max_tokens`; None if it has fewer."""
    left = max_tokens
    for i, source in enumerate(work.sources):
        for piece in range(piece_count(source, work.step)):
            there = 0
            for _, ids, *_ in work.texts(i, piece):
                there += len(ids)
                if there >= left:
                    return Limit(i, piece, left)
            left -= there
    return None


def _differences(then: Mapping[str, Any], work: Work, model: Mapping[str, Any]) -> list[str]:
    """The differences between the settings of this run and those of an earlier one, or of a table, in words."""

    def named(value: Any) -> str:
        if isinstance(value, list):
            return ",".join(map(str, value))
        return "not given" if value is None else str(value)

    found = []
    if then["model"]["sha256"] != model["sha256"]:
        names = {one["name"] for one in (then["model"], model)}
        found.append(f"the model: {' and '.join(sorted(names))} differ in weights or sizes")
    for name, value in asdict(work.options).items():
        if (before := then["options"].get(name)) != value:
            found.append(f"--{name.replace('_', '-')}: it was {named(before)} and is {named(value)}")
    for name, value in model["versions"].items():
        if then["model"]["versions"].get(name) != value:
            found.append(f"{name}: it was {then['model']['versions'].get(name)} and is {value}")
    old, now = [known["path"] for known in then["given"]], [source.path for source in work.sources]
    found += [f"{path!r} is new" for path in now if path not in old]
    found += [f"{path!r} is not among the files" for path in old if path not in now]
    if not found and old != now:
        found.append("the files are in another order")
    return found


def _changes(then: Mapping[str, Any]) -> list[str]:
    """The files that have changed since they were checked, in words."""
    prints = [(Print(**known), upto) for known, upto in zip(then["files"], then["checked"], strict=True)]
    return [change for known, upto in prints if (change := changed(known, upto)) is not None]


def _refused(out: Path, found: Sequence[str], *, finished: bool = False) -> ConfigError:
    """The error for an unfinished or finished sweep with other settings."""
    shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
    if finished:
        return ConfigError(
            f"{str(out)!r} already exists, with different settings: {shown}. Give another --out, or --restart to "
            "measure again"
        )
    return ConfigError(
        f"{str(out)!r} contains a run with different settings: {shown}. Use the same settings, another --out, or "
        "--restart to measure again"
    )
