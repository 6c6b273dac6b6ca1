"""`headwise tour`: what a reader types finds the place meant, and what is shown of it fits the terminal."""

import io
import re
import shlex

import pytest
from rich.cells import cell_len
from rich.console import Console

from commands import Command
from headwise.wording import LANGUAGES, in_language
from headwise_textbook.places import SIMPLIFIED, TERMS, find, rows
from headwise_textbook.topics import topics
from headwise_textbook.tour import print_topic, print_topics


def places(query: str) -> list[str]:
    return [str(row.where) for row in find(query).rows]


@pytest.mark.thorough
@pytest.mark.parametrize("lang", LANGUAGES)
def test_each_place_of_the_table_is_found_by_what_the_table_says(lang: str):
    """As it is printed, with full-width characters, without marks (in Chinese also without spaces), with its text."""
    full = str.maketrans({chr(code): chr(code + 0xFEE0) for code in range(0x21, 0x7F)})
    for row in rows():
        label, title = in_language(row.where, lang), in_language(row.text.title, lang)
        bare = re.sub(r"[,，()§《》]", " ", label)
        forms = [label, label.translate(full), label.upper(), bare]
        forms += [bare.replace(" ", "")] if lang == "zh" else []
        forms += [] if row.text.is_counted else [f"{title} {label}"]
        forms += [] if row.shown.command else [shlex.split(in_language(row.command, lang))[2]]
        for form in forms:
            assert places(form) == [row.where], form


@pytest.mark.parametrize("lang", LANGUAGES)
def test_each_title_finds_all_sections_of_that_title(lang: str):
    sections = [row for row in rows() if row.kind == "section"]
    for row in sections:
        title = in_language(row.section.title, lang)
        found = find(title)
        assert row.shown.topic in found.topics, title
        if found.topic is None:
            assert [one.where for one in found.rows] == [
                one.where for one in sections if in_language(one.section.title, lang) == title
            ]
    for topic in topics().values():
        assert [find(name).topic for name in (topic.name, in_language(topic.title, lang))] == [topic] * 2


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("11.6.2, listing 1", "11.6.2, listing 1"), ("tutorial 1 part 2", "first tutorial part 2"),
        ("教程一 第 2 部分", "first tutorial part 2"), ("11.6.2，代码 1", "11.6.2, listing 1"),
        ("公式 5.3.7", "§5.3.5, eq. (5.3.7)"), ("（５．３．７）", "§5.3.5, eq. (5.3.7)"), ("第十一章", "11"),
        ("第五章第三节", "§5.3"), ("第 11 章 2.4 节", "11.2.4"), ("figure 1 of 11.2.1", "11.2.1, figure 1"),
        ("11.3.1 (2)", "11.3.1, eq. (2)"), ("eq 5.3.9", "§5.3.6, eq. (5.3.9)"), ("Part 3", "Part 3"),
        ("notes 5", "second tutorial part 5"), ("tutorial 6", "first tutorial part 6"), ("fig. 12", None),
        ("demonstration 3", "Water Margin demonstration part 03"), ("水浒传演示第三部分", None),
        ("教程一第二部分第2个代码", "first tutorial part 2, listing 2"), ("PyTorch 代码", "11.6.2"),
        ("book chapter 11.9.1, item 2", "11.9.1"), ("table 3", "11.8.1, table 1"), ("11.6.2 code", None),
    ],
)  # fmt: skip
def test_a_place_is_found_in_the_words_of_readers(query: str, found: str | None):
    others = {
        "fig. 12": "Water Margin demonstration part 03, figure 12", "11.6.2 code": "11.6.2, listing 1",
        "水浒传演示第三部分": "Water Margin demonstration part 03",
    }  # fmt: skip
    assert places(query) == [found or others[query]]


@pytest.mark.parametrize(
    ("query", "topic"),
    [
        ("自注意力", "scores"), ("自注意力機制", "scores"), ("因果掩码", "masks"), ("因果遮罩", "masks"),
        ("GQA", "kv_sharing"), ("KV cache", "hardware"), ("为什么要转置", "splitting"), ("為什麼要轉置?", "splitting"),
        ("多頭注意力", "why_heads"), ("水滸傳演示", "demonstration"), ("注意力汇", "masks"), ("參數量", "parameters"),
    ],
)  # fmt: skip
def test_a_topic_is_found_by_terms_questions_and_traditional_characters(query: str, topic: str):
    assert find(query).topics == [topic]


def test_every_term_finds_its_topic_and_traditional_characters_have_one_simplified_each():
    for name, terms in TERMS.items():
        assert [find(term).topics for term in terms] == [[name]] * len(terms), name
    assert all(old != new and chr(new) not in map(chr, SIMPLIFIED) for old, new in SIMPLIFIED.items())


@pytest.mark.parametrize(
    ("query", "matches"),
    [
        ("11.4", ["11.4.1", "11.4.2", "11.4.3"]),
        ("concatenation", ["11.4.1", "second tutorial part 5"]),
        ("mathematical section §5.3.4, eqs. 5.3.3, 5.3.4", ["§5.3.4, eq. (5.3.3)", "§5.3.4, eq. (5.3.4)"]),
        ("表 1 教科书", [f"{where}, table 1" for where in ("11.7.1", "11.7.2", "11.8.1", "11.10.1", "Part 3")]),
        ("教程二", ["first tutorial part 2", *(f"second tutorial part {i}" for i in range(1, 7))]),
    ],
)
def test_what_fits_several_places_shows_all(headwise: Command, query: str, matches: list[str]):
    assert places(query) == matches
    if len(find(query).topics) > 1:
        out = headwise("tour", query, "--lang", "en").out
        assert f"{len(matches)} places fit" in out
        assert all(one in out for one in matches)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(
    ("section", "nearest"),
    [
        ("5.3.21", "5.3.19"), ("11.2.9", "11.2.4"), ("tutorial 9", "first tutorial part 7"), ("spliting", "splitting"),
        ("", "why"), ("11.6.2 table 1", "11.6.2, listing 1"), ("listing 9", "listing 3"), ("11.6.2 foo", "11.6.2"),
    ],
)  # fmt: skip
def test_a_section_that_does_not_exist_is_answered_with_the_nearest(headwise: Command, section: str, nearest: str):
    done = headwise("tour", section)
    assert done.code == 2
    assert nearest in done.err
    assert done.err.count("\n") == 1
    chinese = headwise("tour", section, "--lang", "zh").err
    assert "没有这一处" in chinese
    assert "unknown" not in chinese


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_names_the_text_of_each_section_and_breaks_no_name(lang: str, columns: int):
    printed = io.StringIO()
    print_topics(Console(file=printed, width=columns), lang)
    lines = printed.getvalue().splitlines()
    assert all(cell_len(line) <= columns for line in lines)
    for row in (row for row in rows() if row.kind == "section"):
        assert any(in_language(row.where, lang) in line for line in lines)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_code_fits_a_terminal_and_keeps_its_lines_in_a_narrower_one(lang: str):
    for topic in topics().values():
        assert max(map(cell_len, topic.code_in(lang).splitlines())) <= 80, topic.name
    printed = io.StringIO()
    print_topic(topics()["splitting"], Console(file=printed, width=60), lang)
    assert topics()["splitting"].code_in(lang) in printed.getvalue()


def test_tour_points_out_the_line_of_a_place(headwise: Command):
    assert (
        "\n11.4.1，图 1 → 对: 词元 0 = 词元 0 在头 0 … 3 中的结果: True\n"
        in headwise("tour", "11.4.1，图 1", "--lang", "zh").out
    )
    assert "(../" not in headwise("tour", "11.4.1", "--lang", "zh").out


@pytest.mark.thorough
def test_a_place_of_several_words_needs_no_quotation_marks(headwise: Command):
    assert headwise("tour", "notes", "6").out == headwise("tour", "notes 6").out


@pytest.mark.thorough
def test_tour_says_where_a_section_differs(headwise: Command):
    assert "this is another layer" in headwise("tour", "(5.3.10)").out
    assert "并不替代词嵌入" in headwise("tour", "11.5.2", "--lang", "zh").out
