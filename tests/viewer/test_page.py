"""The viewer's page as a document: its words, what it may load, and what it never does."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from headwise.errors import ConfigError
from headwise.lm.loading.remarks import SENTENCES, map_code, remarks_on_map
from headwise.nn.named import names
from headwise.reports.viewer import words as viewer_words
from headwise.reports.viewer.page import SCRIPTS, viewer_page
from headwise.reports.viewer.said import IN_CHINESE, in_chinese
from headwise.reports.words import LANGUAGES
from headwise.stats import MEASURES, shown_in

FOLDER = Path(viewer_words.__file__).parent / "page"
OWN = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
CODE = "\n".join(text for name, text in OWN.items() if name.endswith(".js"))


def test_every_word_that_is_asked_for_is_there_and_every_word_is_asked_for():
    there = set(viewer_words.words("en"))
    in_document = set(re.findall(r'data-t(?:-\w+)?="(\w+)"', OWN["view.html"]))
    in_scripts = set(re.findall(r"\bT\.(\w+)", CODE))
    built = {f"state_{state}" for state in ("reading", "drawing")} | {"linear", "sqrt", "log"}  # T[name]
    assert in_document | in_scripts | built == there


@pytest.mark.parametrize("lang", LANGUAGES)
def test_marks_of_a_word_are_the_same_in_both_languages(lang):
    table, english = viewer_words.words(lang), viewer_words.words("en")
    for name in english:
        assert sorted(re.findall(r"\{\w+\}", table[name])) == sorted(re.findall(r"\{\w+\}", english[name])), name
        assert table[name].strip() == table[name] != ""


def test_all_that_the_server_says_is_said_in_chinese():
    """Each code has a sentence, with no mark that its values do not fill; and there is no sentence without its code."""
    server = "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.glob("*.py"))
    codes = {*re.findall(r'Remark\(\s*"(\w+)"', server), *SENTENCES} - {"not_allowed"}  # 403: the page's own words
    told = {f"{kind}_{name}" for kind in ("name", "about") for name in shown_in("viewer")}
    told |= {f"unit_{MEASURES[name]().unit}" for name in shown_in("viewer")}
    assert set(IN_CHINESE) == codes
    assert told <= set(in_chinese())
    for code, sentence in SENTENCES.items():
        marks = {mark.partition(":")[0] for mark in re.findall(r"\{([^}]+)\}", sentence)}
        assert set(re.findall(r"\{(\w+)\}", IN_CHINESE[code])) == marks


def test_what_designs_say_of_their_maps_is_said_in_both_languages():
    remarks = [remark for name in names() for remark in remarks_on_map(name)]
    more = set(in_chinese()) - set(IN_CHINESE)
    assert {remark.code for remark in remarks} == {
        x for x in more if x.partition("_")[0] not in ("name", "about", "unit")
    }
    assert map_code("talking_heads") in in_chinese()
    assert in_chinese()[map_code("talking_heads")] in viewer_page()


def test_what_the_report_says_is_not_said_twice():
    assert set(viewer_words.SHARED) & set(viewer_words.WORDS) == set()


def test_all_files_are_in_the_page():
    page = viewer_page()
    assert {name for name in OWN if name.endswith(".js")} == {*SCRIPTS, "words.js"}
    for name, text in OWN.items():
        if name.endswith((".js", ".css")):
            assert text in page, name
    assert "{{" not in page


@pytest.mark.parametrize("lang", [None, "en", "zh"])
def test_only_its_own_scripts_and_style_may_run(lang):
    page = viewer_page(lang)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    for tag in ("script", "style"):
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        hashes = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
        assert allowed[f"{tag}-src"].split() == [f"'sha256-{code}'" for code in hashes]
    assert not re.search(r"https?://|<link[^>]+stylesheet|\ssrc=", page)
    settings = json.loads(re.search(r'id="settings">(.*?)</script>', page, re.S)[1])
    assert settings["lang"] == lang
    assert set(settings["words"]) == set(LANGUAGES)


def test_text_never_becomes_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", CODE)


def test_another_language_is_refused():
    with pytest.raises(ConfigError, match="got 'fr', expected None or one of en, zh"):
        viewer_page("fr")
