"""Tables of heads: ragged layers, columns with units and errors, and the same table from every file."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.corruption import damaged

from headwise import CheckpointError, ConfigError, HeadTable, ShapeError
from headwise.table import HeadColumn

NAN, INF = float("nan"), float("inf")
SUFFIXES = (".parquet", ".csv", ".json")


def sample() -> HeadTable:
    """Layers of three, two and no heads, with all that a column can hold."""
    entropy = HeadColumn(
        [[2.5, NAN, 0.1], [INF, -7.0], []], unit="nats", description="Shannon's, a mean", range="0 to log m",
        error=[[0.25, NAN, 1 / 3], [0.5, 0.125], []],
    )  # fmt: skip
    share = HeadColumn(
        [[0.1, 0.2, 0.3], [-INF, 0.7], []],
        error=[
            torch.tensor([[0.0, 0.3], [0.1, 0.5], [NAN, INF]], dtype=torch.float64),
            torch.zeros(2, 2),
            torch.zeros(0, 2),
        ],
    )
    columns = {"entropy": entropy, "share": share, "count": [[1, 2, 3], [5, 8], []]}
    about = {"step": 11, "texts": ["话", '"a,b"\n']}
    return HeadTable(columns, layers=["blocks.0", "块,1", ""], title="on a <text>", about=about)


def same(one: HeadTable, other: HeadTable) -> None:
    """Whether they are equal to the last bit, with all that is known of them."""
    assert (one.title, one.about, one.layers, one.places) == (other.title, other.about, other.layers, other.places)
    assert list(one) == list(other)
    for name in one:
        a, b = one[name], other[name]
        assert (a.unit, a.description, a.range, a.error_kind) == (b.unit, b.description, b.range, b.error_kind)
        torch.testing.assert_close(a.flat, b.flat, rtol=0, atol=0, equal_nan=True)
        if a.flat_error is not None:
            torch.testing.assert_close(a.flat_error, b.flat_error, rtol=0, atol=0, equal_nan=True)


def test_columns_layers_and_heads_are_found():
    table = sample()
    assert list(table) == ["entropy", "share", "count"]
    assert [x.tolist() for x in table["count"]] == [[1, 2, 3], [5, 8], []]
    assert table["count"][1].dtype == torch.float64
    assert table["entropy"].error[1].tolist() == [0.5, 0.125]
    assert table["share"].error[0].shape == (3, 2)
    assert table[1, 1] == {"entropy": -7.0, "share": 0.7, "count": 8.0}
    assert table[-2].places == table.layer("块,1").places == ((1, 0), (1, 1))
    assert table.heads == ((0, 1, 2), (0, 1), ())
    assert table.column("count").tolist() == [1, 2, 3, 5, 8]
    assert table.tensor("count", "entropy").shape == (5, 2)
    dense = table.dense("count")
    assert dense.shape == (3, 3)
    assert dense[1, :2].tolist() == [5, 8]
    assert dense[1:].isnan().tolist() == [[False, False, True], [True, True, True]]


@pytest.mark.parametrize("descending", [True, False])
def test_rows_are_sorted_and_nan_comes_last(descending):
    table = sample()
    found = table.sort("entropy", descending=descending)
    finite = [(1, 0), (0, 0), (0, 2), (1, 1)]
    assert found.places == (*(finite if descending else finite[::-1]), (0, 1))
    assert found.column("count").tolist()[-1] == 2
    assert [x.tolist() for x in found["count"]] == [[1, 2, 3], [5, 8], []]  # a layer's heads stay by number
    assert found[1, 1] == table[1, 1]
    assert found["share"].error[0][1].tolist() == [0.1, 0.5]
    assert table.top("entropy", 99, descending=descending).places == found.places[:4]
    assert table.top("entropy", 2).places == ((1, 0), (0, 0))
    torch.testing.assert_close(found.dense("count"), table.dense("count"), equal_nan=True)


def test_equal_numbers_keep_their_order():
    table = HeadTable({"x": [[1.0, 2.0, 1.0], [2.0]]})
    assert table.sort("x").places == ((0, 1), (1, 0), (0, 0), (0, 2))
    assert table.sort("x", descending=False).places == ((0, 0), (0, 2), (0, 1), (1, 0))


def test_rows_and_columns_are_selected():
    table = sample()
    assert list(table.select("count", "entropy")) == ["count", "entropy"]
    assert table.select(layers=["块,1"], heads=[1]).places == ((1, 1),)
    assert table.select(layers=[-2]).places == ((1, 0), (1, 1))
    some = table.select(where=table.column("count") > 2)
    assert some.places == ((0, 2), (1, 0), (1, 1))
    assert some.layers == table.layers
    assert [x.tolist() for x in some["count"]] == [[3], [5, 8], []]
    assert some[0, 2]["count"] == 3
    assert some.dense("count")[0].isnan().tolist() == [True, True, False]


def test_heads_keep_their_numbers():
    table = HeadTable({"x": [[0.5, 0.25], [4.0]]}, heads=[[5, 2], [7]])
    assert table.places == ((0, 5), (0, 2), (1, 7))
    assert table["x"][0].tolist() == [0.25, 0.5]
    assert table[0, 5] == {"x": 0.5}


def test_tables_of_the_same_heads_merge_whatever_the_order_of_rows():
    table = sample()
    both = table.select("count").merge(table.sort("entropy").select("entropy", "share"))
    assert list(both) == ["count", "entropy", "share"]
    same(both.select(*table), table)
    with pytest.raises(ConfigError, match="table 2 also has 'share'; rename it"):
        table.select("count").merge(table.select("share"), table)
    renamed = table.merge(table.renamed({name: f"old {name}" for name in table}))
    assert renamed[0, 2]["old count"] == 3


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (HeadTable({"y": [[1.0, 2.0]]}), "1 layers, expected 2"),
        (HeadTable({"y": [[1.0, 2.0], [3.0, 4.0]]}), "layer 1 has the heads 0, 1, expected 0"),
        (HeadTable({"y": [[1.0, 2.0], [3.0]]}, heads=[[0, 1], [3]]), "layer 1 has the heads 3, expected 0"),
        (HeadTable({"y": [[1.0, 2.0], [3.0]]}, layers=["", "b"]), "layer 1 is 'b', expected ''"),
    ],
)
def test_tables_of_other_heads_do_not_merge(other, said):
    with pytest.raises(ConfigError, match=f"table 1 is about other heads: {said}"):
        HeadTable({"x": [[1.0, 2.0], [3.0]]}).merge(other)


def test_tables_of_layers_are_stacked():
    one, two = HeadTable({"x": [[1.0, 2.0]]}), HeadTable({"x": [[3.0]]})
    found = HeadTable.stack({"a": one, "b": two}, title="both")
    assert (found.layers, found.places, found.title) == (("a", "b"), ((0, 0), (0, 1), (1, 0)), "both")
    assert found["x"][1].tolist() == [3.0]
    assert HeadTable.stack([found, two]).places[-1] == (2, 0)
    with pytest.raises(ConfigError, match=r"table 1 has the columns \['y'\], expected \['x'\]"):
        HeadTable.stack([one, two.renamed({"x": "y"})])


@pytest.mark.thorough_except("sorted-.csv", "none-.json")
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("rows", ["all", "sorted", "none"])
def test_a_file_holds_the_whole_table(tmp_path, suffix, rows):
    table = {"all": sample(), "sorted": sample().sort("entropy"), "none": sample().select(heads=[])}[rows]
    path = tmp_path / "new" / f"table{suffix}"
    table.save(path)
    same(HeadTable.load(path), table)
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_long_descriptions_and_no_names_are_kept(tmp_path, suffix):
    table = HeadTable({"x": HeadColumn([[1.0]], description="long " * 50_000)})
    table.save(tmp_path / f"x{suffix}")
    same(HeadTable.load(tmp_path / f"x{suffix}"), table)


def test_other_programs_can_read_the_files(tmp_path):
    sample().save(tmp_path / "x.csv")
    lines = (tmp_path / "x.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "layer,module,head,entropy,entropy error,share,share low,share high,count,about"
    assert lines[2].startswith("0,blocks.0,1,nan,nan,0.2,0.1,0.5,2.0,")
    sample().save(tmp_path / "x.json")
    content = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["values"]["entropy"] == [2.5, None, 0.1, "inf", -7.0]
    assert content == sample().to_dict()


def test_pandas_gets_a_row_a_head():
    pandas = pytest.importorskip("pandas")
    frame = sample().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc[(frame.layer == 1) & (frame["head"] == 1), "share high"].tolist() == [0.0]
    assert frame["module"].tolist() == ["blocks.0"] * 3 + ["块,1"] * 2


@pytest.mark.parametrize(("module", "call"), [
    ("pandas", lambda path: sample().to_pandas()),
    ("pyarrow", lambda path: sample().save(path / "x.parquet")),
])  # fmt: skip
def test_what_is_not_installed_is_named(monkeypatch, tmp_path, module, call):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"requires {module}: pip install {module}"):
        call(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_damaged_file_is_one_error_that_names_it(tmp_path, suffix):
    path = tmp_path / f"table{suffix}"
    sample().save(path)
    for data in damaged(path.read_bytes(), 200, seed=3):
        path.write_bytes(data)
        try:
            HeadTable.load(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017 (what is damaged may still be a table)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_no_table_is_named(tmp_path, suffix):
    path = tmp_path / f"table{suffix}"
    with pytest.raises(CheckpointError, match=r"does not exist; HeadTable.save writes it"):
        HeadTable.load(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        HeadTable.load(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.update(format="another"), "not of the format"),
        (lambda x: x["head"].pop(), "head: 4 values, expected 5"),
        (lambda x: x["values"].pop("share low"), "it has the columns"),
        (lambda x: x["values"].update(count=[1, 2, 3, 5, "8"]), r"values.count\[4\]: expected a number"),
        (lambda x: x.update(layer=[0, 0, 0, 1, 3]), "layer 3, expected 0 to 2"),
        (lambda x: x.update(head=[0, 1, 2, 0, 0]), "head 0 of layer 1 is there twice"),
        (lambda x: x.update(head=[0, 1, 2, 0, 10**9]), "heads: 1000000000 in layer 1"),
        (lambda x: x["columns"]["count"].update(error="wide"), "columns.count.error"),
    ],
)
def test_wrong_content_is_named(tmp_path, change, said):
    content = sample().to_dict()
    change(content)
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=said):
        HeadTable.load(tmp_path / "x.json")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path, suffix):
    path = tmp_path / f"table{suffix}"
    sample().save(path)
    with pytest.raises(ConfigError, match="plain values for JSON"):
        sample().titled("new", about={"x": object()}).save(path)
    with pytest.raises(ConfigError, match="plain values for JSON"):
        sample().titled("half \ud800").save(path)
    same(HeadTable.load(path), sample())


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: HeadTable({"x": [[1.0], [2.0]], "y": [[1.0, 2.0]]}), ShapeError, r"y: \[2\] heads in the layers"),
        (lambda: HeadTable({"x": torch.ones(2, 3, 5)}), ShapeError, r"layer 0 has shape \[3, 5\]"),
        (lambda: HeadTable({"x": [[1.0]]}, layers=["a", "b"]), ShapeError, "layers: 2 names, expected 1"),
        (lambda: HeadTable({"x": [[1.0, 2.0]]}, heads=[[3, 3]]), ConfigError, "head 3 of layer 0 is there twice"),
        (lambda: HeadTable({"head": [[1.0]]}), ConfigError, "'head' is the name of something else"),
        (lambda: HeadTable({"x": HeadColumn([[1.0]], error=[[1.0]]), "x error": [[1.0]]}), ConfigError, "'x error'"),
        (lambda: HeadColumn([[1.0, 2.0]], error=[[1.0]]), ShapeError, r"error: \[1\] numbers in the layers"),
        (lambda: HeadColumn([[1.0]], error=[[[1.0, 2.0, 3.0]]]), ShapeError, r"error: shape \[3\] a head"),
        (lambda: HeadTable.of_rows({"x": [1.0]}, [(0, 0), (0, 1)]), ShapeError, "x: 1 numbers, expected 2"),
        (
            lambda: sample()["entropie"],
            ConfigError,
            r"column='entropie': did you mean 'entropy'\? expected one",
        ),
        (lambda: sample()[0, 3], ConfigError, r"table\[0, 3\]: the heads of layer 0 are 0, 1, 2"),
        (lambda: sample()[3], ConfigError, "layer 3 is not in the table; it has 3 layers"),
        (lambda: sample().layer("blocks.9"), ConfigError, r"layer='blocks.9': .*the table has blocks.0"),
        (lambda: sample().select(where=[True]), ShapeError, r"select\(where\): 1 values, expected 5"),
        (lambda: sample().top("count", -1), ConfigError, r"top\(k=-1\)"),
        (lambda: sample().renamed({"share": "count"}), ConfigError, "two columns would have the same name"),
        (lambda: sample().save("x.txt"), ConfigError, "expected a name that ends in .parquet, .csv, .json"),
    ],
)
def test_what_does_not_fit_is_named(make, kind, said):
    with pytest.raises(kind, match=said):
        make()


def test_a_table_prints_itself_lined_up():
    lines = repr(sample()).splitlines()
    assert lines[0] == "on a <text>"
    assert lines[1].split() == ["layer", "head", "entropy", "(nats)", "share", "count"]
    assert lines[2].split() == ["0", "blocks.0", "0", "2.500", "±", "0.25", "0.1000", "[0.000,", "0.3000]", "1"]
    assert lines[3].split() == ["0", "blocks.0", "1", "—", "0.2000", "[0.1000,", "0.5000]", "2"]
    assert lines[5].split() == ["1", "块,1", "0", "∞", "±", "0.5", "-∞", "[0.000,", "0.000]", "5"]
    assert len(lines) == 7


def test_long_tables_print_twenty_rows_and_say_how_many_more():
    table = HeadTable({"x": torch.arange(24 * 113).reshape(24, 113)})
    lines = repr(table.top("x", 2711)).splitlines()
    assert lines[1].split() == ["23", "112", "2,711"]
    assert len(lines) == 22
    assert lines[-1] == "… and 2,691 more heads"
    page = table._repr_html_()
    assert page.count("<tr>") == 22
    assert "… and 2,692 more heads" in page


def test_html_escapes_words_and_colours_columns():
    name = "<img src=x onerror=alert(1)>"
    column = HeadColumn([[0.0, 1.0, NAN]], unit="<b>", description='"><script>')
    page = HeadTable({name: column}, layers=[name], title=name)._repr_html_()
    assert not re.search("<(img|b|script)>?", page)
    assert page.count("&lt;img src=x") == 5
    shades = re.findall(r"rgba\(47, 125, 225, ([\d.]+)\)", page)
    assert shades == ["0.00", "0.55"]


def test_numbers_are_float64_on_the_cpu_and_stay_on_a_device():
    for x in (torch.tensor([1.5], dtype=torch.bfloat16), np.array([1.5], np.float16), [1.5], (1.5,)):
        column = HeadColumn([x])
        assert (column.flat.dtype, column.flat.device.type) == (torch.float64, "cpu")
        assert column.flat.item() == 1.5
    table = HeadTable({"x": torch.ones(2, 3, device="meta")}).select(layers=[1])
    assert table["x"][1].device.type == table.dense("x").device.type == "meta"


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_no_zero_is_negative(tmp_path, suffix):
    table = HeadTable({"entropy": torch.tensor([[-0.0, 0.5]]), "max_logit": [[-0.0, -1.0]]})
    path = tmp_path / f"table.{suffix}"
    table.save(path)
    assert "-0.0" not in path.read_text()
    assert "-0" not in repr(table)


def test_a_table_does_not_follow_what_it_was_made_of():
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    table = HeadTable({"x": x})
    with torch.no_grad():
        x += 1
    assert table["x"][0].tolist() == [1, 1]
    assert not table["x"].flat.requires_grad


def test_an_empty_table_prints_and_is_kept(tmp_path: Path):
    table = HeadTable({})
    assert repr(table) == "layer  head"
    table.save(tmp_path / "x.json")
    same(HeadTable.load(tmp_path / "x.json"), table)


def test_texts_that_a_spreadsheet_would_compute_are_marked_in_csv_and_read_back(tmp_path: Path) -> None:
    texts = ["=1+1", "+a", "-b", "@x", "\tt", "\rr", "'=q", "＝w", "'plain", "minus-"]
    columns = {text: [[-1.5, 2.0], [NAN]] for text in texts}
    table = HeadTable(columns, layers=["=cmd|' /C calc'!A0", "-m"], title="=t")
    table.save(tmp_path / "x.csv")
    with open(tmp_path / "x.csv", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert [cell for row in (header, *rows) for cell in row if cell[:1] in ("=", "+", "@", "\t", "\r", "＝")] == []
    assert rows[0][:4] == ["0", "'=cmd|' /C calc'!A0", "0", "-1.5"]  # numbers stay numbers
    same(HeadTable.load(tmp_path / "x.csv"), table)
