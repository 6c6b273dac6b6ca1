"""The viewer's page as a document: its words, what it may load, and what it never does."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from headwise.errors import ConfigError
from headwise.reports.messages import message
from headwise.reports.viewer import app as viewer
from headwise.reports.viewer.app import SCRIPTS, viewer_page
from headwise.reports.words import VIEWER, words
from headwise.wording import LANGUAGES

FOLDER = Path(viewer.__file__).parent / "page"
OWN = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
CODE = "\n".join(text for name, text in OWN.items() if name.endswith(".js"))


def test_the_page_uses_exactly_its_words():
    in_document = set(re.findall(r'data-t(?:-\w+)?="(\w+)"', OWN["view.html"]))
    in_scripts = set(re.findall(r"\bT\.(\w+)", CODE))
    by_name = {f"state_{state}" for state in ("reading", "drawing")} | {"linear", "sqrt", "log"}  # T[name]
    used = in_document | in_scripts | by_name
    assert set(VIEWER) <= used <= set(words("en", "viewer"))


def test_a_browser_shows_the_messages_of_the_server_in_both_languages():
    told = message("too_many_tokens", n=2001, tokens=2000, why=message("limit_of_option")).to_dict()
    assert told["text"] == "the text has 2,001 tokens; at most 2,000 are supported: set by --max-tokens"
    assert told["zh"] == "文本有 2,001 个词元；上限为 2,000 个：由 --max-tokens 设定。"


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
    with pytest.raises(ConfigError, match="lang='fr': expected 'en' or 'zh'"):
        viewer_page("fr")
