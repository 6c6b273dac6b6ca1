"""The tokenizer loses nothing, whatever the text."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from headwise.errors import CheckpointError, ConfigError, TextError
from headwise.lm.texts import BYTES, CharTokenizer

BOOK = CharTokenizer.from_text("水浒水浒武松武松 aab\n\n𠀀𠀀")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("水浒武松 ab\n𠀀"))


def test_vocabulary_is_the_bytes_and_then_the_characters_by_code_point() -> None:
    assert BOOK.characters == "\na松武水浒𠀀"  # " " and "b" occur once
    assert BOOK.vocab_size == 256 + 7
    assert BOOK.encode("\n𠀀").tolist() == [256, 262]


@pytest.mark.thorough
@given(TEXTS)
def test_decode_gives_back_what_was_encoded(text: str) -> None:
    assert BOOK.decode(BOOK.encode(text)) == text


@pytest.mark.thorough
@given(TEXTS)
def test_spans_are_the_tokens_of_each_character(text: str) -> None:
    ids, spans = BOOK.encode(text), BOOK.spans(text)
    assert len(spans) == len(text)
    assert [BOOK.decode(ids[start:end]) for start, end in spans] == list(text)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
    assert (spans[-1][1] if spans else 0) == len(ids)


def test_an_unseen_character_is_its_utf8_bytes() -> None:
    assert BOOK.encode("水é龘").tolist() == [BOOK.characters.index("水") + BYTES, 0xC3, 0xA9, 0xE9, 0xBE, 0x98]


def test_byte_rate_changes_the_tokens_and_not_the_text() -> None:
    text = "水浒武松" * 5000
    ids = BOOK.encode(text, byte_rate=0.1, seed=3)
    assert BOOK.decode(ids) == text
    share = (ids < BYTES).sum() / 3 / len(text)  # three bytes a character
    assert share == pytest.approx(0.1, abs=0.01)
    assert np.array_equal(ids, BOOK.encode(text, byte_rate=0.1, seed=3))
    assert not np.array_equal(ids, BOOK.encode(text, byte_rate=0.1, seed=4))


@pytest.mark.parametrize("ids", [[0xE6, 0xB0], [0xFF], [0x80, 257]])
def test_bytes_that_are_no_character_become_the_replacement(ids: list[int]) -> None:
    assert "\ufffd" in BOOK.decode(ids)


def test_half_a_surrogate_pair_is_named() -> None:
    for call in (BOOK.encode, BOOK.spans):
        with pytest.raises(TextError, match=r"character 2 .*U\+D800"):
            call("水浒\ud800")


@pytest.mark.parametrize("token", [-1, BOOK.vocab_size])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(TextError, match=str(token)):
        BOOK.decode([token])


def test_json_round_trip() -> None:
    again = CharTokenizer.from_json(BOOK.to_json())
    assert again.characters == BOOK.characters
    assert "水" in BOOK.to_json()  # three bytes a character in a checkpoint's header, not six


@pytest.mark.parametrize("code", ["", "{}", "[]", '{"characters": 5}', '{"characters": "'])
def test_a_broken_vocabulary_is_a_checkpoint_error(code: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer|not JSON"):
        CharTokenizer.from_json(code)


def test_a_character_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        CharTokenizer("aba")
