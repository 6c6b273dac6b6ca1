"""The page in a real browser: opened from disk, pointed at, clicked, sorted, and silent in the console."""

import re
from dataclasses import replace

import numpy as np
import pytest
from view_samples import FAMILY, HOSTILE, compared, passage, report_of

from headwise.reports.data import Comparison, Passage
from parameters import thorough

pytestmark = pytest.mark.browser


def shown_within(weight: float) -> float:
    """The error of a weight of ten bits (the largest one of its head at most 1), written with three digits."""
    return float(weight) ** 0.5 / 1023 + 0.005 * float(weight) + 1e-6


@pytest.mark.parametrize(
    "text", thorough(["武松打虎。", "水", "\n", FAMILY, HOSTILE, "a" * 700], {"水", "\n", FAMILY, "a" * 700})
)
def test_page_opens_from_disk_without_a_word_in_the_console(show, text):
    page = show(report_of(passage(text, text), title=text, notes=[text]))
    assert page.do("document.querySelector('#failure').hidden")
    assert page.do("document.images.length") == 0
    assert re.match(r"Layer \d · head \d$", page.do("document.querySelector('#map-title').textContent"))
    assert page.do("document.querySelector('#map-base').width") >= 100


@pytest.mark.thorough
def test_pointing_at_the_map_tells_every_weight(played, chinese):
    out = played(chinese, "await ready(); out.said = await sweep(27);", "#layer=1&head=2")
    said = {}
    for line in out["said"]:
        # "query|武 0|0|key|松 1|1|0.123weight", with each b's own number inside it too
        query, key, weight = re.match(r"query\|.*? *(\d+)\|\d+\|key\|.*? *(\d+)\|\d+\|([\d.e-]+)", line).groups()
        said[int(query), int(key)] = float(weight)
    maps = chinese.passages[0].maps[1, 2]
    assert set(said) == {(i, j) for i in range(9) for j in range(9)}
    for at, weight in said.items():
        assert weight == pytest.approx(maps[at], abs=shown_within(maps[at]))
    assert "武" in next(line for line in out["said"] if "query|武" in line)


@pytest.mark.thorough
def test_keys_walk_the_map_and_enter_pins(played, chinese):
    steps = """
      await ready();
      one("#map").focus();
      for (const key of ["ArrowDown", "ArrowDown", "ArrowRight"]) press(one("#map"), key);
      out.tip = text("#tip .pair") + " " + text("#tip .weight");
      press(one("#map"), "Enter");
      one("#map").blur();
      out.pinned = units().findIndex((u) => u.classList.contains("pin"));
      press(document.body, "Escape");
      out.after = units().findIndex((u) => u.classList.contains("pin"));
    """
    out = played(chinese, steps, "#layer=0&head=0")
    # The first key puts the cursor beside the first cell: (1, 0), (2, 0), (2, 1).
    assert "打" in out["tip"]
    assert "松" in out["tip"]
    weight = chinese.passages[0].maps[0, 0, 2, 1]
    assert float(re.search(r" ([\d.]+)weight", out["tip"])[1]) == pytest.approx(weight, abs=shown_within(weight))
    assert (out["pinned"], out["after"]) == (2, -1)


@pytest.mark.thorough
def test_full_size_has_every_character_and_number_of_a_long_text(played):
    words = "".join(chr(0x4E00 + 7 * i) for i in range(137))
    steps = """
      await ready();
      let written = [];
      const fillText = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
        if (this.canvas.id === "map-base") written.push(String(text));
        fillText.call(this, text, ...at);
      };
      const frame = one("#map-frame"), characters = new Set();
      out.room = frame.scrollHeight - frame.clientHeight;
      one("#full").click();
      const scrolled = async (down, right) => {
        written = [];
        frame.scrollTo(right, down);
        frame.dispatchEvent(new Event("scroll"));
        await until(() => written.length);
        return written.filter((text) => /^[01][.][0-9][0-9]$/.test(text));
      };
      for (let at = 0; at <= 35 * 137; at += 300) {
        await scrolled(at, at);
        for (const text of written) if (text.length === 1) characters.add(text);
      }
      out.characters = [...characters].length;
      out.numbers = await scrolled(9999, 9999);
      await scrolled(0, 0);
      one("#map").focus();
      for (let i = 0; i < 30; i++) press(one("#map"), "ArrowDown");
      out.walked = text("#tip");
      out.link = location.hash;
      one("#full").click();
      out.shut = frame.scrollHeight - frame.clientHeight;
    """
    report = report_of(passage(words))
    out = played(report, steps, "#layer=0&head=1")
    assert (out["room"], out["shut"]) == (0, 0)
    assert out["characters"] == 137
    window = next(w for w in range(5, 25) if len(out["numbers"]) == w * (w + 1) // 2)  # a causal map's last corner
    corner = report.passages[0].maps[0, 1, -window:, -window:]
    assert np.array(out["numbers"], float) == pytest.approx(corner[np.tril_indices(window)], abs=6e-3)
    assert words[30] in out["walked"]
    assert "full=1" in out["link"]


@pytest.mark.thorough
def test_text_shows_both_directions_and_a_click_pins(played, chinese):
    steps = """
      await ready();
      const tops = () => all("#tops ol").map((list) => [...list.children].map((li) => li.textContent));
      point(units()[4], "pointerover");
      out.tops = tops();
      out.tint = units().map((u) => u.style.backgroundImage);
      point(one("#strip"), "pointerleave");
      out.cleared = units().every((u) => u.style.backgroundImage === "");
      units()[4].click();
      point(one("#strip"), "pointerleave");
      out.pinned = units().map((u) => u.className);
      point(units()[3], "pointerover", { clientX: 100, clientY: 100 });
      out.tip = text("#tip");
      out.still = tops();
      point(one("#strip"), "pointerleave");
      units()[4].click();
      out.unpinned = units().every((u) => u.className === "");
    """
    out = played(chinese, steps, "#layer=1&head=2")
    maps, tokens = chinese.passages[0].maps[1, 2], chinese.passages[0].tokens
    top = max(maps[4].max(), maps[:, 4].max())
    for side, shares in ((0, maps[4]), (1, maps[:, 4])):
        order = [i for i in np.argsort(-shares, kind="stable") if shares[i] > top / 1000][:5]
        assert [line[0] for line in out["tops"][side]] == [tokens[i] for i in order]
        for line, weight in zip(out["tops"][side], shares[order], strict=True):
            assert float(line[1:]) == pytest.approx(weight, abs=shown_within(weight))
    assert out["still"] == out["tops"]
    assert all("--looks" in tint for tint in out["tint"][:4])
    assert all("--looked" in tint for tint in out["tint"][5:])
    assert "--looks" in out["tint"][4]
    assert "--looked" in out["tint"][4]
    assert out["cleared"]
    assert out["pinned"] == [""] * 4 + ["pin"] + [""] * 4
    between = float(re.search(r"。 → 虎([\d.]+)", out["tip"])[1])
    assert between == pytest.approx(maps[4, 3], abs=shown_within(maps[4, 3]))
    assert out["unpinned"]


@pytest.mark.thorough
def test_thumbnail_row_and_selectors_choose_a_head(played, chinese):
    steps = """
      await ready();
      await until(() => all(".thumb canvas").every((c) => colours(c) > 4));
      const pressed = () => all('.thumb[aria-pressed="true"]').length;
      const row = () => text("tr.on td") + text("tr.on td + td");
      const now = () => [text("#map-title"), pressed(), row(), location.hash];
      all(".thumb")[4].click();
      await until(() => location.hash.includes("head=1"));
      out.thumb = now();
      all("tbody tr")[2].click();
      out.row = now();
      choose("#layer", "1");
      out.selector = now();
      all(".thumb")[0].focus();
      press(all(".thumb")[0], "ArrowDown");
      out.focus = [document.activeElement.layer, document.activeElement.head];
    """
    out = played(chinese, steps)
    assert out["thumb"][:3] == ["Layer 1 · head 1", 1, "11"]
    assert out["row"][:3] == ["Layer 0 · head 2", 1, "02"]
    assert out["selector"][:3] == ["Layer 1 · head 2", 1, "12"]
    assert "layer=1" in out["selector"][3]
    assert out["focus"] == [1, 0]


@pytest.mark.thorough
def test_table_sorts_and_unknown_numbers_stand_last(played, chinese):
    steps = """
      await ready();
      const heads = all("#table th button");
      const order = () => all("tbody tr").map((r) => [r.layer, r.head]);
      out.names = heads.map((h) => h.textContent);
      out.tips = heads.map((h) => h.title);
      heads[2].click();
      out.down = order();
      out.aria = heads[2].parentElement.getAttribute("aria-sort");
      heads[2].click();
      out.up = order();
      heads[3].click();
      out.lost = order();
      out.shown = all("tbody tr").map((r) => r.children[3].textContent);
    """
    out = played(chinese, steps)
    entropy, sink = (chinese.statistics.dense(name).numpy() for name in ("entropy", "sink_mass"))
    down = sorted(np.ndindex(2, 3), key=lambda at: -entropy[at])
    assert [tuple(at) for at in out["down"]] == down
    assert [tuple(at) for at in out["up"]] == down[::-1]
    assert out["aria"] == "descending"
    known = sorted((at for at in np.ndindex(2, 3) if at != (0, 2)), key=lambda at: -sink[at])
    assert [tuple(at) for at in out["lost"]] == [*known, (0, 2)]
    assert out["shown"][-1] == "–"
    assert out["names"][2:] == ["entropynat", "sink massmass", "Strongest pattern"]
    assert out["tips"][2] == "How widely a head looks. Unit: nat."


@pytest.mark.thorough
def test_sentence_and_drag_zoom_and_escape_goes_back(played, chinese):
    steps = """
      await ready();
      await drawn(() => choose("#sentence", "1"));
      out.said = await sweep(12);
      out.faint = units().map((u) => u.classList.contains("out"));
      out.button = one("#unzoom").hidden;
      await drawn(() => press(document.body, "Escape"));
      out.back = [one("#unzoom").hidden, one("#sentence").value, (await sweep(27)).length];
      const over = one("#map-over"), box = over.getBoundingClientRect();
      const drag = (type, x, y) =>
        point(over, type, { clientX: box.left + x * box.width, clientY: box.top + y * box.height });
      drag("pointerdown", 0.3, 0.2); drag("pointermove", 0.7, 0.6);
      await drawn(() => drag("pointerup", 0.7, 0.6));
      out.dragged = [one("#unzoom").hidden, (await sweep(27)).length];
    """
    out = played(chinese, steps)
    assert len(out["said"]) == 16
    assert all(int(number) >= 5 for line in out["said"] for number in re.findall(r"\|(\d+)\|", line))
    assert out["faint"] == [True] * 5 + [False] * 4
    assert out["button"] is False
    assert out["back"] == [True, "-1", 81]
    assert out["dragged"][0] is False
    assert 4 <= out["dragged"][1] < 81


@pytest.mark.thorough
def test_pooled_cells_say_mean_or_maximum_and_their_texts(played):
    pooled = report_of(passage("话说大宋仁宗天子在位，嘉佑三年", cell=4))
    steps = """
      await ready();
      out.mean = await sweep(12);
      await drawn(() => choose("#kind", "peak"));
      out.peak = await sweep(12);
      out.hint = text("#cell-hint");
      out.units = units().map((u) => u.textContent);
    """
    out = played(pooled, steps, "#layer=0&head=2")
    shown = pooled.passages[0]
    assert out["units"] == ["话说大宋", "仁宗天子", "在位，嘉", "佑三年"]
    assert "4 × 4" in out["hint"]
    for lines, maps, word in ((out["mean"], shown.maps, "mean weight"), (out["peak"], shown.peaks, "largest weight")):
        line = next(li for li in lines if li.startswith("query|“在位，嘉” 8–11|8–11|key|“话说大宋” 0–3"))
        assert word in line
        assert float(re.search(r"\|([\d.]+)[a-z ]+$", line)[1]) == pytest.approx(maps[0, 2, 2, 0], rel=1e-2)


@pytest.mark.thorough
def test_whole_characters_and_visible_breaks(played):
    tokens = ["a", " ", *FAMILY, "\n", "e", "\u0301", "\t", "", "水", "\u202e"]
    steps = """
      await ready();
      out.units = units().map((u) => u.textContent);
      out.breaks = all("#strip br").length;
      point(units()[2], "pointerover");
      out.sum = all("#tops ol")[0].textContent;
    """
    shown = passage(tokens, causal=False)
    out = played(report_of(shown), steps, "#layer=0&head=1")
    assert out["units"] == ["a", "␣", FAMILY, "↵", "e\u0301", "⇥", "水", "U+202E"]
    assert out["breaks"] == 1
    # The emoji looks as the mean of its five code points does.
    weight = shown.maps[0, 1, 2:7, 0].mean()
    assert float(re.search(r"a([\d.]+)", out["sum"])[1]) == pytest.approx(weight, abs=shown_within(weight))


@pytest.mark.thorough
def test_passages_scales_and_themes(played):
    two = report_of(passage("武松打虎"), passage("The tiger is dead. " * 5, "second"))
    steps = """
      await ready();
      out.kind = one("#kind-field").hidden;
      await drawn(() => choose("#passage", "1"));
      await until(() => units().length === 95);
      out.text = units().map((u) => u.textContent).join("");
      const look = () => one("#map-base").toDataURL();
      const first = look();
      const seen = [first];
      for (const [field, value] of [["#scale", "linear"], ["#scale", "log"], ["#range", "all"]]) {
        await drawn(() => choose(field, value)); seen.push(look());
      }
      const before = document.documentElement.dataset.theme;
      await drawn(() => one("#theme").click());
      out.theme = document.documentElement.dataset.theme !== before;
      seen.push(look());
      out.different = new Set(seen).size;
    """
    out = played(two, steps, "#layer=0&head=2")
    assert out == {"kind": True, "text": "The␣tiger␣is␣dead.␣" * 5, "theme": True, "different": 5}


@pytest.mark.thorough
def test_packaged_font_is_used(played, chinese):
    steps = """
      await document.fonts.load('16px "Headwise Han"', "虎");
      out.fonts = [...document.fonts].map((f) => [f.family.replaceAll('"', ""), f.status]);
    """
    fonts = played(chinese, steps)["fonts"]
    assert fonts == [["Headwise Han", "loaded"], ["Headwise Han Quotes", "unloaded"]]


@pytest.mark.thorough
def test_link_keeps_what_was_chosen_and_survives_nonsense(played, chinese):
    steps = """
      await ready();
      out.now = [text("#map-title"), units().findIndex((u) => u.className === "pin"), one("#scale").value];
    """
    out = played(chinese, steps, "#layer=1&head=0&pin=3&scale=log")
    assert out["now"] == ["Layer 1 · head 0", 3, "log"]
    out = played(chinese, steps, "#layer=99&head=-1&pin=x&scale=alert(1)&sentence=7")
    assert out["now"][1:] == [-1, "sqrt"]


@pytest.mark.thorough
def test_many_characters_are_shown_at_once(played):
    n, cell = 20_000, 100
    rng = np.random.default_rng(3)
    maps = np.tril(rng.random((1, 2, n // cell, n // cell), np.float32)) / n
    long = Passage("long", list("水浒传。" * (n // 4)), maps, cell, maps * 3, [(i, i + 100) for i in range(0, n, 100)])
    report = report_of(long)
    steps = """
      await ready();
      out.units = units().length;
      out.sentences = one("#sentence").options.length;
      out.said = (await sweep(9)).length;
    """
    out = played(report, steps)
    assert (out["units"], out["sentences"]) == (200, 201)
    assert out["said"] > 20


@pytest.mark.thorough
def test_a_report_without_comparisons_has_no_tab_for_them(played, chinese):
    steps = "await ready(); out.tabs = all('#tabs button').map((e) => e.hidden); out.all = one('#tabs').hidden;"
    assert played(chinese, steps, "#tab=compare") == {"tabs": [False, True, False], "all": False}
    alone = report_of(passage("武松打虎", layers=1, heads=1))
    assert played(alone, steps, "#tab=sides")["all"]


@pytest.mark.thorough
def test_matrix_tells_every_pair_in_either_order_and_a_click_shows_the_head(played):
    report = compared()
    out = played(
        report,
        """
        const cells = () => {
          const matrix = one("#matrix"), box = matrix.getBoundingClientRect(), found = [], left = 58;
          const cell = Math.max(3, Math.min(40, (matrix.parentElement.clientWidth - left - 2) / 6));
          for (let r = 0; r < 6; r++) for (let c = 0; c < 6; c++) {
            const clientX = box.left + left + (c + 0.5) * cell, clientY = box.top + (r + 0.5) * cell;
            point(matrix, "pointermove", { clientX, clientY });
            found.push([...one("#tip").querySelectorAll("b, .weight")].map((e) => e.firstChild.textContent));
          }
          return found;
        };
        out.maps = one("#maps").hidden; out.controls = one("#controls").hidden;
        out.alike = cells();
        choose("#order", "layers"); out.layers = cells();
        choose("#comparison", "1"); out.apart = cells(); out.pairs = all("#pairs button").map((e) => e.textContent);
        const matrix = one("#matrix"), box = matrix.getBoundingClientRect();
        point(matrix, "click", { clientX: box.left + 58 + 2, clientY: box.top + 40 * 4.5 });
        await ready();
        out.title = text("#map-title"); out.open = one("#compare").hidden; out.hash = location.hash;
        out.card = text("#card");
        """,
        "#tab=compare",
    )  # fmt: skip
    assert out["maps"]
    assert out["controls"]
    names = [f"L{i // 3}H{i % 3}" for i in range(6)]
    cosine, apart = (comparison.values for comparison in report.comparisons)
    for key, values, order in (
        ("alike", cosine, report.comparisons[0].order), ("layers", cosine, range(6)), ("apart", apart, range(6)),
    ):  # fmt: skip
        pairs = [(i, j) for i in order for j in order]
        assert [cell[:2] for cell in out[key]] == [[names[i], names[j]] for i, j in pairs]
        said = [float(cell[2]) for cell in out[key]]
        np.testing.assert_allclose(said, [values[pair] for pair in pairs], rtol=6e-3, atol=1e-5)
    upper = sorted((apart[i, j], f"{names[i]} – {names[j]}") for i in range(6) for j in range(i + 1, 6))
    assert out["pairs"] == [name for _, name in upper[:12]]
    assert out["title"] == "Layer 1 · head 1"
    assert out["open"]
    assert "tab=" not in out["hash"]
    assert "first 0.80: a label, on 12 queries and in 97 % of the samples" in out["card"]


@pytest.mark.thorough
def test_importance_shows_every_number_and_the_table_the_roles(played):
    report = compared()
    out = played(
        report,
        """
        one("#tab-compare").click();
        const cells = () => all("#weighty button").map((e) => Number(e.textContent));
        out.without = cells(); out.most = text("#most button");
        out.least = all("#least button").map((e) => e.textContent);
        choose("#method", "1"); out.slope = cells(); out.hash = location.hash;
        one("#weighty button:nth-of-type(3)").click(); await ready();
        out.title = text("#map-title");
        out.roles = all("#table tbody tr").map((row) => row.lastChild.textContent);
        press(one("#tab-maps"), "ArrowRight");
        out.focus = document.activeElement.id; out.shown = !one("#compare").hidden;
        """,
    )  # fmt: skip
    without, slope = (column.flat.numpy() for column in report.importance.values())
    np.testing.assert_allclose(out["without"], without, rtol=5.1e-2)  # two digits
    np.testing.assert_allclose(out["slope"], slope, rtol=5.1e-2)
    best = int(without.argmax())
    assert out["most"] == f"L{best // 3}H{best % 3}"
    assert out["least"] == []  # six heads fill the first list
    assert "tab=compare" in out["hash"]
    assert out["title"] == "Layer 0 · head 2"
    assert out["roles"] == ["previous 0.91", "first 0.80, nearby 0.95", "tendency: nearby 0.40"] * 2
    assert out["focus"] == "tab-compare"
    assert out["shown"]


@pytest.mark.thorough
def test_a_head_that_a_layer_does_not_have_has_no_place(played):
    full = compared()
    cosine = Comparison("cosine", full.comparisons[0].values, [4, 1, 0, 2, 3], "", "Of outputs.")
    fewer = [table.select(where=[True] * 5 + [False]) for table in (full.statistics, full.importance)]
    report = replace(full, statistics=fewer[0], importance=fewer[1], comparisons=[cosine])
    out = played(
        report,
        """
        await ready();
        out.thumbs = all(".thumb").map((e) => e.title.split(" · ").slice(0, 2).join(" "));
        out.rows = all("#table tbody tr").length;
        choose("#layer", "0"); choose("#head", "2"); await ready(); choose("#layer", "1"); await ready();
        out.heads = one("#head").length; out.title = text("#map-title");
        const thumb = all(".thumb")[1]; thumb.focus(); press(thumb, "ArrowDown");
        out.below = document.activeElement.title.split(" · ").slice(0, 2).join(" ");
        one("#tab-compare").click();
        out.cells = all("#weighty button").length; out.pairs = all("#pairs button").length;
        """,
    )  # fmt: skip
    assert out["thumbs"] == [f"Layer {layer} head {head}" for layer, head in report.heads]
    assert out["rows"] == out["cells"] == 5
    assert out["heads"] == 2
    assert out["title"] == "Layer 1 · head 1"
    assert out["below"] == "Layer 1 head 1"
    assert out["pairs"] == 10
