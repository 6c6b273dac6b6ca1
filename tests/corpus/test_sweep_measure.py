"""The numbers of a sweep: those of every window computed by itself, from the stored matrix, in float64."""

import csv
import json
from hashlib import sha256

import numpy as np
import pytest
import torch
from sweep_samples import TEXT, WINDOW, make_model, said, write_jsonl
from torch.testing import assert_close

from headwise.corpus import measure_corpus
from headwise.corpus.sources import documents, find_sources, step_for
from headwise.errors import ConfigError, TextError
from headwise.lm.loading import load_model

NAMES = ("max_logit", "entropy", "top1_mass", "sink_mass", "mean_distance", "previous_mass", "received_mass")
SMALL = {"measures": NAMES, "window": WINDOW, "device": "cpu", "batch": 3}


def dense(subject, texts, window=WINDOW, stride=WINDOW):
    """Measure → [layers][heads] of all values, window by window, from dense float64 weights."""
    found = {name: {} for name in NAMES}
    for text in texts:
        ids = subject.read(text).ids
        for first in range(0, len(ids), stride):
            for layer, amap in enumerate(subject.maps(ids[first : first + window]).values()):
                q, k = amap.q[0].double(), amap.k[0].double()
                scores = q @ k.transpose(-1, -2) * amap.rule.scale
                n = scores.shape[-1]
                scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
                p = scores.softmax(-1).numpy()
                row, key = np.arange(n)[:, None], np.arange(n)
                with np.errstate(divide="ignore", invalid="ignore"):
                    entropy = -np.where(p > 0, p * np.log(p), 0.0).sum(-1)
                values = {
                    "max_logit": scores.amax(-1).numpy(), "entropy": entropy, "top1_mass": p.max(-1),
                    "sink_mass": p[..., 0], "mean_distance": (p * abs(row - key)).sum(-1),
                    "previous_mass": np.diagonal(p, -1, 1, 2), "received_mass": (p.sum(1) / (n - key)).max(-1)[:, None],
                }  # fmt: skip
                for name, value in values.items():
                    for head, one in enumerate(value):
                        found[name].setdefault((layer, head), []).append(one)
            if first + window >= len(ids):
                break
    return {name: {at: np.concatenate(parts) for at, parts in each.items()} for name, each in found.items()}


def assert_same_numbers(found, wanted):
    for name in NAMES:
        for (layer, head), values in wanted[name].items():
            largest = name in ("max_logit", "received_mass")
            columns = {
                "value": values.max() if largest else values.mean(), "mean": values.mean(), "std": values.std(),
                "min": values.min(), "max": values.max(), "count": len(values),
            }  # fmt: skip
            for column, number in columns.items():
                there = float(found.moment(column).dense(name)[layer, head])
                assert there == pytest.approx(number, rel=2e-5, abs=2e-5), (name, column, layer, head)


@pytest.mark.thorough
def test_numbers_are_those_of_every_window_by_itself(model_folder, tmp_path, small_pieces):
    """Pieces, batches with padding, several files: each value counts once, and padding not at all."""
    (tmp_path / "a.txt").write_text(said(3000, 1), encoding="utf-8")
    lines = [said(n, n) for n in (1, 40, 7, 13, 14, 0, 26, 3)]
    write_jsonl(tmp_path / "b.jsonl", lines)
    found = measure_corpus(model_folder, tmp_path / "*.*l*", tmp_path / "out.csv", **SMALL)  # the lines alone
    subject = load_model(model_folder)
    assert_same_numbers(found, dense(subject, [line for line in lines if line]))
    whole = measure_corpus(model_folder, [tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "two.csv", **SMALL)
    (text, _) = find_sources([tmp_path / "a.txt", tmp_path / "b.jsonl"])
    step = step_for(WINDOW)
    parts = [doc.text for doc in documents(text, 0, text.size, step, "text")]
    assert len(parts) > 2
    wanted = dense(subject, [*parts, *(line for line in lines if line)])
    assert_same_numbers(whole, wanted)
    assert whole.total.tokens == sum(len(subject.read(part).ids) for part in (*parts, *(x for x in lines if x)))


@pytest.mark.thorough
def test_windows_that_overlap(model_folder, tmp_path):
    text = said(100, 5)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "out.csv", **SMALL, stride=5)
    subject = load_model(model_folder)
    assert_same_numbers(found, dense(subject, [text], stride=5))
    assert found.total.tokens == len(subject.read(text).ids)
    assert found.moment("count").dense("entropy").max() > found.total.tokens


@pytest.mark.thorough
def test_each_file_by_itself(model_folder, tmp_path, small_pieces):
    for name, size in (("a", 2500), ("b", 60), ("c", 30)):
        (tmp_path / f"{name}.txt").write_text(said(size, size), encoding="utf-8")
    measure_corpus(model_folder, tmp_path, tmp_path / "each.jsonl", **SMALL, per="file")
    rows = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text("utf-8").splitlines()]
    assert [row["file"][-5:] for row in rows[:: 6 * len(NAMES)]] == ["a.txt", "b.txt", "c.txt"]
    for name in "abc":
        alone = measure_corpus(model_folder, tmp_path / f"{name}.txt", tmp_path / f"{name}.csv", **SMALL)
        mine = [row for row in rows if row["file"].endswith(f"{name}.txt")]
        for row, value, number in zip(mine, alone.columns()["value"], alone.columns()["count"], strict=True):
            assert row["value"] == pytest.approx(value, rel=1e-6, abs=1e-6)
            assert row["count"] == number


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [1, 12, 40, 1111, 10**6])
def test_so_many_tokens_and_no_more(model_folder, tmp_path, small_pieces, tokens):
    write_jsonl(tmp_path / "a.jsonl", [said(n, n) for n in (30, 5, 50)])
    text = said(3000, 2)
    (tmp_path / "b.txt").write_text(text, encoding="utf-8")
    out = tmp_path / "out.csv"
    found = measure_corpus(model_folder, tmp_path, out, **SMALL, max_tokens=tokens)
    subject = load_model(model_folder)
    every = sum(len(subject.read(part).ids) for part in (*(said(n, n) for n in (30, 5, 50)), text))
    assert found.total.tokens == min(tokens, every)
    if tokens == 40:
        first = [said(30, 30), said(5, 5)]
        assert_same_numbers(found, dense(subject, [*first, said(50, 50)[: 40 - 35]]))
        assert [one["path"][-7:] for one in found.about["files"]] == ["a.jsonl"]


@pytest.mark.thorough
def test_the_three_forms_hold_the_same(model_folder, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    (tmp_path / "a.txt").write_text(said(200, 3), encoding="utf-8")
    tables = {}
    for form in ("parquet", "csv", "jsonl"):
        found = measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / f"out.{form}", **SMALL)
        tables[form] = found.columns()
    assert tables["parquet"] == tables["csv"] == tables["jsonl"]
    read = parquet.read_table(tmp_path / "out.parquet")
    assert read.to_pydict() == tables["parquet"]
    about = json.loads(read.schema.metadata[b"headwise"])
    assert about["options"]["window"] == WINDOW
    beside = {**about, "sha256": sha256((tmp_path / "out.csv").read_bytes()).hexdigest()}
    assert beside == json.loads((tmp_path / "out.csv.about.json").read_text("utf-8"))
    with open(tmp_path / "out.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in rows] == tables["parquet"]["mean"]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert {name: [line[name] for line in lines] for name in lines[0]} == tables["parquet"]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.thorough
def test_some_layers_and_heads_have_the_numbers_that_they_have_among_all(model_folder, tmp_path):
    (tmp_path / "a.txt").write_text(said(90, 3), encoding="utf-8")
    whole = measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "all.csv", **SMALL)
    some = measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "some.csv", **SMALL, layers=[1], heads=[2, 0])
    assert [(head.layer, head.head) for head in some.heads] == [(1, 0), (1, 2)]
    for name in NAMES:
        assert torch.equal(some.table[name][1], whole.table[name][1][[0, 2]])
        assert some.table.dense(name).isnan().sum() == 4


@pytest.mark.thorough
def test_measures_that_read_the_tokens(model_folder, tmp_path):
    """Of each window by itself: the tokens that came before are those of the window."""
    lines = [said(n, n) + "。，" for n in (9, 30, 4)]
    write_jsonl(tmp_path / "a.jsonl", lines)
    names = ["duplicate_mass", "induction_mass", "punctuation_mass", "separator_mass"]
    options = {**SMALL, "measures": names}
    found = measure_corpus(model_folder, tmp_path / "a.jsonl", tmp_path / "out.csv", **options)
    subject = load_model(model_folder)
    values = {name: [] for name in names}
    for line in lines:
        reading = subject.read(line)
        for first in range(0, len(reading), WINDOW):
            ids, pieces = reading.ids[first : first + WINDOW], reading.pieces[first : first + WINDOW]
            p = subject.maps(ids)["blocks.1.attention"].to_dense()[0].double().numpy()[2]
            for i in range(len(ids)):
                same = [j for j in range(i) if ids[j] == ids[i]]
                after = [j for j in range(1, i + 1) if ids[j - 1] == ids[i]]
                values["duplicate_mass"] += [p[i, same].sum()] if same else []
                values["induction_mass"] += [p[i, after].sum()] if after else []
                values["punctuation_mass"].append(p[i, [piece in "。，,!？" and piece != "" for piece in pieces]].sum())
                values["separator_mass"].append(p[i, [piece.isspace() for piece in pieces]].sum())
    for name in names:
        assert len(values[name]) > 5
        assert int(found.moment("count").dense(name)[1, 2]) == len(values[name])
        assert float(found.table.dense(name)[1, 2]) == pytest.approx(np.mean(values[name]), rel=1e-5)


def test_nan_is_told_with_its_place_and_left_out(tmp_path):
    model = make_model(tmp_path / "model", poison="1.2")
    write_jsonl(tmp_path / "a.jsonl", [said(20, 1), said(9, 2)])
    found = measure_corpus(model, tmp_path / "a.jsonl", tmp_path / "out.csv", **SMALL)
    assert found.table.dense("entropy").isnan().tolist() == [[False] * 3, [False, False, True]]
    assert found.moment("count").dense("entropy")[1].tolist() == [29.0, 29.0, 0.0]
    columns = found.columns()
    assert [n for n, layer, head in zip(columns["nonfinite"], columns["layer"], columns["head"], strict=True)] == [
        29 if (layer, head) == (1, 2) else 0 for layer, head in zip(columns["layer"], columns["head"], strict=True)
    ]
    assert columns["mean"][-1] is None
    first = str(found.total.troubles[0])
    assert "layer 1, head 2: scores in " in first
    assert "a.jsonl, the text at byte 0, window from token 0" in first
    healthy = make_model(tmp_path / "healthy")
    well = measure_corpus(healthy, tmp_path / "a.jsonl", tmp_path / "well.csv", **SMALL)
    assert_close(found.table.dense("entropy")[1, :2], well.table.dense("entropy")[1, :2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"measures": ["entropie"]}, "did you mean 'entropy'"), ({"measures": ["class_mass"]}, "punctuation_mass"),
     ({"measures": []}, "at least one"), ({"measures": ["entropy", "entropy"]}, "given twice"),
     ({"window": 0}, "window=0"), ({"stride": 14}, "a window has 13"), ({"batch": 2.5}, "batch=2.5"),
     ({"max_tokens": 0}, "max_tokens=0"), ({"per": "line"}, "per='line'"), ({"dtype": "int8"}, "dtype='int8'"),
     ({"layers": [2]}, "layers: 2 does not exist in model.*; expected 0 to 1"), ({"heads": [3]}, "heads: 3"),
     ({"device": "tpu"}, "device='tpu'")],
)  # fmt: skip
def test_options_that_do_not_fit_are_named(model_folder, tmp_path, options, says):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "out.csv", **{**SMALL, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("out", ["out.txt", "out", "folder.csv"])
def test_where_the_table_cannot_go_is_named(model_folder, tmp_path, out):
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=out):
        measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / out, **SMALL)


def test_a_text_without_tokens_is_an_empty_corpus(model_folder, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(TextError, match="the corpus is empty"):
        measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "out.csv", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_half_a_surrogate_pair_is_named_by_its_line(model_folder, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"text": "\\ud800"}\n', encoding="utf-8")
    with pytest.raises(TextError, match=r"a\.jsonl', line at byte 15: .*half of a surrogate pair"):
        measure_corpus(model_folder, tmp_path / "a.jsonl", tmp_path / "out.csv", **SMALL)


@pytest.mark.thorough
def test_bfloat16_is_near(model_folder, tmp_path):
    (tmp_path / "a.txt").write_text(said(200, 3), encoding="utf-8")
    single = measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "single.csv", **SMALL)
    half = measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "half.csv", **SMALL, dtype="bfloat16")
    assert_close(half.table.dense("entropy"), single.table.dense("entropy"), rtol=0.05, atol=0.05)
    assert not torch.equal(half.table.dense("entropy"), single.table.dense("entropy"))
