"""A sweep in the terminal and as a picture."""

import re

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from sweep_samples import make_model, said
from typer.testing import CliRunner

from headwise.cli.learn import numbers_of
from headwise.cli.program import app
from headwise.corpus import measure_corpus
from headwise.corpus.printing import print_measures
from headwise.errors import ConfigError
from headwise.stats import shown_in
from headwise.wording import speaking

WIDE = "encoder_only_and_long_named"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    (folder / "a.txt").write_text(said(300, 1), encoding="utf-8")
    return measure_corpus(make_model(folder / WIDE), folder / "a.txt", folder / "out.csv", window=24, device="cpu")


def shown(found, width, **options):
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    print_measures(found, console, **options)
    console.file.close()
    return console.export_text()


@pytest.mark.thorough_except("100", "200")
@pytest.mark.parametrize("width", [80, 100, 200])
def test_tables_fit_the_terminal(found, width):
    text = shown(found, width, seconds=3725.2)
    _, _, tables = text.partition("\n\n")
    assert all(len(line) <= width for line in tables.splitlines())
    assert "in 1 h 2 min" in text
    lines = text.splitlines()
    (measures,) = [i for i, line in enumerate(lines) if line.startswith("measure ")]
    measured = shown_in("corpus")
    assert [line.split()[0] for line in lines[measures + 1 : measures + 1 + len(measured)]] == list(measured)
    (heads,) = [i for i, line in enumerate(lines) if line.startswith("layer")]
    assert [line.split()[:2] for line in lines[heads + 1 : heads + 7]] == [[str(i // 3), str(i % 3)] for i in range(6)]
    hidden = [name for name in measured if name not in lines[heads].split()]
    assert (width == 200) == (not hidden)
    assert all(name in lines[-1] for name in hidden)


@pytest.mark.parametrize("name", ["max_logit", "self_mass"])
def test_heads_sorted_by_a_measure(found, name):
    lines = shown(found, 80, sort=name).splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("layer")]
    column = lines[at].split().index(name)
    values = [float(line.split()[column]) for line in lines[at + 1 : at + 7]]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(float(found.table.dense(name).max()), rel=1e-3)


def test_the_result_is_printed_in_chinese(found):
    with speaking("zh"):
        text = shown(found, 80, seconds=61.0)
    assert "用时 1 分 1 秒" in text
    assert re.search(r"entropy +奈特 ", text)
    assert not re.search(r" (nats|keys|mass|tokens|logit) ", text)
    assert re.findall(r"^ *(模型|语料|计算内核|表格) ", text, re.MULTILINE) == ["模型", "语料", "计算内核", "表格"]
    assert re.search(rf"模型  {WIDE}：.* 层 × 3 头", text)
    assert max(map(cell_len, text.split("\n\n")[1].splitlines())) <= 80
    assert "\ue000" not in text


def test_least_and_largest_name_their_heads(found):
    head, body = found.overview()
    assert head[3:] == ["least", "head", "largest", "head"]
    for row in body:
        table = found.table.dense(row[0]).numpy()
        assert row[6] == "L{}H{}".format(*np.unravel_index(table.argmax(), table.shape))
        assert row[4] == "L{}H{}".format(*np.unravel_index(table.argmin(), table.shape))


def test_it_prints_itself(found):
    assert "entropy" in repr(found)
    assert ">entropy (nats)</th>" in found._repr_html_()
    with pytest.raises(ConfigError, match=r"column='reach': .*expected one of 'max_logit'"):
        found.table["reach"]
    with pytest.raises(ConfigError, match=r"moment\('median'\): expected one of value, mean"):
        found.moment("median")


@pytest.mark.thorough
def test_the_command_writes_table_and_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    import matplotlib.image

    (tmp_path / "a.txt").write_text(said(300, 1), encoding="utf-8")
    model, png = make_model(tmp_path / "m", poison="0.1"), tmp_path / "heads.png"
    args = ["measure", "--model", model, "--file", tmp_path / "a.txt", "--out", tmp_path / "out.csv", "--device", "cpu"]
    done = CliRunner().invoke(app, [*map(str, args), "--png", str(png), "--measures", "entropy, self_mass,next_mass"])
    assert done.exit_code == 0, done.output
    assert "layer 0, head 1: scores in" in done.output
    assert "NaN or infinity" in done.output
    picture = matplotlib.image.imread(png)[..., :3]
    assert picture.shape[0] > 200
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 50


@pytest.mark.parametrize(
    ("more", "says"),
    [(["--sort", "entropie"], "sort='entropie'"), (["--png", "heads.jpg"], "png='heads.jpg'"),
     (["--layers", "1,x"], "--layers '1,x'"), (["--heads", "-3"], "--heads '-3'"),
     (["--layers", "2-0"], "--layers '2-0'")],
)  # fmt: skip
def test_options_of_the_command_are_checked_first(tmp_path, more, says):
    (tmp_path / "a.txt").write_text(said(30, 1), encoding="utf-8")
    args = ["measure", "--file", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out.csv"), *more]
    done = CliRunner().invoke(app, args)
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def testnumbers_of_and_ranges():
    assert numbers_of("layers", "0,4-6, 9") == [0, 4, 5, 6, 9]
    assert numbers_of("layers", None) is None
