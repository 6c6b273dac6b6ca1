"""The page as a file: what is in it, and what cannot get into it. What it does is in test_views_browser.py."""

import base64
import hashlib
import json
import re
import zlib

import numpy as np
import pytest
from view_samples import FAMILY, HOSTILE, heads_of, passage, report_of

from headwise.errors import ConfigError
from headwise.reports.data import Passage, Report
from headwise.reports.page import write_report
from headwise.reports.words import words


def page_of(report, tmp_path, **options) -> str:
    path = write_report(report, tmp_path / "report.html", **options)
    return path.read_text(encoding="utf-8")


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)[1])


def weights_of(page: str, data: dict, index: int, layer: int, kind: str) -> np.ndarray:
    """Undo the packing as data.js and codes.js do."""
    letters = re.search(rf'id="w-{index}-{layer}-{kind}">([^<]*)<', page)[1]
    packed = zlib.decompress(base64.b85decode(letters.translate(str.maketrans(",.:", "<>&"))))
    rows, columns = data["passages"][index]["rows"], data["passages"][index]["columns"]
    scale = data["passages"][index][kind]
    tops = np.array(scale["most"][layer])
    codes = codes_of(packed, (len(tops), rows, columns), scale["lower"])
    return (codes / data["levels"]) ** 2 * tops[:, None, None]


def codes_of(packed: bytes, shape: tuple[int, int, int], lower: bool) -> np.ndarray:
    """Cell by cell: the next code of the context that the cells above and to the left determine."""
    counts = np.frombuffer(packed, ">u4", 41).astype(int)
    high, low = np.frombuffer(packed, np.uint8, offset=4 * 41).reshape(2, counts.sum())
    following = np.cumsum(counts) - counts
    codes = np.zeros((shape[0], shape[1] + 2, shape[2] + 2), int)  # with two zeros above and to the left
    for head, r, c in np.ndindex(shape):
        if lower and c > r:
            continue
        at = codes[head, r : r + 3, c : c + 3]
        near = int(8 + 3 * at[1, 2] + at[0, 2] + 3 * at[2, 1] + at[2, 0])
        power = near.bit_length() - 1
        context = 4 * (power - 3) + (near >> (power - 2) & 3)
        at[2, 2] = int(high[following[context]]) << 8 | int(low[following[context]])
        following[context] += 1
    np.testing.assert_array_equal(following, np.cumsum(counts))
    return codes[:, 2:, 2:]


def close(found: np.ndarray, maps: np.ndarray) -> None:
    """Within the error of ten bits."""
    tops = maps.max((1, 2), keepdims=True)
    assert (np.abs(found - maps) <= np.sqrt(maps * tops) / 1023 + tops / 4e6).all()
    np.testing.assert_array_equal(found == 0, maps < tops / (2 * 1023) ** 2)


@pytest.mark.thorough_except("4")
@pytest.mark.parametrize("cell", [1, 4])
def test_page_holds_every_weight(tmp_path, cell):
    shown = passage("话说大宋仁宗天子在位", cell=cell)
    page = page_of(report_of(passage("前文"), shown), tmp_path)
    data = data_of(page)
    for kind, maps in (("mean", shown.maps), ("peak", shown.peaks)):
        for layer in range(2 if maps is not None else 0):
            close(weights_of(page, data, 1, layer, kind), maps[layer])


@pytest.mark.thorough_except("False-2-1", "False-13-5", "True-1-7", "True-5-13", "True-11-11")
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 7), (2, 1), (5, 13), (13, 5), (11, 11)])
@pytest.mark.parametrize("above", [False, True])
def test_page_holds_maps_of_every_shape_with_and_without_weights_above_the_diagonal(tmp_path, rows, columns, above):
    maps = np.random.default_rng(rows * columns).uniform(size=(2, 3, rows, columns)).astype(np.float32) ** 5
    maps = maps if above else np.tril(maps)
    one = Passage("two texts", list("q" * rows), maps, keys=list("k" * columns))
    page = page_of(report_of(one), tmp_path)
    data = data_of(page)
    assert data["passages"][0]["mean"]["lower"] is (not np.triu(maps, 1).any())
    for layer in range(2):
        close(weights_of(page, data, 0, layer, "mean"), maps[layer])


def test_peaks_above_the_diagonal_are_kept_where_means_have_none(tmp_path):
    exact = passage("abcdefgh", cell=2, causal=False)
    page = page_of(report_of(Passage("p", exact.tokens, np.tril(exact.maps), 2, exact.peaks)), tmp_path)
    close(weights_of(page, data_of(page), 0, 1, "peak"), exact.peaks[1])


def test_small_weights_keep_their_digits(tmp_path):
    one = passage("abcdefgh", layers=1, heads=1)
    small = Passage("small", one.tokens, one.maps * np.float32(1e-7))
    page = page_of(report_of(small), tmp_path)
    close(weights_of(page, data_of(page), 0, 0, "mean"), small.maps[0])


def test_nothing_that_a_user_writes_becomes_markup(tmp_path):
    hostile = report_of(
        passage(HOSTILE, HOSTILE), title=HOSTILE, facts=[(HOSTILE, HOSTILE)], notes=[HOSTILE, "\ud83d alone"]
    )
    page = page_of(hostile, tmp_path)
    data = data_of(page)
    assert "".join(data["passages"][0]["tokens"]) == HOSTILE
    assert data["facts"] == [[HOSTILE, HOSTILE]]
    assert data["notes"] == [HOSTILE, "\ud83d alone"]
    assert "<img" not in page
    assert "<!--" not in page
    assert "\u2028" not in page.split('id="report">')[1].split("</script>")[0]
    ends = page.count("</script>")
    assert ends == page.count("<script")


@pytest.mark.thorough
def test_only_the_pages_own_scripts_may_run_and_nothing_may_load(tmp_path, chinese):
    page = page_of(chinese, tmp_path)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    assert rules["script-src"].split() == hashes
    assert rules["default-src"] == "'none'"
    assert not re.search(r"""(?:src|href)=["']?(?!data:)[^"' >]""", page.split('id="report"')[0])
    assert not re.search(r"https?://|url\((?!data:)", page)


def test_numbers_that_are_not_known_are_null(tmp_path):
    data = data_of(page_of(report_of(passage("abc")), tmp_path))
    assert data["statistics"][1]["values"][0][2] is None
    assert data["statistics"][1]["values"][1][2] is not None


def test_weights_that_are_not_finite_do_not_stop_the_report(tmp_path):
    broken = passage("abcd")
    broken.maps[0, 0, 2, :2] = np.nan, np.inf
    page = page_of(report_of(broken), tmp_path)
    found = weights_of(page, data_of(page), 0, 0, "mean")
    np.testing.assert_array_equal(found[0, 2, :2], 0)
    close(found[1:], broken.maps[0, 1:])


def test_colour_range_is_not_set_by_the_first_rows(tmp_path):
    n = 300
    even = np.tril(np.ones((n, n), np.float32)) / np.arange(1, n + 1, dtype=np.float32)[:, None]
    data = data_of(page_of(report_of(Passage("even", list("x" * n), even[None, None])), tmp_path))
    top = data["passages"][0]["mean"]["own"][0][0]
    mass_above = float(even[even > top].sum() / even.sum())
    assert 0.04 < mass_above < 0.051
    assert data["passages"][0]["mean"]["all"] == 1


@pytest.mark.thorough
def test_size_stays_near_that_of_the_weights(tmp_path):
    n = 250
    page = page_of(report_of(passage("水" * n, layers=4, heads=8)), tmp_path)
    # Half of the n x n cells are zero and all but vanish; the others take some nine bits, of which base64 makes twelve.
    assert len(page) < 100_000 + 4 * 8 * n * n * (1 / 2) * (9.5 / 8) * (4 / 3)


def test_page_opens_on_what_is_worth_seeing(tmp_path):
    maps = np.tril(np.ones((2, 2, 9, 9), np.float32)) / np.arange(1, 10, dtype=np.float32)[:, None]
    maps[0, 0] = np.eye(9)[0]  # all on the first token: sharp, and dull
    maps[1, 0, 6] = np.eye(9)[3]
    data = data_of(
        page_of(Report("r", [Passage("p", list("abcdefghi"), maps)], heads_of(2, 2), [["", ""]] * 2), tmp_path)
    )
    assert data["first"] == [1, 0, 6, "q", 0]


@pytest.mark.thorough
def test_page_speaks_both_languages(tmp_path, chinese):
    english, zh = page_of(chinese, tmp_path), page_of(chinese, tmp_path, lang="zh")
    assert "on this text" in english
    assert "这段文本" in zh
    assert '<html lang="zh">' in zh
    for page in (english, zh):
        assert "{{" not in re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.S)
    with pytest.raises(ConfigError, match="'de'"):
        write_report(chinese, tmp_path / "x.html", lang="de")


def test_every_word_that_the_scripts_use_is_in_the_table(tmp_path, chinese):
    page = page_of(chinese, tmp_path)
    used = set(re.findall(r"\bT\.(\w+)", page))
    assert used
    assert used <= set(words("en", "report"))


def test_emoji_and_breaks_survive(tmp_path):
    text = f"a {FAMILY}\ne\u0301\t水"
    data = data_of(page_of(report_of(passage(text)), tmp_path))
    assert "".join(data["passages"][0]["tokens"]) == text


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path, chinese):
    path = tmp_path / "report.html"
    path.write_text("old")
    broken = report_of(passage("ab"))
    object.__setattr__(broken, "notes", [object()])
    with pytest.raises(TypeError):
        write_report(broken, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
