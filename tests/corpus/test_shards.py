"""Shards of a corpus, measured by calls that know nothing of one another, and merged: the bits of one run."""

import contextlib
import itertools
import json
import random

import pytest
import torch
from sweep_samples import WINDOW, make_model, said, write_jsonl
from typer.testing import CliRunner

from headwise.cli.learn import shard_of
from headwise.cli.program import app
from headwise.corpus import measure_corpus, merge
from headwise.corpus.passages import passages_path
from headwise.corpus.result import Output
from headwise.corpus.tally import Node, Tally, grown, root
from headwise.errors import CheckpointError, ConfigError, TextError

OPTIONS = {"measures": ["entropy", "max_logit"], "window": WINDOW, "device": "cpu", "batch": 3, "passages": 3}


def written(folder, characters, texts):
    """A file of so many characters, and one of so many texts."""
    (folder / "a.txt").write_text(said(characters, 1), encoding="utf-8")
    write_jsonl(folder / "b.jsonl", [said(1 + 97 * n % 300, n) for n in range(texts)])
    return [folder / "a.txt", folder / "b.jsonl"]


@pytest.fixture
def corpus(tmp_path, small_pieces):
    return written(tmp_path, 5000, 20)


def shards(model, files, folder, count, suffix="csv", **options):
    parts = [folder / f"part-{i}.{suffix}" for i in range(count)]
    for i, part in enumerate(parts):
        measure_corpus(model, files, part, **{**OPTIONS, **options}, shard=(i, count))
    return parts


@pytest.mark.thorough_except("2-csv-400-2")
@pytest.mark.parametrize(
    ("count", "suffix", "characters", "texts"), [(2, "csv", 400, 2), (3, "csv", 5000, 20), (8, "parquet", 5000, 20)]
)
def test_merged_shards_have_the_bytes_of_one_run(
    model_folder, small_pieces, tmp_path, count, suffix, characters, texts
):
    corpus = written(tmp_path, characters, texts)
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    whole, every = tmp_path / f"whole.{suffix}", tmp_path / f"all.{suffix}"
    one = measure_corpus(model_folder, corpus, whole, **OPTIONS)
    parts = shards(model_folder, corpus, tmp_path, count, suffix)
    random.Random(1).shuffle(parts)
    found = merge(parts, every)
    assert every.read_bytes() == whole.read_bytes()
    assert passages_path(every).read_bytes() == passages_path(whole).read_bytes()
    assert torch.equal(found.total.numbers, one.total.numbers)
    assert found.passages.found == one.passages.found
    assert Output.of(every).read_about() == Output.of(whole).read_about()
    assert not measure_corpus(model_folder, corpus, every, **OPTIONS).new  # it is the table of that run


def test_a_shard_without_units_is_an_empty_table(model_folder, tmp_path):
    (tmp_path / "a.txt").write_text(said(200, 1), encoding="utf-8")
    parts = shards(model_folder, tmp_path / "a.txt", tmp_path, 2)
    whole = measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "whole.csv", **OPTIONS)
    found = merge(parts, tmp_path / "all.csv")
    assert repr(found).replace("all.csv", "whole.csv") == repr(whole)


@pytest.mark.thorough
def test_shards_that_do_not_belong_together_are_named(model_folder, corpus, tmp_path):
    one, two, three = shards(model_folder, corpus, tmp_path, 3)
    out, other = tmp_path / "all.csv", tmp_path / "other.csv"
    with pytest.raises(ConfigError, match=r"^shard 1 of 3 is missing; headwise measure --shard 1/3 writes it$"):
        merge([one, three], out)
    with pytest.raises(ConfigError, match=r"part-0\.csv' and '.*part-0\.csv' are both shard 0 of 3"):
        merge([one, two, three, one], out)
    measure_corpus(model_folder, corpus, other, **{**OPTIONS, "stride": 5}, shard=(2, 3))
    with pytest.raises(ConfigError, match=r"other\.csv' has other settings than '.*part-0\.csv': --stride: it was 13"):
        merge([one, two, other], out)
    measure_corpus(model_folder, corpus[:1], other, **OPTIONS, shard=(2, 3), restart=True)
    with pytest.raises(ConfigError, match=r"other\.csv' has other settings .*b\.jsonl' is not among the files"):
        merge([one, two, other], out)
    measure_corpus(model_folder, corpus, other, **OPTIONS, shard=(2, 4), restart=True)
    with pytest.raises(ConfigError, match="shards of 3 and of 4"):
        merge([one, two, other], out)
    measure_corpus(make_model(tmp_path / "m", seed=4), corpus, other, **OPTIONS, shard=(2, 3), restart=True)
    with pytest.raises(ConfigError, match=r"the model: m and .* differ in weights"):
        merge([one, two, other], out)
    measure_corpus(model_folder, corpus, other, **OPTIONS, restart=True)
    with pytest.raises(ConfigError, match=r"other\.csv' is the table of a whole corpus"):
        merge([other], out)
    with pytest.raises(CheckpointError, match=r"gone\.csv' is missing"):
        merge([one, tmp_path / "gone.csv"], out)
    with pytest.raises(ConfigError, match="give the tables"):
        merge([], out)
    passages_path(two).write_text("{}")
    with pytest.raises(CheckpointError, match=r"part-1\.csv': its sums, or its passages beside it, are missing or"):
        merge([one, two, three], out)
    assert not out.exists()
    with pytest.raises(ConfigError, match=r"other\.csv' already exists"):
        merge([one], other)


@pytest.mark.thorough
@pytest.mark.parametrize("at", [0, -1])
def test_shards_of_versions_of_a_file_are_not_joined(model_folder, tmp_path, at):
    """Of the same size; the second shard sees the new version only."""
    text, path, parts = list(said(900, 1)), tmp_path / "a.txt", [tmp_path / f"part-{i}.csv" for i in range(2)]
    for i, part in enumerate(parts):
        text[at] = "武松"[i]
        path.write_text("".join(text), encoding="utf-8")
        measure_corpus(model_folder, path, part, **OPTIONS, shard=(i, 2))
    with pytest.raises(ConfigError, match=r"part-1\.csv' has other settings than .*a\.txt' has different content"):
        merge(parts, tmp_path / "all.csv")


@pytest.mark.parametrize(
    ("options", "says"),
    [({"shard": (2, 2)}, r"shard=\(2, 2\)"), ({"shard": (0.5, 2)}, "shard="), ({"shard": "0/2"}, "shard='0/2'"),
     ({"shard": (0, 2), "max_tokens": 9}, "max_tokens excludes shard"),
     ({"shard": (0, 2), "per": "file"}, "per='file' excludes shard")],
)  # fmt: skip
def test_what_a_shard_excludes_is_named(model_folder, tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        measure_corpus(model_folder, ["a.txt"], tmp_path / "out.csv", **{**OPTIONS, **options})
    with pytest.raises(ConfigError, match="--shard '1-2': expected i/N"):
        shard_of("1-2")
    assert shard_of("7/8") == (7, 8)


@pytest.mark.thorough
def test_a_killed_shard_goes_on(model_folder, corpus, tmp_path, monkeypatch):
    """After each unit; the others are of other calls, and know nothing of it."""
    from headwise.corpus.units import Units

    whole, written, write = tmp_path / "whole.csv", [], Units.write
    measure_corpus(model_folder, corpus, whole, **OPTIONS)

    def write_and_end(self, unit, *more):
        write(self, unit, *more)
        written.append(unit)
        raise KeyboardInterrupt

    monkeypatch.setattr(Units, "write", write_and_end)
    parts = [tmp_path / f"part-{i}.csv" for i in range(3)]
    for i, part in enumerate(parts):
        while not part.exists():
            with contextlib.suppress(KeyboardInterrupt):
                measure_corpus(model_folder, corpus, part, **OPTIONS, shard=(i, 3))
    assert written == list(range(len(written)))
    merge(parts, tmp_path / "all.csv")
    assert (tmp_path / "all.csv").read_bytes() == whole.read_bytes()


def test_the_order_of_sums_does_not_depend_on_the_shards():
    def leaf(i):
        return Node(i, i + 1, str(i), Tally(torch.randn(2, 5, 3, dtype=torch.float64).abs(), torch.zeros(2, 3)))

    torch.manual_seed(0)
    leaves = [leaf(i) for i in range(37)]
    whole = root(grown(leaves))
    for count in (2, 3, 8, 36, 37):
        cuts = [37 * i // count for i in range(count + 1)]
        parts = [grown(leaves[a:b]) for a, b in itertools.pairwise(cuts)]
        assert max(map(len, parts)) <= 8  # not the number of units
        found = root(grown(node for part in parts for node in part))
        assert (found.first, found.stop, found.sha256) == (0, 37, whole.sha256)
        assert torch.equal(found.sums.numbers, whole.sums.numbers)


TEXTS = [said(1 + 97 * n % 300, n) for n in range(20)]


@pytest.mark.thorough_except("2")
@pytest.mark.parametrize("count", [2, 20])
def test_texts_of_an_iterable_have_the_numbers_of_a_file(model_folder, tmp_path, count):
    of_file = TEXTS[:count]
    write_jsonl(tmp_path / "a.jsonl", of_file)
    wanted = measure_corpus(model_folder, tmp_path / "a.jsonl", tmp_path / "file.csv", **OPTIONS)
    for name, texts in (
        ("strings", iter(of_file)), ("mappings", ({"text": text, "n": 1} for text in of_file)),
    ):  # fmt: skip
        found = measure_corpus(model_folder, texts, tmp_path / f"{name}.csv", **OPTIONS)
        assert torch.equal(found.total.numbers, wanted.total.numbers)
        assert found.passages[1, 0].strongest[0].tokens == wanted.passages[1, 0].strongest[0].tokens
        assert found.passages[1, 0].strongest[0].where.startswith("text ")
    shown = found.passages[1, 0].strongest[0]
    assert shown.file == "<generator>"


@pytest.fixture
def small_units(monkeypatch, small_pieces):
    monkeypatch.setattr("headwise.corpus.sources.OF_STREAM", 300)


@pytest.mark.thorough
def test_a_stream_goes_on_with_the_same_bits_and_other_texts_are_named(model_folder, tmp_path, small_units):
    long = [said(900, n) for n in range(8)]
    whole = measure_corpus(model_folder, iter(long), tmp_path / "whole.csv", **OPTIONS)

    def stop(what, done, of):
        if done > 6000:
            raise KeyboardInterrupt

    parts = tmp_path / "parts.csv"
    with pytest.raises(KeyboardInterrupt):
        measure_corpus(model_folder, iter(long), parts, **OPTIONS, progress=stop)
    with pytest.raises(TextError, match=r"its texts are not those that were measured, from text 0 on"):
        measure_corpus(model_folder, iter(long[1:]), parts, **OPTIONS)
    found = measure_corpus(model_folder, iter(long), parts, **OPTIONS)
    assert torch.equal(found.total.numbers, whole.total.numbers)
    assert not measure_corpus(model_folder, iter(long), parts, **OPTIONS).new
    with pytest.raises(ConfigError, match="already exists, with different settings: '<list_iterator>' has different"):
        measure_corpus(model_folder, iter(long[1:]), parts, **OPTIONS)


@pytest.mark.thorough
def test_shards_of_an_iterable_hold_every_text_once(model_folder, tmp_path, small_units):
    whole = measure_corpus(model_folder, iter(TEXTS), tmp_path / "whole.csv", **OPTIONS)
    parts = [tmp_path / f"part-{i}.csv" for i in range(3)]
    for i, part in enumerate(parts):
        measure_corpus(model_folder, iter(TEXTS), part, **OPTIONS, shard=(i, 3))
    found = merge(parts, tmp_path / "all.csv")
    torch.testing.assert_close(found.total.numbers, whole.total.numbers, rtol=1e-6, atol=1e-6)
    assert found.total.tokens == whole.total.tokens
    assert found.about["units"] == sum(Output.of(part).read_about()["units"] for part in parts) > len(parts)
    places = [{one.where for one in each.passages[0, 0].sampled} for each in (found, whole)]
    assert places[0] == places[1]  # the sample does not depend on the shards


def test_what_is_no_corpus_is_named(model_folder, tmp_path):
    def failing():
        yield "武松"
        raise PermissionError("token required\nlog in")

    for texts, says in (
        ({"train": ["a"]}, "got dict; give one of its values"), (7, "got int"),
        (iter([tmp_path]), "give files as a list"),
        (iter([{"body": "x"}]), "<list_iterator>, text 0: no field 'text'; it has 'body'"),
        (failing(), "'<generator>' cannot be read: token required log in"),
    ):  # fmt: skip
        with pytest.raises((ConfigError, TextError), match=says) as error:
            measure_corpus(model_folder, texts, tmp_path / "out.csv", **OPTIONS)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"itertools\.islice"):
        measure_corpus(model_folder, iter(TEXTS), tmp_path / "out.csv", **OPTIONS, max_tokens=3)


@pytest.mark.thorough
def test_the_commands_measure_and_merge(model_folder, corpus, tmp_path):
    def run(*args):
        return CliRunner().invoke(app, [*map(str, args)])

    options = ["--model", model_folder, "--measures", "entropy", "--window", WINDOW, "--device", "cpu"]
    files = [part for file in corpus for part in ("--file", file)]
    for i in range(2):
        assert run("measure", *options, *files, "--out", tmp_path / f"part-{i}.csv", "--shard", f"{i}/2").exit_code == 0
    parts = sorted(tmp_path.glob("part-*.csv"))
    done = run("merge", *parts, "--out", tmp_path / "all.csv", "--sort", "entropy")
    assert done.exit_code == 0, done.output
    assert "mean of heads" in done.output
    assert json.loads((tmp_path / "all.csv.about.json").read_text("utf-8"))["options"]["shard"] is None
    assert "already exists; give another --out, or --restart" in str(
        run("merge", *parts, "--out", tmp_path / "all.csv").exception
    )
    assert run("merge", *parts, "--out", tmp_path / "all.csv", "--restart").exit_code == 0
    assert "is the file of" in str(run("merge", *parts, "--out", parts[0], "--restart").exception)
