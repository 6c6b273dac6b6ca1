"""Stopped and begun again, by one process: the same bits, or an error that says what is otherwise."""

import json
import os

import pytest
import torch
from sweep_samples import WINDOW, make_model, said, write_jsonl

import headwise.corpus.run as run
from headwise.corpus import measure_corpus
from headwise.corpus.passages import passages_path
from headwise.corpus.units import Units
from headwise.corpus.work import SAVED, Work
from headwise.errors import CheckpointError, ConfigError, TextError

OPTIONS = {"measures": ["entropy", "max_logit"], "window": WINDOW, "device": "cpu", "batch": 3}


@pytest.fixture
def corpus(tmp_path, small_pieces):
    (tmp_path / "a.txt").write_text(said(1600, 1), encoding="utf-8")
    (tmp_path / "b.txt").write_text(said(710, 2), encoding="utf-8")
    return [tmp_path / "a.txt", tmp_path / "b.txt"]


class Stop(Exception):
    pass


def stop_at(tokens):
    """A step that stops the sweep in the middle, when so many windows are done."""
    left = [tokens]

    def step(what, done, of):
        left[0] -= what.startswith("measuring")
        if not left[0]:
            raise Stop

    return step


def begun(model_folder, corpus, out, **options):
    """A sweep that has been stopped in the middle, in `out`; its units so far."""
    with pytest.raises(Stop):
        measure_corpus(model_folder, corpus, out, **{**OPTIONS, **options}, progress=stop_at(60))
    done, of = Units(out).so_far()
    assert 0 < done < of
    return done


@pytest.mark.thorough
@pytest.mark.parametrize("per", ["all", "file"])
def test_it_goes_on_with_the_same_bits(model_folder, corpus, tmp_path, per):
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    once = measure_corpus(model_folder, corpus, whole, **OPTIONS, per=per)
    before = begun(model_folder, corpus, parts, per=per)
    kept = {path: path.stat().st_mtime_ns for path in Units(parts).folder.glob("unit-*")}
    steps = []
    twice = measure_corpus(model_folder, corpus, parts, **OPTIONS, per=per, progress=lambda *now: steps.append(now))
    assert len(kept) == before
    measured = [now for now in steps if now[0].startswith("measuring")]
    assert measured[0][1] > 0  # it says that some is done
    assert whole.read_bytes() == parts.read_bytes()
    assert torch.equal(once.total.numbers, twice.total.numbers)
    assert passages_path(whole).read_bytes() == passages_path(parts).read_bytes()
    assert not Units(parts).folder.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("per", ["all", "file"])
def test_ended_after_every_unit_it_gives_the_same_bytes(model_folder, corpus, tmp_path, monkeypatch, per):
    """Each run ends as soon as it has written one unit; none is measured twice."""
    whole, parts, write, written = tmp_path / "whole.csv", tmp_path / "parts.csv", Units.write, []
    corpus[0].write_text(said(2700, 3), encoding="utf-8")
    measure_corpus(model_folder, corpus, whole, **OPTIONS, per=per)

    def write_and_end(self, unit, *more):
        write(self, unit, *more)
        written.append(unit)
        raise Stop

    monkeypatch.setattr(Units, "write", write_and_end)
    while True:
        try:
            measure_corpus(model_folder, corpus, parts, **OPTIONS, per=per)
            break
        except Stop:
            count = Units(parts).so_far()
            assert count[0] == len(written)
    assert count[0] == count[1] > 2
    assert written == sorted(set(written))
    assert whole.read_bytes() == parts.read_bytes()
    assert passages_path(whole).read_bytes() == passages_path(parts).read_bytes()


@pytest.fixture
def one_unit(tmp_path):
    """A corpus of one unit with many batches; texts are read in several windows, which overlap with `STRIDE`."""
    texts = [said(characters, seed) for seed, characters in enumerate((560, 5, 190, 40))]
    return [write_jsonl(tmp_path / "one.jsonl", texts)]


@pytest.fixture(autouse=True)
def save_at_once(monkeypatch):
    """These corpora take less time than lies between two saves."""
    monkeypatch.setattr("headwise.corpus.work.SECONDS", 0.0)


STRIDE = {"stride": 5}


def measured_batches(monkeypatch):
    """Counts the batches that the model runs."""
    counts, run_batch = [0], Work._run

    def counted(self, *more):
        counts[0] += 1
        run_batch(self, *more)

    monkeypatch.setattr(Work, "_run", counted)
    return counts


@pytest.mark.thorough
@pytest.mark.parametrize("options", [STRIDE, {"per": "file", "passages": 3}])
def test_ended_at_every_save_within_a_unit_it_gives_the_same_bytes(
    model_folder, one_unit, tmp_path, monkeypatch, options
):
    """No batch is measured twice, and a unit that is whole leaves no part."""
    options, whole, parts = {**OPTIONS, **options}, tmp_path / "whole.csv", tmp_path / "parts.csv"
    counts, save, runs = measured_batches(monkeypatch), Units.save, 0
    measure_corpus(model_folder, one_unit, whole, **options)
    once, counts[0] = counts[0], 0

    def save_and_end(self, *more, **how):
        save(self, *more, **how)
        raise Stop

    monkeypatch.setattr(Units, "save", save_and_end)
    while True:
        try:
            measure_corpus(model_folder, one_unit, parts, **options)
            break
        except Stop:
            runs += 1
            assert Units(parts).so_far() == (0, 1)
            assert counts[0] == runs * SAVED
    assert counts[0] == once
    assert runs == (once - 1) // SAVED > 3
    assert whole.read_bytes() == parts.read_bytes()
    assert passages_path(whole).read_bytes() == passages_path(parts).read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("places", [(1, 6, 11), (8, 9, 26)])
def test_ended_between_saves_it_goes_on_at_the_last(model_folder, one_unit, tmp_path, monkeypatch, places):
    """Ended after so many batches of each run, without a word before."""
    options, whole, parts = {**OPTIONS, **STRIDE}, tmp_path / "whole.csv", tmp_path / "parts.csv"
    measure_corpus(model_folder, one_unit, whole, **options)
    counts, done = measured_batches(monkeypatch), 0
    for place in places:
        counts[0] = 0
        with pytest.raises(Stop):
            measure_corpus(model_folder, one_unit, parts, **options, progress=stop_at(1 + done + place))
        assert counts[0] == place
        done += (place - 1) // SAVED * SAVED  # the next run has the batches before the last save
    seen = []
    measure_corpus(model_folder, one_unit, parts, **options, progress=lambda *now: seen.append(now))
    assert whole.read_bytes() == parts.read_bytes()
    assert passages_path(whole).read_bytes() == passages_path(parts).read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["damaged", "another batch size"])
def test_a_part_that_does_not_fit_is_measured_again(model_folder, one_unit, tmp_path, how):
    options = {**OPTIONS, **STRIDE, "batch": 2 if how == "another batch size" else OPTIONS["batch"]}
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    measure_corpus(model_folder, one_unit, whole, **options)
    with pytest.raises(Stop):
        measure_corpus(model_folder, one_unit, parts, **OPTIONS, **STRIDE, progress=stop_at(20))
    (part,) = Units(parts).folder.glob("part-*.json")
    if how == "damaged":
        part.write_bytes(part.read_bytes().replace(b'"windows": ', b'"windows": 1'))
    measure_corpus(model_folder, one_unit, parts, **options)
    assert whole.read_bytes() == parts.read_bytes()
    assert passages_path(whole).read_bytes() == passages_path(parts).read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "says"),
    [({"window": 11}, "--window: it was 13 and is 11"), ({"stride": 5}, "--stride: it was 13 and is 5"),
     ({"measures": ["entropy"]}, "--measures: it was entropy,max_logit and is entropy"),
     ({"per": "file"}, "--per: it was all and is file"), ({"layers": [1]}, "--layers: it was not given and is 1"),
     ({"max_tokens": 900}, "--max-tokens: it was not given and is 900"), ({"dtype": "bfloat16"}, "--dtype")],
)  # fmt: skip
def test_other_options_are_named(model_folder, corpus, tmp_path, options, says):
    out = tmp_path / "out.csv"
    before = begun(model_folder, corpus, out)
    with pytest.raises(ConfigError, match=says) as error:
        measure_corpus(model_folder, corpus, out, **{**OPTIONS, **options})
    assert "--restart to measure again" in str(error.value)
    assert Units(out).so_far()[0] == before  # nothing is lost


@pytest.mark.thorough
def test_other_files_and_models_are_named(model_folder, corpus, tmp_path):
    out = tmp_path / "out.csv"
    begun(model_folder, corpus, out)
    with pytest.raises(ConfigError, match=r"b\.txt' is not among the files"):
        measure_corpus(model_folder, corpus[:1], out, **OPTIONS)
    with pytest.raises(ConfigError, match="in another order"):
        measure_corpus(model_folder, corpus[::-1], out, **OPTIONS)
    other = make_model(tmp_path / "other", seed=4)
    with pytest.raises(ConfigError, match=f"the model: {model_folder.name} and other differ in weights"):
        measure_corpus(other, corpus, out, **OPTIONS)
    text = corpus[0].read_text("utf-8")
    corpus[0].write_text(text.replace("松", "武"), encoding="utf-8")
    os.utime(corpus[0], ns=(1, 1))
    with pytest.raises(ConfigError, match=r"a\.txt' has different content"):
        measure_corpus(model_folder, corpus, out, **OPTIONS)
    corpus[0].write_text(text, encoding="utf-8")  # another time, the same content
    measure_corpus(model_folder, corpus, out, **OPTIONS)


@pytest.mark.thorough
def test_other_content_of_the_same_time_is_named(model_folder, corpus, tmp_path):
    out = tmp_path / "out.csv"
    measure_corpus(model_folder, corpus, out, **OPTIONS)
    about, text = corpus[0].stat(), corpus[0].read_text("utf-8")
    corpus[0].write_text(text.replace("松", "武"), encoding="utf-8")
    os.utime(corpus[0], ns=(about.st_atime_ns, about.st_mtime_ns))
    assert corpus[0].stat().st_size == about.st_size
    with pytest.raises(ConfigError, match=r"a\.txt' has different content"):
        measure_corpus(model_folder, corpus, out, **OPTIONS)


@pytest.mark.thorough
def test_another_batch_size_goes_on(model_folder, corpus, tmp_path):
    """As after running out of memory: the same numbers up to rounding, and the table says so."""
    whole = measure_corpus(model_folder, corpus, tmp_path / "whole.csv", **OPTIONS)
    begun(model_folder, corpus, tmp_path / "out.csv")
    found = measure_corpus(model_folder, corpus, tmp_path / "out.csv", **{**OPTIONS, "batch": 2})
    assert [how["batch"] for how in found.about["how"]] == [3, 2]
    torch.testing.assert_close(found.table.dense("entropy"), whole.table.dense("entropy"), rtol=1e-6, atol=1e-7)


@pytest.mark.thorough
def test_restart_begins_anew(model_folder, corpus, tmp_path):
    out = tmp_path / "out.csv"
    begun(model_folder, corpus, out)
    found = measure_corpus(model_folder, corpus[:1], out, **OPTIONS, restart=True)
    alone = measure_corpus(model_folder, corpus[:1], tmp_path / "alone.csv", **OPTIONS)
    assert torch.equal(found.total.numbers, alone.total.numbers)


@pytest.mark.thorough
def test_a_finished_table_is_not_written_over(model_folder, corpus, tmp_path):
    out = tmp_path / "out.csv"
    measure_corpus(model_folder, corpus[:1], out, **OPTIONS)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        measure_corpus(model_folder, corpus, out, **OPTIONS)
    assert out.read_bytes() == before
    measure_corpus(model_folder, corpus, out, **OPTIONS, restart=True)
    assert out.read_bytes() != before


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("per", ["all", "file"])
def test_a_finished_table_is_known_and_read(model_folder, corpus, tmp_path, suffix, per):
    """As after a kill between the last file and the exit: the folder may be half removed."""
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    out = tmp_path / f"out.{suffix}"
    first = measure_corpus(model_folder, corpus, out, **OPTIONS, per=per)
    before, time = out.read_bytes(), out.stat().st_mtime_ns
    Units(out).folder.mkdir()
    (Units(out).folder / "unit-000001.json").write_bytes(b"a rest")
    again = measure_corpus(model_folder, corpus, out, **OPTIONS, per=per)
    assert (first.new, again.new) == (True, False)
    assert (out.read_bytes(), out.stat().st_mtime_ns) == (before, time)
    assert not Units(out).folder.exists()
    assert torch.equal(first.total.numbers, again.total.numbers)
    assert torch.equal(first.total.lost, again.total.lost)
    assert repr(first) == repr(again)
    assert first.columns() == again.columns()


@pytest.mark.thorough
def test_a_finished_table_of_something_else_is_named(model_folder, corpus, tmp_path):
    out = tmp_path / "out.csv"
    measure_corpus(model_folder, corpus, out, **OPTIONS)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=r"already exists, with different settings: --window: it was 13 and is 11"):
        measure_corpus(model_folder, corpus, out, **{**OPTIONS, "window": 11})
    other = make_model(tmp_path / "other", seed=4)
    with pytest.raises(ConfigError, match=r"already exists.*differ in weights.*--restart"):
        measure_corpus(other, corpus, out, **OPTIONS)
    text = corpus[1].read_text("utf-8")
    corpus[1].write_text(text[:-1] + "!", encoding="utf-8")
    os.utime(corpus[1], ns=(1, 1))
    with pytest.raises(ConfigError, match=r"already exists.*b\.txt' has different content"):
        measure_corpus(model_folder, corpus, out, **OPTIONS)
    corpus[1].write_text(text, encoding="utf-8")
    out.write_bytes(before[:-1] + b" ")  # not as it was written
    with pytest.raises(ConfigError, match="already exists; give another"):
        measure_corpus(model_folder, corpus, out, **OPTIONS)
    out.write_bytes(before)
    assert not measure_corpus(model_folder, corpus, out, **OPTIONS).new
    assert out.read_bytes() == before


@pytest.mark.thorough
def test_one_run_at_a_time(model_folder, corpus, tmp_path):
    pytest.importorskip("fcntl", reason="no locks of files here")
    out = tmp_path / "out.csv"
    begun(model_folder, corpus, out)
    with Units(out).opened(), pytest.raises(ConfigError, match=rf"another run \(process {os.getpid()}\) is writing"):
        measure_corpus(model_folder, corpus, out, **OPTIONS)
    measure_corpus(model_folder, corpus, out, **OPTIONS)


@pytest.mark.thorough
def test_a_broken_manifest_is_told_and_a_broken_unit_measured_again(model_folder, corpus, tmp_path):
    out = tmp_path / "out.csv"
    begun(model_folder, corpus, out)
    for unit, damage in zip(sorted(Units(out).folder.glob("unit-*")), (slice(0, -9), slice(0, 0)), strict=False):
        unit.write_bytes(unit.read_bytes()[damage])
    manifest = Units(out).folder / "manifest.json"
    whole = manifest.read_text("utf-8")
    manifest.write_text(whole[:50], encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"manifest.*--restart"):
        measure_corpus(model_folder, corpus, out, **OPTIONS)
    manifest.write_text(json.dumps({**json.loads(whole), "format": "headwise-measure-3"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"another version of headwise; --restart measures again"):
        measure_corpus(model_folder, corpus, out, **OPTIONS)
    manifest.write_text(whole, encoding="utf-8")
    found = measure_corpus(model_folder, corpus, out, **OPTIONS)
    assert torch.equal(
        found.total.numbers, measure_corpus(model_folder, corpus, tmp_path / "w.csv", **OPTIONS).total.numbers
    )


def test_what_is_wrong_with_names_is_told_before_a_model_is_loaded(model_folder, corpus, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(run, "load_model", loaded.append)
    (tmp_path / "there.csv").write_text("a table")
    with pytest.raises(ConfigError, match=r"there\.csv' already exists"):
        measure_corpus(model_folder, corpus, tmp_path / "there.csv", **OPTIONS)
    with pytest.raises(TextError, match=r"absent\.txt' does not exist"):
        measure_corpus(model_folder, [*corpus, tmp_path / "absent.txt"], tmp_path / "out.csv", **OPTIONS)
    with pytest.raises(CheckpointError, match="cannot be written"):
        measure_corpus(model_folder, corpus, tmp_path / "there.csv" / "out.csv", **OPTIONS)
    assert loaded == []
    assert not Units(tmp_path / "out.csv").folder.exists()


@pytest.mark.thorough
def test_restart_keeps_what_was_done_until_the_model_is_there(model_folder, corpus, tmp_path):
    out = tmp_path / "out.csv"
    before = begun(model_folder, corpus, out)
    with pytest.raises(CheckpointError, match="absent"):
        measure_corpus(tmp_path / "absent", corpus, out, **OPTIONS, restart=True)
    assert Units(out).so_far()[0] == before > 0


@pytest.mark.thorough
def test_a_corpus_that_changes_while_it_is_measured_is_told(model_folder, corpus, tmp_path):
    out = tmp_path / "out.csv"
    other = corpus[0].read_text(encoding="utf-8").replace("松", "武")

    def step(what, done, of):
        if what.startswith("measuring") and done > len(other.encode()):
            corpus[0].write_text(other, encoding="utf-8")

    with pytest.raises(TextError, match=r"changed while it was being measured: .*a\.txt"):
        measure_corpus(model_folder, corpus, out, **OPTIONS, progress=step)
    assert not out.exists()
    with pytest.raises(ConfigError, match=r"a\.txt"):
        measure_corpus(model_folder, corpus, out, **OPTIONS)
    measure_corpus(model_folder, corpus, out, **OPTIONS, restart=True)


def test_heads_that_are_none_are_told(model_folder, corpus, tmp_path):
    for none in ({"layers": []}, {"heads": []}):
        with pytest.raises(ConfigError, match=r"selects no head of"):
            measure_corpus(model_folder, corpus, tmp_path / "out.csv", **OPTIONS, **none)


@pytest.mark.thorough
def test_units_without_settings_belong_to_no_sweep(model_folder, corpus, tmp_path):
    out, alone = tmp_path / "out.csv", tmp_path / "alone.csv"
    begun(model_folder, corpus, out)
    (Units(out).folder / "manifest.json").unlink()
    for path in (out, alone):
        measure_corpus(model_folder, corpus, path, **{**OPTIONS, "window": WINDOW // 2})
    assert out.read_bytes() == alone.read_bytes()
