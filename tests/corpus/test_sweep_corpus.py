"""Files found, checked, cut into pieces and windows: nothing is lost, nothing is read twice, and errors name places."""

import json
import os
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from sweep_samples import STEP, said, write_jsonl

import headwise.corpus.sources as sources
from headwise.corpus.select import Frame, batches, stacked, windows
from headwise.corpus.sources import (
    UNITS,
    Limit,
    Source,
    changed,
    check,
    documents,
    find_sources,
    piece_count,
    step_for,
    units,
)
from headwise.errors import ConfigError, TextError

arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")


def quiet(more):
    pass


def test_files_folders_and_patterns_each_file_once(tmp_path):
    for name in ("b.txt", "a.md", "deep/c.jsonl", "deep/.hidden.txt", ".git/d.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    names = [os.path.relpath(one.path, tmp_path) for one in find_sources([tmp_path])]
    assert names == ["a.md", "b.txt", "deep/c.jsonl"]
    twice = find_sources([tmp_path / "b.txt", str(tmp_path / "*.txt"), tmp_path, str(tmp_path / "**/*.jsonl")])
    assert [os.path.relpath(one.path, tmp_path) for one in twice] == ["b.txt", "a.md", "deep/c.jsonl"]
    assert [one.kind for one in twice] == ["text", "text", "jsonl"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("gone.txt", "does not exist"), ("*.foo", "no file with"), ("a.gz", "decompress it"), ("a.json", "JSON lines"),
     ("folder", "no text files"), ("broken.parquet", "not a valid Parquet"), ("empty.txt", "the corpus is empty"),
     ("pipe", "a pipe or a device")],
)  # fmt: skip
def test_what_is_no_corpus_is_named(tmp_path, name, says):
    (tmp_path / "folder").mkdir()
    for file in ("a.gz", "a.json", "broken.parquet"):
        (tmp_path / file).write_text("x" * 50)
    (tmp_path / "empty.txt").touch()
    if name == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("no pipes with names here")
        os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TextError, match=says):
        find_sources([tmp_path / name])
    with pytest.raises(ConfigError, match="at least one file"):
        find_sources([])


@pytest.mark.parametrize("block", [1, 3, 4, 1 << 22])
def test_a_byte_that_is_no_utf8_is_named_by_its_place(tmp_path, monkeypatch, block):
    monkeypatch.setattr(sources, "BLOCK", block)
    path = tmp_path / "t.txt"
    for data, at in (("武松".encode() + b"\xff!", 6), ("打虎".encode()[:-1], 3), (b"ab\xe6\xad!", 2)):
        path.write_bytes(data)
        source = Source(str(path), "text", len(data))
        with pytest.raises(TextError, match=f"at offset {at};"):
            check(source, "text", len(data), quiet)
    for kind in ("text", "jsonl"):
        path.write_bytes("打虎\0".encode())
        with pytest.raises(TextError, match="is not text: NUL byte at offset 6;"):
            check(Source(str(path), kind, 7), "text", 7, quiet)
    path.write_text("武松", encoding="utf-8")
    assert check(Source(str(path), "text", 6), "text", 6, quiet).size == 6


def test_a_file_is_known_by_its_content(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("tiger")
    known = check(Source(str(path), "text", 5), "text", 5, quiet)
    os.utime(path, ns=(1, 1))
    assert changed(known, 5) is None
    path.write_text("tigEr")
    assert "different content" in changed(known, 5)
    path.write_text("tigers")
    assert "had 5 bytes and has 6" in changed(known, 5)
    path.unlink()
    assert "is gone" in changed(known, 5)


@pytest.mark.thorough
@given(st.text(st.sampled_from("ab \n\r武😀"), max_size=400), st.integers(8, 90))
@settings(deadline=None, max_examples=80)
def test_pieces_of_a_text_are_the_text(tmp_path_factory, text, step):
    path = tmp_path_factory.mktemp("pieces") / "t.txt"
    path.write_bytes(text.encode())
    source = Source(str(path), "text", len(text.encode()))
    found = [doc.text for piece in range(piece_count(source, step)) for doc in documents(source, piece, step, "text")]
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    assert "".join(found) == plain
    if "\n" in plain and step > 80:
        assert all(len(part.encode()) <= 2 * step for part in found)


def test_a_text_is_cut_behind_lines_then_spaces_then_characters(tmp_path):
    path = tmp_path / "t.txt"
    for text, parts in (
        ("abcdefghij\nklmnopqrst", ["abcdefghij\n", "klmnopqrst"]),
        ("abcdefghi jklmnopqrst", ["abcdefghi ", "jklmnopqrst"]),
        ("武松打虎武松打", ["武松打", "虎武松", "打"]),
    ):
        path.write_text(text, encoding="utf-8")
        source = Source(str(path), "text", path.stat().st_size)
        step = 8 if "武" in text else 9
        found = [
            doc.text for piece in range(piece_count(source, step)) for doc in documents(source, piece, step, "text")
        ]
        assert "".join(found) == text
        assert found[0] == parts[0]


@pytest.mark.thorough
@given(st.lists(st.text(st.sampled_from("ab武\n"), max_size=60), max_size=12), st.integers(8, 200))
@settings(deadline=None, max_examples=60)
def test_each_line_is_in_one_piece(tmp_path_factory, texts, step):
    path = write_jsonl(tmp_path_factory.mktemp("lines") / "t.jsonl", texts, "said")
    source = Source(str(path), "jsonl", path.stat().st_size)
    found = [doc.text for piece in range(piece_count(source, step)) for doc in documents(source, piece, step, "said")]
    assert found == [text for text in texts if text]


@pytest.mark.parametrize(
    ("line", "says"),
    [("{", "not JSON"), ("[1]", "a JSON object, got list"), ('{"body": "x"}', "no field 'text'; it has 'body'"),
     ('{"text": 3}', "is int, expected a string")],
)  # fmt: skip
def test_a_line_that_will_not_do_is_named_by_its_place(tmp_path, line, says):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "武"}\n\n' + line + "\n", encoding="utf-8")
    source = Source(str(path), "jsonl", path.stat().st_size)
    with pytest.raises(TextError, match=f"line at byte 17: .*{says}"):
        list(documents(source, 0, 1000, "text"))


def test_rows_of_parquet_files(tmp_path):
    path = tmp_path / "t.parquet"
    texts = ["tiger", None, "", *[said(40, seed) for seed in range(9)]]
    table = arrow.table({"body": texts, "n": list(range(12))})
    arrow.parquet.write_table(table, path, row_group_size=5)
    (source,) = find_sources([path])
    assert piece_count(source, 1) == 3
    found = [doc for piece in range(3) for doc in documents(source, piece, 1, "body")]
    assert [doc.text for doc in found] == [text for text in texts if text]
    assert [doc.where for doc in found][:3] == ["row 0", "row 3", "row 4"]
    with pytest.raises(TextError, match="no column 'text'; it has body, n"):
        check(source, "text", source.size, quiet)
    with pytest.raises(TextError, match="column 'n' contains int64"):
        check(source, "n", source.size, quiet)


@pytest.mark.thorough
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30), st.integers(100, 3000))
@settings(deadline=None, max_examples=60)
def test_units_hold_every_piece_once_and_in_order(sizes, step):
    every = [Source(f"{i}", "text", size) for i, size in enumerate(sizes)]
    found = [piece for unit in units(every, step) for piece in unit.pieces()]
    assert found == [(i, piece) for i, one in enumerate(every) for piece in range(piece_count(one, step))]
    assert sum(unit.size for unit in units(every, step)) == sum(sizes)
    if found:
        last = random.Random(step).choice(found)
        short = [piece for unit in units(every, step, Limit(*last, 5)) for piece in unit.pieces()]
        assert short == found[: found.index(last) + 1]


@pytest.mark.thorough
def test_a_large_corpus_has_not_more_units_but_larger_ones():
    every = [Source("large", "text", 1 << 34), *(Source(f"{i}", "text", 900) for i in range(5000))]
    found = units(every, step_for(512))
    assert len(found) <= UNITS
    assert max(unit.size for unit in found) < 2 * ((1 << 34) / UNITS + step_for(512))
    assert len(units([Source("small", "text", 3 * step_for(512))], step_for(512))) == 3


@pytest.mark.thorough
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 2), st.integers(0, 2), st.data())
@settings(deadline=None, max_examples=80)
def test_windows_hold_every_token_and_the_frame(n, room, head, tail, data):
    stride = data.draw(st.integers(1, room))
    ids, pieces = torch.arange(100, 100 + n), [str(i) for i in range(n)]
    frame = Frame(torch.arange(head), torch.arange(tail) + 50)
    found = list(windows(ids, pieces, frame, room + len(frame), stride, 0, "byte 0", 999))
    assert sum(window.content for window in found) == n
    assert sum(window.share for window in found) == pytest.approx(999)
    covered = set()
    for i, window in enumerate(found):
        inside = frame.content(window.ids)
        assert window.first == i * stride
        assert torch.equal(inside, ids[window.first : window.first + room])
        assert torch.equal(window.ids[:head], frame.head)
        assert torch.equal(window.ids[len(window.ids) - tail :], frame.tail)
        special = window.special.tolist()
        assert special == [True] * head + [False] * len(inside) + [True] * tail
        assert [piece for piece, none in zip(window.pieces, special, strict=True) if not none] == pieces[
            window.first : window.first + room
        ]
        assert "".join(window.pieces[:head]) == "".join(window.pieces[len(special) - tail :]) == ""
        covered |= set(inside.tolist())
    assert covered == set(ids.tolist())
    assert all(len(window.ids) == room + len(frame) for window in found[:-1])


def test_batches_are_made_of_windows_of_like_length():
    frame = Frame(torch.arange(0), torch.arange(0))
    stream = [w for n in (5, 2, 9, 2, 5, 1, 7) for w in windows(torch.arange(n), [""] * n, frame, 9, 9, 0, str(n), n)]
    found = list(batches(iter(stream), 3))
    assert [[len(window.ids) for window in batch] for batch in found] == [[9, 7, 5], [5, 2, 2], [1]]
    ids, mask = stacked(found[1])
    assert ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert mask.sum(1).tolist() == [5, 2, 2]
    assert stacked(found[2])[1] is None


def test_pieces_are_long_enough_for_the_windows():
    assert step_for(16) == 1 << 16
    assert step_for(4096) == 32 * 4 * 4096
    assert step_for(1) > STEP
    assert json.dumps(Source("a", "text", 1).__dict__)
