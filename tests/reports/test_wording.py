"""Every word and message of the report, the viewer and loaded models in English and Chinese."""

import copy
import pickle
import re
from string import Formatter

import pytest

from headwise.analysis.head_roles import DEFINITIONS
from headwise.cli.doctor import TERMS as DOCTOR
from headwise.cli.options import SENTENCES as COMMANDS
from headwise.compress.source import TERMS
from headwise.corpus.printing import WORDS as SWEEPS
from headwise.errors import ConfigError
from headwise.lm.loading.base import SENTENCES, remarks_on_map
from headwise.nn.registry import names
from headwise.plan.tables import TERMS as PLANS
from headwise.reports.messages import MESSAGES, message
from headwise.reports.words import COLUMNS, NOTEBOOK, REPORT, SHARED, VIEWER, label, words
from headwise.stats import describe, shown_in
from headwise.wording import Bilingual, Message, check_language, in_language, joined

TABLES = {
    "shared": SHARED,
    "report": REPORT,
    "viewer": VIEWER,
    "columns": COLUMNS,
    "messages": MESSAGES,
    "loading": SENTENCES,
    "notebook": NOTEBOOK,
    "commands": COMMANDS,
    "changes": TERMS,
    "sweeps": SWEEPS,
    "plans": PLANS,
    "doctor": DOCTOR,
}
# Names, signs and formulas, and the word for the other language.
SAME = [
    VIEWER["language"],
    MESSAGES["failure"],
    TERMS["error of W_Q W_Kᵀ"],
    TERMS["how"],
    TERMS["named_sizes"],
    PLANS["input_of"],
    PLANS["remark"],
    DOCTOR["refusal"],
    SWEEPS["model_of"],
]


def values_in(text: str) -> list[str]:
    return sorted(name for _, name, _, _ in Formatter().parse(text) if name is not None)


def wrong(english: str, chinese: str) -> bool:
    edges = [english[edge].isspace() == chinese[edge].isspace() for edge in (0, -1)] if english and chinese else [False]
    written = english.strip() != "" and (re.search("[一-鿿]", chinese) or (english, chinese) in SAME)
    # Both begin and end with a blank or a line end, or neither.
    return not (written and all(edges) and values_in(english) == values_in(chinese))


@pytest.mark.parametrize("table", TABLES)
def test_both_languages_have_the_same_values(table):
    assert {key: both for key, both in TABLES[table].items() if wrong(*both)} == {}


@pytest.mark.parametrize(
    "both", [("a {x}", "甲{y}"), ("a ", "甲"), (" ", "甲 "), ("a", "b"), ("", "甲"), ("a {x}", "甲")]
)
def test_languages_that_differ_are_found(both):
    assert wrong(*both)


def test_no_word_is_in_two_tables():
    assert not set(SHARED) & (set(REPORT) | set(VIEWER))
    assert {key for key in set(REPORT) & set(VIEWER) if REPORT[key] == VIEWER[key]} == set()


def test_statistics_roles_and_notes_of_designs_have_chinese_words():
    for place in ("report", "viewer"):
        assert all(re.search("[一-鿿]", describe(name, "zh").label) for name in shown_in(place))
    assert all(re.search("[一-鿿]", definition.word.zh) for definition in DEFINITIONS.values())
    notes = [note for name in names() for note in remarks_on_map(name)]
    assert notes
    assert all(re.search("[一-鿿]", note.zh) for note in notes)


def test_a_message_formats_its_values_in_each_language():
    inner = message("limit_of_option")
    told = message("too_many_tokens", n=2011, tokens=1009, why=inner)
    assert told == "the text has 2,011 tokens; at most 1,009 are supported: set by --max-tokens"
    assert told.zh == "文本有 2,011 个词元；上限为 1,009 个：由 --max-tokens 设定。"
    assert told.to_dict()["values"] == {"n": 2011, "tokens": 1009, "why": inner.to_dict()}


def test_texts_are_copied_with_both_languages():
    for text in (Bilingual("{a}", "{甲}"), Message("m", "{n} {{b}}", "{n} {{乙}}", n=3)):
        for same in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
            assert (type(same), str(same), same.zh, vars(same)) == (type(text), str(text), text.zh, vars(text))


def test_text_without_chinese_is_shown_as_it_is():
    assert in_language("plain", "zh") == "plain"
    assert joined(["武松", Bilingual("two", "二")]).zh == "武松，二"
    assert joined(["武松", Bilingual("two", "二")]) == "武松, two"


def test_columns_are_labelled():
    assert label("loss without it", "zh") == "去掉后的损失变化"
    assert label("loss without it", "en") == "loss without it"
    assert label("my_own", "zh") == "my own"
    assert label("entropy", "zh", short=True) == "熵"


def test_another_language_is_refused():
    for call in (check_language, lambda lang: words(lang, "report")):
        with pytest.raises(ConfigError, match="lang='fr': expected 'en' or 'zh'"):
            call("fr")
