"""An unfinished sweep on disk: its settings, which a resumed run must share, and a file for each finished unit, or for
the part of it that was last saved.

Each file is written whole or not at all, so a run can be killed at any time: the next one measures the units that have
no whole file yet. The processes agree on them at the beginning; at the end the units become a table.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from headwise.base.files import atomic_path, check_writable, sweep, taken
from headwise.base.read import CHECKSUM, Entry, parsed, reading, text_of
from headwise.base.run import Progress
from headwise.corpus.passages import Collected, Passages, passages_path, weights_print
from headwise.corpus.result import Columns, CorpusMeasures, Output, columns
from headwise.corpus.select import Head
from headwise.corpus.sources import STREAM, Limit, Source, forget_listings, source_of
from headwise.corpus.tally import Node, Tally, grown, root, unit_of
from headwise.corpus.work import Measured, Options, Ranks, Work
from headwise.errors import CheckpointError, ConfigError, TextError
from headwise.wording import LIST, in_language, joined, tr

FORMAT = "headwise-measure-5"


@dataclass(frozen=True)
class Settings:
    """What the numbers of a sweep depend on; a run that resumes it has the same. files: as they were when it began.
    step: bytes of a piece. units: their number, 0 if it is not known."""

    options: Options
    model: Mapping[str, Any]
    files: Sequence[Source]
    step: int
    units: int
    limit: Limit | None

    @classmethod
    def of(cls, found: Entry) -> "Settings":
        """Read them from the manifest. CheckpointError if they are of another version."""
        known = found.plain()
        try:
            return cls(**{
                **known, "options": Options(**known["options"]), "files": [Source(**one) for one in known["files"]],
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
        """Lock the output for the block, by the first process, and create the folder, which is removed if nothing was
        measured. ConfigError if another run holds the lock; CheckpointError if it cannot be written."""
        with taken(self.out, "out"):
            with self._writing():
                self.folder.mkdir(parents=True, exist_ok=True)
            try:
                yield
            finally:
                if not (self.begun and any(self.folder.glob("*-*.json"))):
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

    def whole(self) -> dict[int, str]:
        """The numbers of the units that have a whole file, and the SHA-256 of their texts."""
        found = {}
        for unit in sorted(self.finished()):
            with contextlib.suppress(CheckpointError, OSError):
                found[unit] = _read(self._path(unit)).word("sha256")
        return found

    def drop_parts(self) -> None:
        """Remove what was saved of unfinished units."""
        for path in self.folder.glob("part-*.json"):
            path.unlink()

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

    def read(self, unit: int, measures: int, like: Collected) -> tuple[Measured, dict[str, Any]]:
        """A finished unit, and the settings that it was measured with. like: passages of as many heads."""
        path = self._path(unit)
        again = "the same command measures this unit again"
        with reading(path, "finished unit", missing=again, way_out=f"remove it, and {again}"):
            return _unit(_read(path), measures, like)

    def part(self, unit: int, measures: int, like: Collected, how: Mapping[str, Any]) -> Measured | None:
        """What an ended run has saved of a unit; None if there is no whole file of it, measured with `how`."""
        with contextlib.suppress(CheckpointError, OSError):
            found = _read(self._path(unit, "part"))
            part, then = _unit(found, measures, like)
            if then == how:
                places = found.each("places", lambda each, at: [(*one[:3], one[3]) for one in each])
                return replace(part, batches=found.whole("batches", least=1), places=places)
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
        return {"sums": sums, "how": dict(how), "passages": found.passages.to_dict(), "sha256": found.sha256}

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


def _unit(found: Entry, measures: int, like: Collected) -> tuple[Measured, dict[str, Any]]:
    heads = len(like.strongest)
    sums = {int(name): Tally.of(one, measures, heads) for name, one in found.named("sums", Entry).items()}
    passages = Collected.of(found.entry("passages"), like.most, heads)
    return Measured(0, sums, passages, [], found.word("sha256")), found.entry("how").plain()


def _of_another_version() -> CheckpointError:
    return CheckpointError(tr("it was written by another version of headwise"))


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Begun:
    """A sweep that all processes have agreed on, and the finished units, with the SHA-256 of their texts."""

    work: Work
    settings: Settings
    finished: Mapping[int, str]

    def sizes(self) -> tuple[int, int]:
        """Bytes of the units, and of the finished ones; 0 if they are not known."""
        units = [] if self.work.stream is not None else list(self.work.units())
        return sum(unit.size for unit in units), sum(unit.size for unit in units if unit.number in self.finished)


def look(there: Units, output: Output, restart: bool) -> None:
    """Raise, before a model is loaded, if the output is there or cannot be written."""
    for path in (output.path, output.about, passages_path(output.path)):
        check_writable(path, "out")
    if _finished(there, output, restart) and output.read_about() is None:
        raise _exists(output)


def begin(
    work: Work, there: Units, output: Output, restart: bool, ranks: Ranks, progress: Progress
) -> Begun | CorpusMeasures:
    """Read the settings on disk, or write them; or return the result, if the table exists with the same settings. The
    first process decides, the others follow."""
    model = {
        "name": work.loaded.name, "about": work.loaded.about, "sha256": weights_print(work.loaded),
        "zh": {key: in_language(getattr(work.loaded, key), "zh") for key in ("name", "about")},
        "versions": {name: metadata.version(name) for name in ("headwise", "torch")},
    }  # fmt: skip
    if ranks.first and _finished(there, output, restart):
        found = _found(work, output, model)
        ranks.publish("plan", None)
        return found
    if ranks.first:
        settings = _decided(work, there, model, restart, progress)
        finished = there.whole()
        ranks.publish("plan", {"settings": settings.checksum, "finished": list(finished.items())})
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
        finished = dict(decided["finished"])
    return Begun(_as_in(work, settings), settings, finished)


def finish(begun: Begun, numbers: Sequence[int], there: Units, output: Output, progress: Progress) -> CorpusMeasures:
    """Merge the units of these numbers in their order, write the table, and remove the folder."""
    work, settings = begun.work, asdict(begun.settings)
    if changed := _changes(work, there.whole):
        raise TextError(
            "the corpus changed while it was being measured: {changed}; use --restart to measure again",
            changed=joined(changed, tr("; ")),
        )
    hows, collected = [], work.no_passages()

    def leaves() -> Iterator[Node]:
        for i, number in enumerate(numbers):
            progress("merging", i, len(numbers))
            found, how = there.read(number, len(work.options.measures), collected)
            if how not in hows:
                hows.append(how)
            collected.add(found.passages)
            sums = work.nothing()
            for tally in found.sums.values():
                sums.add(tally)
            yield Node(number, number + 1, found.sha256, sums)

    nodes = grown(leaves())
    sums = root(nodes).sums if nodes else work.nothing()
    if not sums.windows and work.options.shard is None:
        there.remove()
        raise TextError(tr("the corpus is empty: the model's tokenizer produced no tokens from its files"))
    last = len(work.sources) if work.limit is None else work.limit.source + 1
    about = {
        "model": settings["model"], "options": settings["options"], "how": hows, "files": settings["files"][:last],
        "given": [source.path for source in work.sources], "limit": settings["limit"],
        "heads": [list(vars(head).values()) for head in work.heads], **told(nodes, sums),
    }  # fmt: skip
    if work.options.shard is not None:
        about["nodes"] = [node.to_dict() for node in nodes]
    kept = Passages.nothing(work.options.strongest_by)
    if work.options.passages:
        kept = passages_of(collected, work.heads, about)
    about["passages"] = output.write_passages(kept)
    result = CorpusMeasures.of(output.path, sums, kept, about)
    parts = iter([result.columns()]) if work.options.per == "all" else _by_file(begun, numbers, there, result)
    output.write(parts, about)
    there.remove()
    return result


def told(nodes: Sequence[Node], sums: Tally) -> dict[str, Any]:
    """What the description of a table says of its sums."""
    return {
        "kernels": sorted(sums.kernels), "windows": sums.windows, "tokens": sums.tokens,
        "units": sum(node.stop - node.first for node in nodes), "texts": root(nodes).sha256 if nodes else "",
        "troubles": [str(trouble) for trouble in sums.troubles], "sums": sums.to_dict(),
    }  # fmt: skip


def passages_of(collected: Collected, heads: Sequence[Head], about: Mapping[str, Any]) -> Passages:
    """The passages of a table with this description."""
    by = about["options"]["strongest_by"]
    return collected.of_heads(heads, by, unit_of(by), {name: str(about["model"][name]) for name in ("name", "sha256")})


def _as_in(work: Work, settings: Settings) -> Work:
    return replace(work, sources=settings.files, step=settings.step, limit=settings.limit)


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
        if not (differ := differences(about, _now(work, model))):
            then = [Source(**one) for one in about["files"]]
            limit = None if about["limit"] is None else Limit(**about["limit"])
            differ = _changes(replace(work, sources=[*then, *work.sources[len(then) :]], limit=limit), about["texts"])
        if not differ:
            sums = Tally.of(Entry(about["sums"]), len(work.options.measures), len(work.heads))
            passages = output.read_passages(about["passages"]) if work.options.passages else Passages.nothing(by)
    except (KeyError, TypeError, ValueError):
        raise _exists(output) from None
    if differ:
        raise _refused(output.path, differ, finished=True)
    return CorpusMeasures.of(output.path, sums, passages, about, new=False)


def _by_file(begun: Begun, numbers: Sequence[int], there: Units, result: CorpusMeasures) -> Iterator[Columns]:
    """The table of each file, one at a time in memory; a file can be in several units."""
    work, place, current = begun.work, 0, begun.work.nothing()
    for number in numbers:
        for source, tally in there.read(number, len(work.options.measures), work.no_passages())[0].sums.items():
            if source != place and current.windows:
                yield columns(current, result.heads, result.measures, work.sources[place].path)
                current = work.nothing()
            place = source
            current.add(tally)
    yield columns(current, result.heads, result.measures, work.sources[place].path)


def _decided(work: Work, there: Units, model: Mapping[str, Any], restart: bool, progress: Progress) -> Settings:
    """The settings on disk; without any, those of this run, which are written."""
    there.clean(restart)
    if not there.begun:
        limit = None if work.options.max_tokens is None else _limit(work, work.options.max_tokens, progress)
        work = replace(work, limit=limit)
        count = 0 if work.stream is not None else sum(1 for _ in work.units())
        there.begin(Settings(work.options, model, work.sources, work.step, count, limit))
        return there.settings()
    then = there.settings()
    if not (found := differences(asdict(then), _now(work, model))):
        found = _changes(_as_in(work, then), there.whole) if work.stream is None else []
    if found:
        raise _refused(there.out, found)
    if list(then.files) != list(work.sources):  # other times, the same content
        there.drop_parts()
        there.begin(replace(then, files=work.sources))
    return there.settings()


def _limit(work: Work, max_tokens: int, progress: Progress) -> Limit | None:
    """The place at which the corpus reaches `max_tokens`; None if it has fewer."""
    left = max_tokens
    for unit in work.units():
        there = 0
        progress("reading the beginning of the corpus", max_tokens - left, max_tokens)
        for document, ids, *_ in work.texts(unit, len):
            there += len(ids)
            if there >= left:
                return Limit(unit.number, left, document.source)
        left -= there
    return None


def _now(work: Work, model: Mapping[str, Any]) -> dict[str, Any]:
    files = [asdict(source) for source in work.sources]
    return {"model": model, "options": asdict(work.options), "files": files}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between the settings of an earlier run, or of a table, and other ones, in words."""

    def named(value: Any) -> str:
        if isinstance(value, list):
            return ",".join(map(str, value))
        return "not given" if value is None else str(value)

    found = []
    if then["model"]["sha256"] != now["model"]["sha256"]:
        names = {one["model"]["name"] for one in (then, now)}
        found.append(f"the model: {' and '.join(sorted(names))} differ in weights or sizes")
    for name, value in now["options"].items():
        if (before := then["options"].get(name)) != value:
            found.append(f"--{name.replace('_', '-')}: it was {named(before)} and is {named(value)}")
    for name, value in now["model"]["versions"].items():
        if then["model"]["versions"].get(name) != value:
            found.append(f"{name}: it was {then['model']['versions'].get(name)} and is {value}")
    new = {one["path"]: one["size"] for one in now["files"]}
    old = dict.fromkeys(then.get("given", ()), None) | {one["path"]: one["size"] for one in then["files"]}
    found += [f"{path!r} is new" for path in new if path not in old]
    found += [f"{path!r} is not among the files" for path in old if path not in new]
    found += [
        f"{path!r} had {old[path]:,} bytes and has {size:,}"
        for path, size in new.items()
        if old.get(path) not in (None, size)
    ]
    if not found and list(old) != list(new):
        found.append("the files are in another order")
    return found


def _changes(work: Work, known: Callable[[], Mapping[int, str]] | str) -> list[str]:
    """How the files differ from those that a sweep began with, in words. known: the SHA-256 of the texts of finished
    units, or of all. Only the units of files with another time or other ENDS are read again."""
    found, touched = [], {-1} if work.stream is not None and isinstance(known, str) else set[int]()
    forget_listings(source.path for source in work.sources)
    for i, then in enumerate(work.sources):
        if then.kind == STREAM or (work.limit is not None and i > work.limit.source):
            continue
        try:
            now = source_of(then.path)
        except (TextError, OSError) as error:
            found.append(str(error))
            continue
        if now.size != then.size:
            found.append(f"{then.path!r} had {then.size:,} bytes and has {now.size:,}")
        elif now != then:
            touched.add(i)
    if found or not touched:
        return found
    if isinstance(known, str):
        nothing = work.nothing()
        nodes = grown(Node(unit.number, unit.number + 1, work.sha256(unit), nothing) for unit in work.units())
        same = (root(nodes).sha256 if nodes else "") == known
        names = [work.sources[max(0, i)].path for i in sorted(touched)]
        return [] if same else [f"{joined(map(repr, names), LIST)} has different content"]
    before = known()
    for unit in work.units():
        files = {part.source for part in unit.parts} & touched
        if files and unit.number in before and work.sha256(unit) != before[unit.number]:
            found += [f"{work.sources[i].path!r} has different content" for i in sorted(files)]
    return list(dict.fromkeys(found))


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
