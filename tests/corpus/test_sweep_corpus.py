"""Files found, cut into pieces and windows: nothing is lost, nothing is read twice, and errors name places."""

import gzip
import io
import json
import os
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.spec import AbstractFileSystem
from hypothesis import given, settings, strategies as st
from sweep_samples import STEP, WINDOW, said, write_jsonl

from headwise.corpus import measure_corpus
from headwise.corpus.select import Frame, batches, stacked, windows
from headwise.corpus.sources import MOST, SHARE, Source, documents, find_sources, step_for, units
from headwise.errors import ConfigError, TextError

arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("pyarrow.parquet")


def read(source, step, field="text"):
    """The texts of each piece, read by itself."""
    count = 1 if source.packed else -(-source.size // step)
    return [doc for piece in range(count) for doc in documents(source, piece, piece + 1, step, field)]


def texts(source, step, field="text"):
    """Of all pieces; read together, they are the same."""
    found = read(source, step, field)
    assert list(documents(source, 0, -(-source.size // step), step, field)) == found
    return [doc.text for doc in found]


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
    [("gone.txt", "does not exist"), ("*.foo", "no file with"), ("a.zip", "decompress it"),
     ("a.parquet.gz", "decompress it"), ("a.json", "JSON lines"),
     ("folder", "no text files"), ("empty.txt", "the corpus is empty"), ("nowhere://a.txt", "Protocol not known"),
     ("pipe", "a pipe or a device")],
)  # fmt: skip
def test_what_is_no_corpus_is_named(tmp_path, name, says):
    (tmp_path / "folder").mkdir()
    for file in ("a.zip", "a.json", "a.parquet.gz"):
        (tmp_path / file).write_text("x" * 50)
    (tmp_path / "empty.txt").touch()
    if name == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("no pipes with names here")
        os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TextError, match=says):
        find_sources([name if "://" in name else tmp_path / name])
    with pytest.raises(ConfigError, match="at least one file"):
        find_sources([])


def test_a_byte_that_is_no_utf8_is_named_by_its_place(tmp_path):
    path = tmp_path / "t.txt"
    for data, at in (("武松".encode() + b"\xff!", 6), ("打虎".encode()[:-1], 3), (b"ab\xe6\xad!", 2)):
        path.write_bytes(data)
        with pytest.raises(TextError, match=f"at offset {at};"):
            texts(Source(str(path), "text", len(data)), 100)
    for kind in ("text", "jsonl"):
        path.write_bytes("打虎\0".encode())
        with pytest.raises(TextError, match="is not text: NUL byte at offset 6;"):
            texts(Source(str(path), kind, 7), 100)


@pytest.mark.parametrize("name", ["t.parquet", "t.txt.gz", "t.jsonl.xz", "t.txt.bz2"])
def test_what_is_damaged_is_named_by_the_error_of_who_reads_it(tmp_path, name):
    (tmp_path / name).write_text("x" * 50)
    (source,) = find_sources([tmp_path / name])
    with pytest.raises(TextError, match=rf"{name}' cannot be read: .") as error:
        texts(source, 100)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("packed", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_compressed_file_has_the_texts_of_the_file(tmp_path, kind, packed):
    from fsspec.compression import compr

    from headwise.corpus.sources import PACKED

    name, lines = PACKED[f".{packed}"], [said(60, seed) for seed in range(9)]
    if name not in compr:
        pytest.skip("zstandard is not installed")
    plain = tmp_path / f"t.{kind}"
    if kind == "jsonl":
        write_jsonl(plain, lines)
    else:
        plain.write_text("\n".join(lines), encoding="utf-8")
    path = tmp_path / f"{plain.name}.{packed}"
    with open(path, "wb") as raw, compr[name](raw, mode="wb") as file:
        file.write(plain.read_bytes())
    one, other = find_sources([plain, path])
    assert (other.kind, other.packed) == (one.kind, name)
    assert read(other, 200) == read(one, 200)
    assert [unit.size for unit in units([other], 64)] == [path.stat().st_size]


def test_files_at_an_address_have_the_texts_of_local_ones(tmp_path):
    files = fsspec.filesystem("memory")
    here = {
        "a.txt": said(900, 1),
        "deep/b.jsonl": json.dumps({"text": said(80, 2)}) + "\n",
        ".c.txt": "x",
        "d.png": "x",
    }
    here["e.txt.gz"] = gzip.compress(said(90, 3).encode())
    arrow.parquet.write_table(arrow.table({"text": [said(40, 4), "b"]}), tmp_path / "f.parquet")
    here["f.parquet"] = (tmp_path / "f.parquet").read_bytes()
    for name, text in here.items():
        data = text if isinstance(text, bytes) else text.encode()
        files.pipe(f"/corpus/{name}", data)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    far, near = find_sources(["memory://corpus"]), find_sources([tmp_path])
    assert [one.path for one in far] == [f"memory:///corpus/{one.path[len(str(tmp_path)) + 1 :]}" for one in near]
    assert [texts(one, 128) for one in far] == [texts(one, 128) for one in near]
    assert [one.path[-5:] for one in find_sources(["memory://corpus/*.txt", "memory://corpus/f.parquet"])] == [
        "c.txt", "a.txt", "rquet",
    ]  # fmt: skip
    with pytest.raises(TextError, match=r"'memory://corpus/gone.txt' cannot be read"):
        find_sources(["memory://corpus/gone.txt"])


def test_a_name_at_an_address_is_no_pattern_if_it_exists_and_its_query_no_suffix():
    files = fsspec.filesystem("memory")
    kinds = {"a[1].txt": "text", "b?sig=1.jsonl": "jsonl", "c.jsonl?sig=1.txt": "jsonl", "d.txt.gz?sig=1": "text"}
    for name, kind in kinds.items():
        files.pipe(f"/signed/{name}", b'{"text": "x"}')
        (found,) = find_sources([f"memory://signed/{name}"])
        assert (found.path, found.kind, found.packed) == (f"memory://signed/{name}", kind, "gzip" * (".gz" in name))
    assert [one.path[-9:] for one in find_sources(["memory://signed/[a]*.txt"])] == ["/a[1].txt"]


class Listed(AbstractFileSystem):
    """Keeps its listings, as those of servers do."""

    protocol = "listed"
    here: ClassVar = {}

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path).rstrip("/")
        if path not in self.dircache:
            names = [name for name in self.here if name.startswith(f"{path}/") or name == path]
            self.dircache[path] = [{"name": name, "size": len(self.here[name]), "type": "file"} for name in names]
        return self.dircache[path] if detail else [one["name"] for one in self.dircache[path]]

    def invalidate_cache(self, path=None):
        self.dircache.clear()

    def _open(self, path, mode="rb", **kwargs):
        return io.BytesIO(self.here[path])


@pytest.mark.thorough
def test_what_a_server_said_before_is_asked_again(model_folder, tmp_path, small_pieces):
    fsspec.register_implementation("listed", Listed, clobber=True)
    Listed.here["d/a.txt"] = said(900, 1).encode()
    (then,) = find_sources(["listed://d/*.txt"])
    Listed.here["d/a.txt"] = said(950, 1).encode()
    (now,) = find_sources(["listed://d/*.txt"])
    assert then.size < now.size == len(Listed.here["d/a.txt"])

    def change(what, done, of):
        Listed.here["d/a.txt"] = said(990, 1).encode()

    with pytest.raises(TextError, match=rf"changed while .*a\.txt' had {now.size:,} bytes and has"):
        measure_corpus(
            model_folder, "listed://d/a.txt", tmp_path / "out.csv", measures=["entropy"], window=WINDOW, device="cpu",
            progress=change,
        )  # fmt: skip


def test_a_long_text_of_a_line_is_cut_as_a_file_is(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", ["a", said(500, 1), "武" * 230])
    (source,) = find_sources([path])
    found = read(source, 100)
    assert "".join(doc.text for doc in found) == "a" + said(500, 1) + "武" * 230
    assert max(len(doc.text) for doc in found) <= 125
    places = [doc.where for doc in found]
    assert len(set(places)) == len(places)
    assert places[-2:] == [f"{places[-3]}, character 100", f"{places[-3]}, character 200"]


@pytest.mark.thorough
@given(st.text(st.sampled_from("ab \n\r武😀"), max_size=400), st.integers(8, 90))
@settings(deadline=None, max_examples=80)
def test_pieces_of_a_text_are_the_text(tmp_path_factory, text, step):
    path = tmp_path_factory.mktemp("pieces") / "t.txt"
    path.write_bytes(text.encode())
    source = Source(str(path), "text", len(text.encode()))
    found = texts(source, step)
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
        found = texts(source, step)
        assert "".join(found) == text
        assert found[0] == parts[0]


@pytest.mark.thorough
@given(st.lists(st.text(st.sampled_from("ab武\n"), max_size=60), max_size=12), st.integers(60, 200))
@settings(deadline=None, max_examples=60)
def test_each_line_is_in_one_piece(tmp_path_factory, said_there, step):
    path = write_jsonl(tmp_path_factory.mktemp("lines") / "t.jsonl", said_there, "said")
    source = Source(str(path), "jsonl", path.stat().st_size)
    assert texts(source, step, "said") == [text for text in said_there if text]


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
        texts(source, 1000)


def test_rows_of_parquet_files(tmp_path):
    path = tmp_path / "t.parquet"
    rows = ["tiger", None, "", *[said(40, seed) for seed in range(9)]]
    table = arrow.table({"body": rows, "n": list(range(12))})
    arrow.parquet.write_table(table, path, row_group_size=5)
    (source,) = find_sources([path])
    found = read(source, 64, "body")
    assert [doc.text for doc in found] == [text for text in rows if text]
    assert texts(source, 1 << 20, "body") == [text for text in rows if text]
    assert [doc.where for doc in found][:3] == ["row 0", "row 3", "row 4"]
    filled = [piece for piece in range(source.size // 64) if list(documents(source, piece, piece + 1, 64, "body"))]
    assert len(filled) == 3  # row groups, each read by the piece in which it begins
    with pytest.raises(TextError, match="no column 'text'; it has body, n"):
        texts(source, 64)
    with pytest.raises(TextError, match="column 'n' contains int64"):
        texts(source, 64, "n")


@pytest.mark.thorough
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30), st.integers(100, 3000), st.data())
@settings(deadline=None, max_examples=60)
def test_units_hold_every_piece_once_and_in_order(sizes, step, data):
    packed = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    every = [
        Source(f"{i}", "text", n, "gzip" * zipped) for i, (n, zipped) in enumerate(zip(sizes, packed, strict=True))
    ]
    found = list(units(every, step))
    pieces = [(part.source, i) for unit in found for part in unit.parts for i in range(part.first, part.stop)]
    counts = [min(1, one.size) if one.packed else -(-one.size // step) for one in every]
    assert pieces == [(i, piece) for i, count in enumerate(counts) for piece in range(count)]
    assert [unit.number for unit in found] == list(range(len(found)))
    assert sum(unit.size for unit in found) == sum(sizes)
    assert all(unit.size >= step for unit in found[:-1])


def test_units_have_a_share_of_the_corpus_within_bounds():
    step = step_for(512)
    for size, most in ((3 * step, step), (1 << 34, (1 << 34) // SHARE + step), (10**13, MOST + step)):
        every = [Source("large", "text", size), *(Source(f"{i}", "text", 900) for i in range(500))]
        found = units(every, step)
        assert all(step <= next(found).size <= most for _ in range(3))


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
