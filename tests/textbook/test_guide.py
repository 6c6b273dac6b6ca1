"""The guide: its pages are what the topics say and print today, and its exercises can be solved and failed."""

import ast
import re
import textwrap
import types
from dataclasses import replace
from pathlib import Path

import pytest

from commands import Command
from headwise.errors import ConfigError
from headwise.wording import LANGUAGES, Bilingual
from headwise_textbook import statements as said, topics as guide
from headwise_textbook.claims import Verdict
from headwise_textbook.exercises import SOLUTIONS, Draw, Exercise
from headwise_textbook.exercises.child import decoded, encoded
from headwise_textbook.exercises.grade import difference
from headwise_textbook.places import SHOWN, rows, table
from headwise_textbook.statements import statements
from headwise_textbook.texts import everything
from headwise_textbook.topics import cell, claims_of, code_hash, exercises, output, register, stored_output, topics

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "guide"
SLOW = {"demonstration", "losses", "pruning"}  # their code takes more than two seconds
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


def without_words(code: str) -> str:
    """The code without comments, and with all strings empty: what is the same in both languages."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            node.values = [one for one in node.values if not isinstance(one, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", topics())
def test_a_page_says_what_its_claims_and_exercises_are_today(name: str, lang: str):
    topic, text = topics()[name], written(lang, name)
    assert stored_output(text)[0] == code_hash(topic.code_in(lang)), "python scripts/guide.py"
    rows = [f"| **{one}** {cell(said)} | {verdict} |" for one, said, verdict in claims_of(topic, lang)]
    assert re.findall(r"^\| \*\*.*$", text, re.MULTILINE) == rows
    option = " --lang zh" if lang == "zh" else ""
    assert not rows or f"`headwise claims --only {','.join(topic.claims)}{option}`" in text
    for one in topic.exercises:
        assert f"$ headwise check {one.name} answer.py{option}" in text
        assert textwrap.indent(one.skeleton, "   ") in text
    assert all(f"../pictures/{name}.{lang}.svg" in line for line in text.splitlines() if line.startswith("!["))


@pytest.mark.parametrize("name", topics())
def test_a_page_has_the_same_code_claims_and_exercises_in_both_languages(name: str):
    topic, pages = topics()[name], [written(lang, name) for lang in LANGUAGES]
    assert topic.is_command or without_words(topic.code_in("en")) == without_words(topic.code_in("zh"))
    for pattern in (r"^\| \*\*([\w-]+)\*\*", r"^(\d\. \*\*[\w-]+)\*\*", r"^\$\$$"):
        en, zh = (re.findall(pattern, page, re.MULTILINE) for page in pages)
        assert en == zh
    titles, others = [page.splitlines()[0][2:] for page in pages], list(topics())
    at = others.index(name)
    for lang, page, title in zip(LANGUAGES, pages, titles, strict=True):
        links = re.findall(r"\(([\w./]+\.md)\)", page.splitlines()[2])
        beside = [f"{one}.md" for one in (*others[max(0, at - 1) : at], "index", *others[at + 1 : at + 2])]
        assert links == [*beside, f"../{'en' if lang == 'zh' else 'zh'}/{name}.md"]
        assert f"| {at + 1} | [{title}]({name}.md) |" in written(lang, "index")


@pytest.mark.parametrize("name", [name for name, topic in topics().items() if not topic.is_command])
def test_the_output_of_a_page_has_the_same_lines_and_numbers_in_both_languages_and_its_words_in_chinese(name: str):
    english, chinese = (stored_output(written(lang, name))[1].splitlines() for lang in LANGUAGES)
    numbers = [[sorted(re.findall(r"\d[\d,.]*\d|\d", line)) for line in lines] for lines in (english, chinese)]
    assert numbers[0] == numbers[1]
    for line in {*english} & {*chinese}:  # names and numbers only, or an error of PyTorch
        assert line.startswith("view:") or not re.search(r"[a-z]{3,} [a-z]{2,}", line), line


def test_every_solution_has_a_task():
    assert set(SOLUTIONS) == set(exercises())


@pytest.mark.parametrize(("lang", "title"), [("en", "mathematical section"), ("zh", "数学推导")])
def test_a_page_with_numbers_of_equations_names_their_text(lang: str, title: str):
    citing = {name for name in topics() if re.search(r"\(5\.3\.\d+\)", written(lang, name))}
    assert len(citing) > 5
    assert {name for name in topics() if title in written(lang, name).split("$$")[0]} == citing


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_page_is_listed(lang: str):
    pages = {path.stem for path in (GUIDE / lang).glob("*.md")} - {"index", "sections", "statements"}
    assert pages == set(topics())


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_table_of_sections_is_current_and_has_a_row_for_everything(lang: str):
    outputs = {name: stored_output(written(lang, name))[1] for name in topics()}
    assert written(lang, "sections") == table(outputs, lang), "python scripts/guide.py"
    places = [line for line in written(lang, "sections").splitlines() if line.startswith("| ") and "`headwise " in line]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in places]
    assert len(cells) == sum(1 for _ in everything())
    assert all(len(row) == 5 and all((row[0], row[2], row[3].strip("`"), row[4])) for row in cells)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_table_of_statements_is_current_and_has_a_verdict_or_a_reason_in_each_row(lang: str):
    page = written(lang, "statements")
    assert page == said.table(lang), "python scripts/guide.py"
    rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] not in ("place", "位置", "---")]
    assert len(rows) == 153
    assert all(len(row) == 4 and all(row) for row in rows)


def test_every_place_and_24_single_sentences_are_statements(monkeypatch: pytest.MonkeyPatch):
    found = statements()
    assert sum(not one.single for one in found) == sum(1 for _ in everything()) == 129
    assert sum(one.single for one in found) == 24
    assert len({(one.text, one.where, one.single) for one in found}) == len(found)
    for one in found:
        assert one.claims or (one.why and one.why.zh), one.where
        assert all(claim.expected is not Verdict.UNDECIDED for claim in one.claims)
        assert all(words and words.zh != words for words in one.says), one.where
    told = said.read_toml("headwise_textbook", "statements.toml")
    monkeypatch.setattr(said, "read_toml", lambda package, name: {**told, "shown": told["shown"][1:]})
    with pytest.raises(ConfigError, match="11: no words, or neither claim nor reason"):
        statements()


def test_a_place_of_a_claim_that_does_not_hold_says_what_differs():
    judged = (Verdict.FAILS, Verdict.MISLEADING)
    cited = {(row.text.id, row.where) for row in rows() for one in row.claims if one.expected in judged}
    silent = {(row.text.id, row.where) for row in rows() if row.shown.differs is None}
    assert cited & silent == set()


def test_what_is_shown_belongs_to_a_place():
    known = {(row.text.id, row.section.number, *((row.kind, row.number) if row.number else ())) for row in rows()}
    assert set(SHOWN) == known


@pytest.mark.thorough_except("splitting", "masks", "merging", "output_projection")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in SLOW else ())
        for name, topic in topics().items()
        if not topic.is_command
    ],
)
def test_the_code_of_a_topic_prints_what_its_page_shows(name: str):
    for lang in LANGUAGES:
        assert same_output(output(topics()[name], lang), stored_output(written(lang, name))[1])


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


@pytest.mark.thorough_beyond(16)
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


@pytest.mark.thorough
def test_a_topic_can_be_added_by_one_call(monkeypatch: pytest.MonkeyPatch, headwise: Command):
    def double(x: float) -> float:
        return 2 * x

    one = Exercise(Bilingual("Twice x.", "x 的两倍。"), double, lambda draw: (float(draw.size(0, 9)),))
    others = [replace(one, ours=types.FunctionType(double.__code__, {}, name)) for name in ("twofold", "twice")]
    monkeypatch.setattr(guide, "_registered", {})
    register("doubling", replace(topics()["splitting"], place=1.5, exercises=(one, *others), code="print(2 * 21)"))
    assert list(topics())[1] == "doubling"
    assert "42" in headwise("tour", "doubling").out
    assert "Twice x." in headwise("check", "double").out


def test_tour_runs_a_topic(headwise: Command):
    done = headwise("tour", "splitting", "--lang", "zh")
    assert done.code == 0
    assert "切分成头" in done.out
    assert "合并后复原: True" in done.out
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
