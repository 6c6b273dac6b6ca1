"""How a sweep begins and ends: all processes agree on what is left to do, and what was done becomes one table."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from headwise.corpus import manifest as written
from headwise.corpus.journal import Journal
from headwise.corpus.output import Columns, Output
from headwise.corpus.plan import Unit, units
from headwise.corpus.ranks import Ranks
from headwise.corpus.result import CorpusMeasures
from headwise.corpus.rows import columns
from headwise.corpus.sources import Source, find_sources
from headwise.corpus.survey import survey, total
from headwise.corpus.tally import Tally
from headwise.corpus.work import Work
from headwise.errors import CheckpointError, ConfigError, TextError
from headwise.outputs import check_writable
from headwise.progress import Progress


@dataclass(frozen=True)
class Begun:
    """A sweep that all processes have agreed on.

    Attributes:
        manifest: what is measured. units: all of them, in order. left: the numbers of those that are not done.
    """

    work: Work
    manifest: Mapping[str, Any]
    units: Sequence[Unit]
    left: Sequence[int]


def look(given: Sequence[Any], journal: Journal, output: Output, restart: bool, ranks: Ranks) -> list[Source]:
    """The files, before a model is loaded or anything is read: what is wrong with their names or with the output is
    told at once. The first process looks, and takes the output for this run; the others get no files.

    Raises:
        ConfigError: if the output is there already, or another run writes it. TextError: for files that are not there.
        CheckpointError: if the output cannot be written.
    """
    if not ranks.first:
        return []
    for path in (output.path, output.about):
        check_writable(path, "out")
    if _finished(journal, output, restart) and output.read_about() is None:
        raise ConfigError(f"{str(output.path)!r} already exists; give another --out, or --restart to measure again")
    sources = find_sources(given)
    journal.open()
    return sources


def begin(
    work: Work, journal: Journal, output: Output, options: Mapping[str, Any], max_tokens: int | None, restart: bool,
    ranks: Ranks, progress: Progress,
) -> Begun | CorpusMeasures:  # fmt: skip
    """Read what is there, or look into the corpus and write down what will be measured. The first process decides, the
    others follow. work: with the files that `look` gave.

    Returns:
        What is left to do; or the result, where the table is there and was measured with the same files and options.
    Raises:
        ConfigError: if what is there was begun with something else. TextError: for what cannot be read.
    """
    model = {
        "name": work.subject.name, "about": work.subject.about, "sha256": written.weights_print(work.subject),
        "versions": {name: metadata.version(name) for name in ("headwise", "torch")},
    }  # fmt: skip
    if ranks.first and _finished(journal, output, restart):
        found = _found(work, output, options, model)
        ranks.say("plan", None)
        return found
    if ranks.first:
        manifest = _decided(work, journal, options, model, max_tokens, restart, progress)
        left = None
    else:
        said = ranks.hear("plan")
        if said is None:
            return CorpusMeasures.of(work, output.path, work.nothing(), {}, new=False)
        manifest = _followed(journal, said["manifest"], model)
        left = said["left"]
    work = replace(work, sources=written.sources_of(manifest), step=manifest["step"], limit=written.limit_of(manifest))
    every = units(work.sources, work.step, work.limit)
    if left is None:
        left = sorted(set(range(len(every))) - journal.finished())
        ranks.say("plan", {"manifest": _checksum(manifest), "left": left})
    return Begun(work, manifest, every, left)


def finish(
    begun: Begun, journal: Journal, output: Output, options: Mapping[str, Any], progress: Progress
) -> CorpusMeasures:
    """Merge the units in their order, write the table, and remove what was kept to go on from.

    Raises:
        TextError: if the corpus has no text, or is otherwise now than when it was checked.
    """
    work = begun.work
    if changed := written.changes(begun.manifest):
        raise TextError(
            f"the corpus changed while it was being measured: {'; '.join(changed)}; use --restart to measure again"
        )
    sums, hows = work.nothing(), []
    for number in range(len(begun.units)):
        progress("merging", number, len(begun.units))
        found, how = journal.tallies(number, work.nothing())
        for tally in found.values():
            sums.add(tally)
        hows += [how] if how not in hows else []
    if not sums.windows:
        journal.remove()
        raise TextError("the corpus is empty: the model's tokenizer produced no tokens from its files")
    about = {
        "model": begun.manifest["model"], "options": dict(options), "how": hows, "kernels": sorted(sums.kernels),
        "files": begun.manifest["files"], "windows": sums.windows, "tokens": sums.tokens, "units": len(begun.units),
        "troubles": [str(trouble) for trouble in sums.troubles], "sums": sums.to_dict(),
        "given": [{"path": one["path"]} for one in begun.manifest["given"]], "checked": begun.manifest["checked"],
    }  # fmt: skip
    result = CorpusMeasures.of(work, output.path, sums, about)
    parts = _by_file(begun, journal, result) if work.by_file else iter([result.columns()])
    output.write(parts, about)
    journal.remove()
    return result


def _finished(journal: Journal, output: Output, restart: bool) -> bool:
    """Whether there is a table, and nothing that was begun after it."""
    return output.path.exists() and not journal.exists and not restart


def _found(work: Work, output: Output, options: Mapping[str, Any], model: Mapping[str, Any]) -> CorpusMeasures:
    """The result of a finished table; ConfigError if it is of something else."""
    about = output.read_about()
    try:
        if about is None:
            raise KeyError
        differ = written.differences(about, options, model, work.sources) or written.changes(about)
        sums = Tally.from_dict(about["sums"], len(work.asked.names), len(work.heads)) if not differ else None
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{str(output.path)!r} already exists; give another --out, or --restart to measure again"
        ) from None
    if sums is None:
        raise written.refuse(str(output.path), differ, finished=True)
    return CorpusMeasures.of(work, output.path, sums, about, new=False)


def _by_file(begun: Begun, journal: Journal, result: CorpusMeasures) -> Iterator[Columns]:
    """The table of each file; a file may be in several units, and one at a time is held."""
    sources = begun.work.sources
    place, under_way = 0, begun.work.nothing()
    for number in range(len(begun.units)):
        for source, tally in journal.tallies(number, begun.work.nothing())[0].items():
            if source != place and under_way.windows:
                yield columns(under_way, result.heads, result.measures, sources[place].path)
                under_way = begun.work.nothing()
            place = source
            under_way.add(tally)
    yield columns(under_way, result.heads, result.measures, sources[place].path)


def _decided(
    work: Work, journal: Journal, options: Mapping[str, Any], model: Mapping[str, Any], max_tokens: int | None,
    restart: bool, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    journal.clean(restart)
    if journal.exists:
        then = journal.read()
        if found := written.differences(then, options, model, work.sources) or written.changes(then):
            raise written.refuse(str(journal.out), found)
        return then
    of, done = total(work.sources), 0

    def read(more: int) -> None:
        nonlocal done
        done += more
        progress("checking the files", done, of)

    prints, checked, limit = survey(work, max_tokens, read)
    count = len(units(work.sources, work.step, limit))
    journal.begin(written.written(options, model, work.sources, prints, checked, work.step, limit, count))
    return journal.read()


def _followed(journal: Journal, checksum: int, model: Mapping[str, Any]) -> dict[str, Any]:
    """What the first process has written down, as another one sees it."""
    if not journal.exists or _checksum(manifest := journal.read()) != checksum:
        raise CheckpointError(
            f"{str(journal.folder)!r} is not the folder that the first process wrote; all processes need "
            f"access to the same folder"
        )
    if manifest["model"]["sha256"] != model["sha256"]:
        raise ConfigError(f"model: this process has different weights of {model['name']} than the first process")
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
