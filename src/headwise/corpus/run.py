"""`measure_corpus`: measure every head on a corpus of any size, with one or many processes, in one or several runs."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from headwise.base.run import Progress, ignored
from headwise.corpus.passages import Floors
from headwise.corpus.result import CorpusMeasures, Output
from headwise.corpus.select import Frame, checked_names, chosen, length_of
from headwise.corpus.sources import STREAM, Source, Stream, find_sources, step_for
from headwise.corpus.tally import WEIGHT, check_strength
from headwise.corpus.units import Begun, Units, begin, finish, look
from headwise.corpus.work import Options, Ranks, Work
from headwise.errors import ConfigError, TextError, check_choice, whole_number
from headwise.lm.loading import LoadedModel, load_model
from headwise.stats import shown_in
from headwise.wording import tr

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PER = ("all", "file")
BATCH = 8
PASSAGES = 8
WAIT = 0.2  # seconds between two reports of progress among processes


def measure_corpus(
    model: LoadedModel | str | os.PathLike[str] | None,
    files: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | Iterable[str | Mapping[str, Any]],
    out: str | os.PathLike[str],
    *,
    measures: Sequence[str] | None = None,
    window: int | None = None,
    stride: int | None = None,
    batch: int = BATCH,
    max_tokens: int | None = None,
    per: str = "all",
    field: str = "text",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    passages: int = PASSAGES,
    strongest_by: str = WEIGHT,
    shard: tuple[int, int] | None = None,
    device: str | None = None,
    dtype: str | None = None,
    restart: bool = False,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> CorpusMeasures:
    """Measure every head on a corpus, and write a table of layer, head and measure.

    The corpus is read in units, and never held as a whole; what reads a unit checks it. Finished units are written
    beside `out`, in the folder OUT.partial, so that the same call resumes after a stop or a kill. A finished table of
    the same files and options is read instead of measured again. Under torchrun the processes share the work.
    With the same batch size, device and threads a process, the numbers are the same bits for any number of processes
    and any interruptions, and after `merge` for any number of shards.

    Args:
        model: an argument of `load_model`, or its result.
        files: texts (UTF-8), .jsonl and .parquet files, folders and patterns such as "news/*.txt", on this machine or
            at an address of fsspec such as "s3://bucket/*.jsonl.zst"; texts and .jsonl also as .gz, .bz2, .xz, .zst.
            Or an iterable that is no list or tuple, such as a dataset or a generator, of strings or of mappings with
            `field`; a run that is resumed needs the same texts again.
        out: .parquet, .csv or .jsonl.
        measures: names, as listed by `headwise measures`, including those of tokens; None for those with "corpus" in
            their `shown`.
        window: tokens that the model reads at once, including special ones; its training length if None.
        stride: tokens from one window to the next; the tokens of the text in a window if None, without overlap.
        batch: windows at a time. max_tokens: from the beginning of the files; all if None.
        per: "all", or "file" for numbers of each file. field: of JSON lines or column of Parquet files with the text.
        layers, heads: numbers of those to measure; None for all.
        passages: how many passages of each head to keep: those in which it is strongest, and as many that are sampled
            from all windows; 0 for none. They are written beside `out`, as OUT.passages.json.
        strongest_by: what makes a passage strong: "weight", the largest weight of a query on a token of the text other
            than the first of the window and the query itself; or the name of a measure of queries, by its value.
        shard: (i, N) to measure the i-th of N parts, counted from 0; `merge` joins their tables. Files are divided by
            size, without being read; of an iterable with at least N `num_shards`, `files.shard` is used, of another one
            every N-th text is read.
        device: "cpu", "cuda", …; None for a GPU if there is one, or the device of a given `LoadedModel`, which is
            otherwise moved. dtype: of the weights, "float32", "bfloat16" or "float16"; None leaves it.
        restart: discard an existing table or an unfinished sweep.
        ranks: the processes; None for those of torchrun's environment. progress: called with the bytes done by all
            of them.
    Returns:
        The numbers over the whole corpus; those of an empty one on all processes but the first.
    Raises:
        ConfigError: for an invalid option, or an `out` with other settings. TextError: for unreadable files, with the
            error of their file system, such as of missing credentials.
            CheckpointError: for an unreadable model, and for a folder that cannot be written.
    """
    output = Output.of(out)
    check_strength(strongest_by)
    names = checked_names(shown_in("corpus") if measures is None else measures)
    _check(1, batch=batch, window=window, stride=stride, max_tokens=max_tokens)
    _check(0, passages=passages)
    for name, value, known in (("per", per, PER), ("dtype", dtype, DTYPES)):
        if value is not None:
            check_choice(name, value, known)
    _on(device, lambda where: torch.empty(0, device=where))
    stream = _stream(files, field, shard, max_tokens, per)
    given: Any = [files] if isinstance(files, str | os.PathLike) else files
    there, progress = Units(output.path), progress or ignored
    with Ranks.among(ranks) as these:
        sources: list[Source] = []
        if these.first:
            look(there, output, restart)
            sources = find_sources(given) if stream is None else [Source(stream.name, STREAM, 0)]
        with there.opened() if these.first else nullcontext():
            loaded = _placed(model, window, device, dtype, these)
            length = length_of(window, loaded, frame := Frame.of(loaded))
            room = length - len(frame)  # for tokens of the text
            if stride is not None and stride > room:
                raise ConfigError(
                    "stride={stride}: a window has {room} tokens of the text; expected at most as many",
                    stride=stride,
                    room=room,
                )
            options = Options(
                names, length, stride or room, max_tokens, per, field,
                _numbers(layers), _numbers(heads), str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
                passages, strongest_by, None if shard is None else f"{shard[0]}/{shard[1]}",
            )  # fmt: skip
            here = chosen(loaded, layers, heads)
            work = Work(loaded, options, sources, here, frame, step_for(length), batch, stream=stream)
            begun = begin(work, there, output, restart, these, progress)
            return begun if isinstance(begun, CorpusMeasures) else _measured(begun, there, output, these, progress)


def _stream(files: Any, field: str, shard: Any, max_tokens: int | None, per: str) -> Stream | None:
    """The texts of an iterable; None for files. ConfigError for what does not fit together."""
    if shard is not None:
        pair = [whole_number(one) for one in shard] if isinstance(shard, tuple | list) else []
        if len(pair) != 2 or (number := pair[0]) is None or (of := pair[1]) is None or not 0 <= number < of:
            raise ConfigError("shard={shard!r}: expected (i, N) with i from 0 to N - 1", shard=shard)
        for name, given in (("max_tokens", max_tokens is not None), ("per='file'", per == "file")):
            if given:
                raise ConfigError(
                    "{name} excludes shard: a shard knows nothing of the others; give each call files of its own",
                    name=name,
                )
    if isinstance(files, str | os.PathLike | list | tuple):
        return None
    if isinstance(files, Mapping) or not isinstance(files, Iterable):
        known = "; give one of its values" if isinstance(files, Mapping) else ""
        raise ConfigError(
            "files: expected files, or an iterable of texts, got {kind}{known}", kind=type(files).__name__, known=known
        )
    if max_tokens is not None:
        raise ConfigError(tr("max_tokens: of files only; give itertools.islice(texts, n) for the first n texts"))
    return Stream(files, field, shard)


def _measured(begun: Begun, there: Units, output: Output, ranks: Ranks, progress: Progress) -> CorpusMeasures:
    """Measure units while any are left, wait until the other processes have finished theirs, and write the table."""
    done = _Done(begun, ranks, progress)
    done.report()
    work, how, none = begun.work, begun.work.how(), begun.work.no_passages()
    floors = Floors(work.no_passages())
    numbers, left, mine = [], 0, ranks.take()
    for unit in work.units():
        numbers.append(unit.number)
        if unit.number in begun.finished:
            if unit.texts and ranks.first and work.sha256(unit) != begun.finished[unit.number]:
                raise TextError(
                    "{name}: its texts are not those that were measured, from {where} on; use --restart to measure "
                    "again",
                    name=work.sources[0].path,
                    where=unit.texts[0].where,
                )
            continue
        left += 1
        if left - 1 < mine:
            continue  # another process measures it
        before = there.part(unit.number, len(work.options.measures), none, how)
        found = work.measure(unit, done.add, floors, before, partial(there.save, unit.number, how=how))
        there.write(unit.number, found, how)
        floors.raise_by(found.passages)
        done.report()
        ranks.count("units", 1)
        mine = ranks.take()
    if not ranks.first:
        return CorpusMeasures.of_nothing(work, output.path)
    while ranks.count("units", 0) < left:
        time.sleep(WAIT)
        done.report()
    return finish(begun, numbers, there, output, progress)


class _Done:
    """Bytes and tokens done by all processes together."""

    def __init__(self, begun: Begun, ranks: Ranks, progress: Progress) -> None:
        self._ranks, self._progress = ranks, progress
        self._size, self._before = begun.sizes()
        self._bytes, self._tokens = 0.0, 0  # that the others have not been sent
        self._since = self._reported = time.monotonic()

    def add(self, size: float, tokens: int) -> None:
        """Count bytes and tokens. As there are many batches, the other processes learn of them at intervals."""
        self._bytes, self._tokens = self._bytes + size, self._tokens + tokens
        if self._ranks.world == 1 or time.monotonic() - self._reported >= WAIT:
            self.report()

    def report(self) -> None:
        """Share the counts with the other processes; the first process also calls `progress`. Raises as
        `Ranks.check` does."""
        self._ranks.check()
        size, self._reported = round(self._bytes), time.monotonic()
        done, tokens = self._before + self._ranks.count("bytes", size), self._ranks.count("tokens", self._tokens)
        self._bytes, self._tokens = self._bytes - size, 0
        if self._ranks.first:
            speed = tokens / max(self._reported - self._since, 1e-9)
            self._progress(f"measuring, {speed:,.0f} tokens/s", min(done, self._size or done), self._size)


def _placed(
    model: LoadedModel | str | os.PathLike[str] | None, window: int | None, device: str | None, dtype: str | None,
    ranks: Ranks,
) -> LoadedModel:  # fmt: skip
    """The model on its device; with several GPUs, each process of a machine has its own."""
    loaded = model if isinstance(model, LoadedModel) else load_model(model, window=window)
    here = next(loaded.model.parameters()).device
    found = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = device or (str(here) if isinstance(model, LoadedModel) else found)
    if wanted == "cuda" and ranks.world > 1:
        wanted = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    _on(wanted, lambda where: loaded.model.to(device=where, dtype=None if dtype is None else DTYPES[dtype]))
    return loaded


def _on(device: str | None, act: Callable[[torch.device], object]) -> None:
    """Act on a device, if one is named; ConfigError with PyTorch's reason if that is not possible."""
    if device is None:
        return
    try:
        act(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from None


def _check(least: int, **numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and (type(number) is not int or number < least):
            raise ConfigError(
                "{name}={number!r}: expected a whole number of at least {least}", name=name, number=number, least=least
            )


def _numbers(given: Sequence[int] | None) -> list[int] | None:
    return None if given is None else sorted(set(given))
