"""Joining the tables of shards to the table of the corpus.

>>> import pathlib, tempfile
>>> from headwise.corpus import measure_corpus, merge
>>> with tempfile.TemporaryDirectory() as folder:
...     for name in ("one.txt", "two.txt"):
...         _ = pathlib.Path(folder, name).write_text("武松打虎。" * 40, encoding="utf-8")
...     options = {"measures": ["entropy"], "window": 64, "device": "cpu", "layers": [0]}
...     for i, part in enumerate(parts := [f"{folder}/part-{i}.csv" for i in range(2)]):
...         _ = measure_corpus(None, folder, part, shard=(i, 2), **options)
...     found = merge(parts, f"{folder}/all.csv")
>>> found.total.tokens
400
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from headwise.base.files import check_writable
from headwise.base.read import Entry
from headwise.corpus.passages import Collected, Passages, passages_path
from headwise.corpus.result import CorpusMeasures, Output
from headwise.corpus.select import Head
from headwise.corpus.sources import STREAM
from headwise.corpus.tally import Node, grown, root
from headwise.corpus.units import differences, passages_of, told
from headwise.errors import CheckpointError, ConfigError, HeadwiseError
from headwise.wording import tr


def merge(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, restart: bool = False
) -> CorpusMeasures:
    """Join the tables of all shards of a corpus, and write the table of the whole.

    Of files, the table and the passages are those of one run, in the same bits, if all shards were measured with the
    same batch size, device and threads a process. Of an iterable, they depend on the number of shards by rounding.

    Args:
        paths: the tables that `measure_corpus` wrote with `shard`, in any order.
        out: .parquet, .csv or .jsonl; the passages are written beside it. restart: overwrite it.
    Returns:
        The numbers over the whole corpus.
    Raises:
        ConfigError: naming what differs between the settings of two shards, a shard that is missing or given twice,
            and an `out` that exists. CheckpointError: for a file that is no table of a shard, or was changed.
    """
    output = Output.of(out)
    for path in (output.path, output.about, passages_path(output.path)):
        check_writable(path, "out")
    if output.path.exists() and not restart:
        raise ConfigError("{path!r} already exists; give another --out, or --restart", path=str(output.path))
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    parts, first = _in_order([Output.of(path) for path in given])
    options, heads = first["options"], [Head(*one) for one in first["heads"]]
    collected = Collected.nothing(options["passages"], len(heads))
    hows: list[Any] = []
    units: list[int] = []

    def nodes_of_parts() -> Iterator[Node]:
        for i, part in enumerate(parts):
            try:
                about = part.read_about() or {}
                nodes = [Node.of(Entry(node), len(options["measures"]), len(heads)) for node in about["nodes"]]
                if options["passages"] and about["windows"]:
                    collected.add(Collected.again(part.read_passages(about["passages"]), heads, first))
            except (KeyError, TypeError, ValueError, HeadwiseError):
                raise CheckpointError(
                    "{path!r}: its sums, or its passages beside it, are missing or were changed; measure this shard "
                    "again",
                    path=str(part.path),
                ) from None
            units.append(about["units"])
            hows.extend(how for how in about["how"] if how not in hows)
            if first["files"][0]["kind"] == STREAM and nodes:  # whose units are numbered in each shard
                nodes = [replace(root(nodes), first=i, stop=i + 1)]
            yield from nodes

    nodes = grown(nodes_of_parts())
    if not nodes:
        raise ConfigError(tr("the corpus is empty: no shard has tokens"))
    sums = root(nodes).sums
    about = {**first, "how": hows, **told(nodes, sums), "units": sum(units)}
    kept = passages_of(collected, heads, about) if options["passages"] else Passages.nothing(options["strongest_by"])
    about["passages"] = output.write_passages(kept)
    result = CorpusMeasures.of(output.path, sums, kept, about)
    output.write([result.columns()], about)
    return result


def _in_order(parts: list[Output]) -> tuple[list[Output], dict[str, Any]]:
    """The tables by the number of their shard, and the description of the first, without its sums. ConfigError unless
    they are all shards of one sweep."""
    first: dict[str, Any] = {}
    found: dict[int, Output] = {}
    count = 0
    for part in parts:
        path, about = str(part.path), part.read_about()
        if about is None or "options" not in about:
            raise CheckpointError(
                "{path!r} is missing, is no table of headwise measure, or was changed afterwards", path=path
            )
        if about["options"]["shard"] is None:
            raise ConfigError(
                "{path!r} is the table of a whole corpus; expected those of shards (headwise measure --shard i/N)",
                path=path,
            )
        number, of = map(int, about["options"]["shard"].split("/"))
        about["options"]["shard"] = None
        about.pop("nodes", None)
        first, count = first or about, count or of
        differ = [f"shards of {count} and of {of}"] if of != count else differences(first, about)
        pairs = [] if differ else zip(first["files"], about["files"], strict=True)
        differ += [f"{a['path']!r} has different content" for a, b in pairs if a.get("ends") != b.get("ends")]
        if differ:
            raise ConfigError(
                "{path!r} has other settings than {other!r}: {differ}", path=path, other=str(parts[0].path),
                differ="; ".join(differ[:4]),
            )  # fmt: skip
        if number in found:
            raise ConfigError(
                "{path!r} and {other!r} are both shard {number} of {count}", path=path,
                other=str(found[number].path), number=number, count=count,
            )  # fmt: skip
        found[number] = part
    if missing := [number for number in range(count) if number not in found]:
        raise ConfigError(
            "shard {missing} of {count} is missing; headwise measure --shard {first}/{count} writes it",
            missing=", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else ""), first=missing[0],
            count=count,
        )  # fmt: skip
    if not found:
        raise ConfigError(tr("paths=(): give the tables of all shards"))
    return [found[number] for number in range(count)], first
