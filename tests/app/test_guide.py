"""The guide: its pages are what the topics say and print today, and its exercises can be solved and failed."""

import ast
import io
import re
import shlex
import types
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Command
from rich.cells import cell_len
from rich.console import Console

from headwise.errors import ConfigError
from headwise.reports.diagrams import diagram
from headwise.textbook.claims import Verdict
from headwise.textbook.guide import registry
from headwise.textbook.guide.book import rows, table
from headwise.textbook.guide.finding import find
from headwise.textbook.guide.grading.compare import difference
from headwise.textbook.guide.grading.draw import Draw
from headwise.textbook.guide.grading.wire import decoded, encoded
from headwise.textbook.guide.narrow import narrow
from headwise.textbook.guide.notebooks import notebook, to_json
from headwise.textbook.guide.outputs import code_hash, output, tidy
from headwise.textbook.guide.page import index, page, stored_output
from headwise.textbook.guide.registry import exercises, register, topics
from headwise.textbook.guide.sections import SHOWN
from headwise.textbook.guide.topic import Exercise
from headwise.textbook.guide.tour import print_topics
from headwise.textbook.texts import everything
from headwise.wording import LANGUAGES, Bilingual, in_language

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "guide"
NUMBER = r"-?\d[\d,]*\.?\d*(?:e-?\d+)?"


def written(lang: str, name: str) -> str:
    return (GUIDE / lang / f"{name}.md").read_text(encoding="utf-8")


def same_output(one: str, other: str) -> bool:
    """The same words, and numbers that agree to what other machines round differently."""
    if re.sub(NUMBER, "#", one).split() != re.sub(NUMBER, "#", other).split():
        return False
    pairs = zip(re.findall(NUMBER, one), re.findall(NUMBER, other), strict=True)
    numbers = ((float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs)
    return all(abs(a - b) <= 0.02 * max(abs(a), abs(b)) + 0.011 for a, b in numbers)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", topics())
def test_a_page_is_what_its_topic_says(name: str, lang: str):
    topic, text = topics()[name], written(lang, name)
    made_of, printed = stored_output(text)
    assert made_of == code_hash(topic.code_in(lang)), "python scripts/guide.py"
    assert text == page(topic, lang, printed), "python scripts/guide.py"


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", topics())
def test_a_notebook_has_what_its_page_has(name: str, lang: str):
    made = to_json(notebook(topics()[name], lang, stored_output(written(lang, name))[1]))
    assert (GUIDE / "notebooks" / lang / f"{name}.ipynb").read_text("utf-8") == made, "python scripts/guide.py"


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "lang"), [("splitting", "zh")])
def test_a_notebook_runs(name: str, lang: str, tmp_path: Path):
    """Its code, and the command that grades an exercise which is not solved yet."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(GUIDE / "notebooks" / lang / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    before = code[0].outputs[0].text
    book.cells = [cell for cell in book.cells if cell in (*code[:3],) or cell.cell_type == "markdown"]
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    after = "".join(one.text for one in code[0].outputs if one.output_type == "stream")
    assert same_output(tidy(after), before.strip("\n"))
    assert "NotImplementedError" in code[2].outputs[-1].text


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_list_of_topics_is_current(lang: str):
    assert written(lang, "index") == index(lang), "python scripts/guide.py"
    pages = {path.stem for path in (GUIDE / lang).glob("*.md")} - {"index", "sections"}
    assert pages == set(topics())


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_table_of_sections_is_current_and_has_a_row_for_everything(lang: str):
    outputs = {name: stored_output(written(lang, name))[1] for name in topics()}
    assert written(lang, "sections") == table(outputs, lang), "python scripts/guide.py"
    places = [line for line in written(lang, "sections").splitlines() if line.startswith("| ") and "`headwise " in line]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in places]
    assert len(cells) == sum(1 for _ in everything())
    assert all(len(row) == 5 and all((row[0], row[2], row[3].strip("`"), row[4])) for row in cells)


def test_a_place_of_a_claim_that_does_not_hold_says_what_differs():
    judged = (Verdict.FAILS, Verdict.MISLEADING)
    cited = {(row.text.id, row.where) for row in rows() for one in row.claims if one.expected in judged}
    silent = {(row.text.id, row.where) for row in rows() if row.shown.differs is None}
    assert cited & silent == set()


def test_what_is_shown_belongs_to_a_place():
    known = {(row.text.id, row.section.number, *((row.kind, row.number) if row.number else ())) for row in rows()}
    assert set(SHOWN) == known


def places(query: str) -> list[str]:
    return [str(row.where) for row in find(query).rows]


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


@pytest.mark.parametrize("width", [60, 80])
def test_code_in_a_narrow_terminal_is_the_same_code(width: int):
    wide = 0
    for topic in topics().values():
        if not topic.is_command:
            code = narrow(topic.code, width)
            assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(topic.code))
            wide += sum(cell_len(line) > width for line in code.splitlines())
    assert wide <= {60: 20, 80: 2}[width]  # what is no list, call or text stays in one line


def test_tour_points_out_the_line_of_a_place(headwise: Command):
    assert (
        "\n11.4.1，图 1 → right: token 0 = token 0 of heads 0 … 3: True\n"
        in headwise("tour", "11.4.1，图 1", "--lang", "zh").out
    )
    assert "(../" not in headwise("tour", "11.4.1", "--lang", "zh").out


def test_tour_says_where_a_section_differs(headwise: Command):
    assert "this is another layer" in headwise("tour", "(5.3.10)").out
    assert "并不替代词嵌入" in headwise("tour", "11.5.2", "--lang", "zh").out


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if topic.slow else ())
        for name, topic in topics().items()
        if not topic.is_command
    ],
)
def test_the_code_of_a_topic_prints_what_its_page_shows(name: str):
    assert same_output(output(topics()[name], "en"), stored_output(written("en", name))[1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "lang"), [("shapes", "zh"), *((name, "en") for name, topic in topics().items() if topic.is_command)]
)
def test_the_command_of_a_topic_prints_what_its_page_shows(name: str, lang: str):
    assert same_output(output(topics()[name], lang), stored_output(written(lang, name))[1])


@pytest.mark.parametrize("name", topics())
def test_the_picture_of_a_topic_is_there_in_both_languages(name: str):
    for lang in LANGUAGES:
        assert (GUIDE / "pictures" / f"{name}.{lang}.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.thorough
@pytest.mark.parametrize("name", topics())
def test_the_picture_of_a_topic_can_be_drawn(name: str):
    assert len(diagram(topics()[name].picture(), "zh")) < 120_000


@pytest.mark.parametrize("name", exercises())
def test_an_exercise_has_inputs_of_every_size_on_which_ours_agrees_with_itself(name: str):
    one = exercises()[name]
    shapes = set()
    for seed in range(12):
        args = one.inputs(Draw(seed))
        ours = one.ours(*args)
        assert difference(one.ours(*one.inputs(Draw(seed))), ours, one.tolerance) is None
        assert difference(None, ours, one.tolerance) is not None
        shapes.add(str([getattr(arg, "shape", arg) for arg in args]))
        assert difference(decoded(encoded(ours)), ours, 0.0) is None  # as it comes from the process
        assert difference(decoded(encoded(list(args))), list(args), 0.0) is None
    one.ours(*one.inputs(Draw(0, sizes=[], whole=True)))
    assert len(shapes) > 1


def test_a_topic_of_another_package_joins_the_guide_and_names_are_taken_once():
    with pytest.raises(ConfigError, match="'splitting' exists already"):
        register("splitting", topics()["scores"])
    with pytest.raises(ConfigError, match="exercise 'weights-of' exists already"):
        register("other", topics()["scores"])


def test_a_topic_can_be_added_by_one_call(monkeypatch: pytest.MonkeyPatch, headwise: Command):
    def double(x: float) -> float:
        return 2 * x

    one = Exercise(Bilingual("Twice x.", "x 的两倍。"), double, lambda draw: (float(draw.size(0, 9)),))
    others = [replace(one, ours=types.FunctionType(double.__code__, {}, name)) for name in ("twofold", "twice")]
    monkeypatch.setattr(registry, "_registered", {})
    register("doubling", replace(topics()["splitting"], place=1.5, exercises=(one, *others), code="print(2 * 21)"))
    assert list(topics())[1] == "doubling"
    assert "42" in headwise("tour", "doubling").out
    assert "Twice x." in headwise("check", "double").out


def test_tour_runs_a_topic(headwise: Command):
    done = headwise("tour", "splitting", "--lang", "zh")
    assert done.code == 0
    assert "切分成头" in done.out
    assert "merged again: True" in done.out
    assert "headwise check split-heads answer.py --lang zh" in done.out


def test_check_names_an_exercise_that_does_not_exist(headwise: Command):
    done = headwise("check", "split-head")
    assert done.code == 2
    assert "did you mean 'split-heads'" in done.err


LINKS = re.compile(r"!?\[[^\]\n]*\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub and MyST name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")))
def test_no_link_of_the_documentation_is_broken(page: str):
    path = DOCS / page
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in LINKS.findall(re.sub(r"`[^`\n]*`", "", text)):
        if "://" in target or not (target or anchor):
            continue
        to = (path.parent / target).resolve() if target else path
        assert to.exists(), f"{page}: {target}"
        assert not anchor or to.suffix != ".md" or anchor in anchors(to), f"{page}: {target}#{anchor}"
