"""The beginning and end of a sweep: processes agree on the remaining units, and finished units become a table."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from headwise.base.files import check_writable
from headwise.base.run import Progress
from headwise.corpus.journal import (
    Journal,
    changes,
    differences,
    limit_of,
    manifest_of,
    refuse,
    sources_of,
    weights_print,
)
from headwise.corpus.passages import Passages, passages_path
from headwise.corpus.result import Columns, CorpusMeasures, Output, columns
from headwise.corpus.sources import (
    Advance,
    Limit,
    Print,
    Source,
    Unit,
    check,
    check_lines,
    find_sources,
    piece_count,
    piece_end,
    units,
)
from headwise.corpus.tally import Tally, unit_of
from headwise.corpus.work import Ranks, Work
from headwise.errors import CheckpointError, ConfigError, TextError
from headwise.wording import in_language


@dataclass(frozen=True)
class Begun:
    """A sweep that all processes have agreed on.

    Attributes:
        manifest: of the sweep. units: all of them, in order. left: the numbers of the unfinished ones.
    """

    work: Work
    manifest: Mapping[str, Any]
    units: Sequence[Unit]
    left: Sequence[int]


def look(given: Sequence[Any], journal: Journal, output: Output, restart: bool, ranks: Ranks) -> list[Source]:
    """Find the files and lock the output, so that wrong names raise before a model is loaded. Only the first process
    does so; the others return no files.

    Raises:
        ConfigError: if the output is there already, or another run writes it. TextError: for missing files.
        CheckpointError: if the output cannot be written.
    """
    if not ranks.first:
        return []
    for path in (output.path, output.about, passages_path(output.path)):
        check_writable(path, "out")
    if _finished(journal, output, restart) and output.read_about() is None:
        raise ConfigError(
            f"{str(output.path)!r} already exists; give another --out, or --restart to measure again",
            f"{str(output.path)!r} 已存在；请给另一个 --out，或加 --restart 重新测量",
        )
    sources = find_sources(given)
    journal.open()
    return sources


def begin(
    work: Work, journal: Journal, output: Output, options: Mapping[str, Any], max_tokens: int | None, restart: bool,
    ranks: Ranks, progress: Progress,
) -> Begun | CorpusMeasures:  # fmt: skip
    """Read the journal, or check the corpus and write the manifest. The first process decides, the others follow. work:
    with the files that `look` returned.

    Returns:
        The sweep with its remaining units; or the result, if the table exists with the same files and options.
    Raises:
        ConfigError: if an existing table or journal has other settings. TextError: for unreadable files.
    """
    model = {
        "name": work.loaded.name, "about": work.loaded.about, "sha256": weights_print(work.loaded),
        "zh": {key: in_language(getattr(work.loaded, key), "zh") for key in ("name", "about")},
        "versions": {name: metadata.version(name) for name in ("headwise", "torch")},
    }  # fmt: skip
    if ranks.first and _finished(journal, output, restart):
        found = _found(work, output, options, model)
        ranks.publish("plan", None)
        return found
    if ranks.first:
        manifest = _decided(work, journal, options, model, max_tokens, restart, progress)
        left = None
    else:
        decided = ranks.wait_for("plan")
        if decided is None:
            return CorpusMeasures.of_nothing(work, output.path)
        manifest = _followed(journal, decided["manifest"], model)
        left = decided["left"]
    work = replace(work, sources=sources_of(manifest), step=manifest["step"], limit=limit_of(manifest))
    every = units(work.sources, work.step, work.limit)
    if left is None:
        left = sorted(set(range(len(every))) - journal.finished())
        ranks.publish("plan", {"manifest": _checksum(manifest), "left": left})
    return Begun(work, manifest, every, left)


def finish(
    begun: Begun, journal: Journal, output: Output, options: Mapping[str, Any], progress: Progress
) -> CorpusMeasures:
    """Merge the units in their order, write the table, and remove the journal.

    Raises:
        TextError: if the corpus has no text, or has changed since it was checked.
    """
    work = begun.work
    if changed := changes(begun.manifest):
        raise TextError(
            f"the corpus changed while it was being measured: {'; '.join(changed)}; use --restart to measure again",
            f"测量期间语料发生了变化：{'；'.join(changed)}；加 --restart 重新测量",
        )
    sums, hows, collected = work.nothing(), [], work.no_passages()
    for number in range(len(begun.units)):
        progress("merging", number, len(begun.units))
        found, how = journal.tallies(number, work.nothing())
        for tally in found.values():
            sums.add(tally)
        hows += [how] if how not in hows else []
        collected.add(journal.passages(number, collected))
    if not sums.windows:
        journal.remove()
        raise TextError(
            "the corpus is empty: the model's tokenizer produced no tokens from its files",
            "语料是空的：模型的分词器没有从这些文件得到词元",
        )
    about = {
        "model": begun.manifest["model"], "options": dict(options), "how": hows, "kernels": sorted(sums.kernels),
        "files": begun.manifest["files"], "windows": sums.windows, "tokens": sums.tokens, "units": len(begun.units),
        "troubles": [str(trouble) for trouble in sums.troubles], "sums": sums.to_dict(),
        "given": [{"path": one["path"]} for one in begun.manifest["given"]], "checked": begun.manifest["checked"],
    }  # fmt: skip
    model = {name: str(begun.manifest["model"][name]) for name in ("name", "sha256")}
    passages = Passages.nothing(work.by)
    if work.passages:
        passages = collected.of_heads(work.heads, work.by, unit_of(work.by), model)
    about["passages"] = output.write_passages(passages)
    result = CorpusMeasures.of(work, output.path, sums, passages, about)
    parts = _by_file(begun, journal, result) if work.by_file else iter([result.columns()])
    output.write(parts, about)
    journal.remove()
    return result


def _finished(journal: Journal, output: Output, restart: bool) -> bool:
    """Whether there is a finished table and no newer journal."""
    return output.path.exists() and not journal.exists and not restart


def _found(work: Work, output: Output, options: Mapping[str, Any], model: Mapping[str, Any]) -> CorpusMeasures:
    """The result of a finished table; ConfigError if it has other settings."""
    about = output.read_about()
    try:
        if about is None:
            raise KeyError
        differ = differences(about, options, model, work.sources) or changes(about)
        sums = Tally.from_dict(about["sums"], len(work.selection.names), len(work.heads)) if not differ else None
        passages = (
            output.read_passages(about["passages"]) if work.passages and not differ else Passages.nothing(work.by)
        )
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{str(output.path)!r} already exists; give another --out, or --restart to measure again",
            f"{str(output.path)!r} 已存在；请给另一个 --out，或加 --restart 重新测量",
        ) from None
    if sums is None:
        raise refuse(str(output.path), differ, finished=True)
    return CorpusMeasures.of(work, output.path, sums, passages, about, new=False)


def _by_file(begun: Begun, journal: Journal, result: CorpusMeasures) -> Iterator[Columns]:
    """The table of each file, one at a time in memory; a file can be in several units."""
    sources = begun.work.sources
    place, current = 0, begun.work.nothing()
    for number in range(len(begun.units)):
        for source, tally in journal.tallies(number, begun.work.nothing())[0].items():
            if source != place and current.windows:
                yield columns(current, result.heads, result.measures, sources[place].path)
                current = begun.work.nothing()
            place = source
            current.add(tally)
    yield columns(current, result.heads, result.measures, sources[place].path)


def _decided(
    work: Work, journal: Journal, options: Mapping[str, Any], model: Mapping[str, Any], max_tokens: int | None,
    restart: bool, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    journal.clean(restart)
    if journal.exists:
        then = journal.read()
        if found := differences(then, options, model, work.sources) or changes(then):
            raise refuse(str(journal.out), found)
        return then
    of, done = sum(source.size for source in work.sources), 0

    def read(more: int) -> None:
        nonlocal done
        done += more
        progress("checking the files", done, of)

    prints, checked, limit = _survey(work, max_tokens, read)
    count = len(units(work.sources, work.step, limit))
    journal.begin(manifest_of(options, model, work.sources, prints, checked, work.step, limit, count))
    return journal.read()


def _followed(journal: Journal, checksum: int, model: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of the first process, read by another one."""
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


def _survey(work: Work, max_tokens: int | None, advance: Advance) -> tuple[list[Print], list[int], Limit | None]:
    """The prints of the measured files, the bytes that were checked of each, and the limit.

    Raises:
        TextError: naming the file and the place that cannot be read.
    """
    limit = None if max_tokens is None else _limit(work, max_tokens)
    sources = work.sources if limit is None else work.sources[: limit.source + 1]
    prints, checked = [], []
    for i, source in enumerate(sources):
        upto = source.size
        if limit is not None and i == limit.source:
            upto = piece_end(source, limit.piece, work.step)
        prints.append(check(source, work.field, upto, advance))
        if source.kind == "jsonl":
            check_lines(source, 0, upto, work.field)
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
