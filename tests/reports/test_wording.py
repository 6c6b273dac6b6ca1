"""Texts in two languages: values, copies, plurals, what stands between them."""

import copy
import pickle
import re

import pytest

from headwise.analysis.head_roles.score import DEFINITIONS
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.loading.base import remarks_on_map
from headwise.nn.registry import names
from headwise.reports.messages import message
from headwise.reports.words import NOTEBOOK, REPORT, SHARED, VIEWER, label, words
from headwise.stats import describe, shown_in
from headwise.wording import LIST, Bilingual, check_language, counted, in_language, joined, tr


def test_no_word_is_in_two_tables():
    assert not set(SHARED) & (set(REPORT) | set(VIEWER) | set(NOTEBOOK))
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
    inner = counted("token", 3)
    texts = Bilingual("{a}", "{甲}"), inner, message("panel", zero="{b}", low=0.5, high=1), joined([inner, "x"], LIST)
    for text in texts:
        for same in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
            assert (type(same), str(same), same.zh, vars(same)) == (type(text), str(text), text.zh, vars(text))
            assert same.zh != same


def test_a_text_keeps_what_a_value_looks_like_and_not_the_value():
    class Lost:
        def __reduce__(self):
            raise TypeError

        def __repr__(self):
            return "Lost()"

    text = tr("{option}: expected {what} for {name}", option=Lost(), what=tr("a whole number"), name=[1, 2])
    assert pickle.loads(pickle.dumps(text)).zh == text.zh == "Lost()：[1, 2] 应为整数"
    assert tr("{lr!r}", lr="x") == "'x'"


def test_an_error_in_an_error_is_shown_in_one_language():
    inner = CheckpointError(tr("it is a folder"))
    assert ConfigError(tr("{file}: cannot be written: {why}", file="x", why=inner)).zh == "x：无法写入：是文件夹"
    assert ConfigError("plain").zh == "plain"


def test_one_and_many():
    assert [counted("file", n) for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert [counted("file", n).zh for n in (0, 1, 2)] == ["0 个文件", "1 个文件", "2 个文件"]


def test_a_text_that_no_catalogue_has_stays_english_with_values_in_chinese():
    assert tr("{of} that nobody translated", of=tr("a whole number")).zh == "整数 that nobody translated"


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
