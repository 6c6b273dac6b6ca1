"""Tokens of every kind of tokenizer as readable pieces of the text."""

import pytest
from folders import TOKENIZERS, saved
from hypothesis import HealthCheck, given, settings, strategies as st

from headwise.errors import ConfigError, TextError
from headwise.lm.loading import LoadedModel, TokenizedText, load_model
from headwise.lm.loading.characters import by_decoding, decoded_tokens

TEXTS = [
    "hello  world 武龘😀x\n y ", "Hello, café naïve", "武松打虎，龘龘", "  two  ", "a\u0301e\u0301",
    "👩\u200d👩\u200d👧!", "it wasn't unbelievable!", "\tx\r\ny", "İstanbul ﬁne", "<|endoftext|> [SEP] </s>",
    " ", "   ", " \n", "\n ",
]  # fmt: skip


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    found = {}
    for name, make in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-").replace(",", ""))
        kind, head = ("Bert", "Model") if name == "word piece" else ("Llama", "ForCausalLM")
        found[name] = load_model(saved(folder, kind, head, make()))
    return found


def checked(subject: LoadedModel, text: str) -> TokenizedText:
    reading = subject.read(text)
    tokenizer = subject._tokenizer
    ids = tokenizer(text)["input_ids"]
    assert reading.ids.tolist() == ids
    at, said = 0, ""
    for piece, (start, end), special in zip(reading.pieces, reading.spans, reading.special, strict=True):
        assert at <= start <= end <= len(text)
        if special:
            assert start == end
            assert piece in tokenizer.all_special_tokens
        else:
            assert piece == text[start:end] or (piece == " " and start == end)
            said += piece if start < end else ""
        at = end
    if "word-piece" not in subject.name:  # which drops accents and what it calls control characters
        assert said == text
    words = "".join(w for w, s, span in zip(reading.words, reading.special, reading.spans, strict=True)
                    if not s and span[0] < span[1])  # fmt: skip
    assert words == text or not any(a < b for a, b in reading.spans)
    assert [i for a, b in reading.units for i in range(a, b)] == list(range(len(reading)))
    return reading


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_are_the_text(subjects: dict[str, LoadedModel], name: str, text: str) -> None:
    checked(subjects[name], text)


@pytest.mark.thorough_except("word piece", "unigram")
@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=23))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_of_any_text(subjects: dict[str, LoadedModel], name: str, text: str) -> None:
    try:
        checked(subjects[name], text)
    except TextError as error:
        assert "no token" in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", ["byte level", "byte level, whole offsets", "byte fallback"])
def test_a_character_of_many_tokens_stands_at_the_last_of_them(subjects: dict[str, LoadedModel], name: str) -> None:
    reading = subjects[name].read("x龘😀")
    ends = [piece for piece in reading.pieces if piece.strip() and piece != "<s>"]
    assert ends == ["x", "龘", "😀"]
    at = reading.pieces.index("龘")
    assert reading.pieces[at - 2 : at] == ["", ""]
    assert [reading.pieces[b - 1] for _, b in reading.units][-2:] == ["龘", "😀"]
    assert any("inside a character" in remark for remark in reading.remarks)


def test_special_tokens_are_shown_as_what_they_are(subjects: dict[str, LoadedModel]) -> None:
    reading = subjects["word piece"].read("Hello World")
    assert reading.pieces[0] == "[CLS]"
    assert reading.pieces[-1] == "[SEP]"
    assert reading.special == [True] + [False] * (len(reading) - 2) + [True]
    assert "".join(reading.words[1:-1]) == "Hello World"


def test_blanks_and_line_ends_are_no_signs(subjects: dict[str, LoadedModel]) -> None:
    for name, subject in subjects.items():
        pieces = subject.read("hello world\nnew line").pieces
        assert not any(sign in piece for piece in pieces for sign in "ĠĊ▁"), name
        assert not any(piece.startswith("##") for piece in pieces), name


def test_unknown_words_are_counted_and_shown(subjects: dict[str, LoadedModel]) -> None:
    reading = subjects["word piece"].read("hello 龘龘 world")
    assert reading.pieces[1:-1].count("龘") == 2
    assert "2 of the" in reading.remarks[0]
    assert "[UNK]" in reading.remarks[0]


@pytest.mark.thorough
@pytest.mark.parametrize(("text", "words"), [("", "empty"), ("a\ud800", "surrogate")])
def test_what_is_no_text_is_refused(subjects: dict[str, LoadedModel], text: str, words: str) -> None:
    for subject in (*subjects.values(), load_model()):
        with pytest.raises(TextError, match=words):
            subject.read(text)


def test_raw_tokens_are_text_as_the_caller_says_they_are_written() -> None:
    raw = ["Ġhe", "llo", "æŃ", "¦", "Ċ", "ä"]
    assert decoded_tokens(raw, "byte_level") == [" he", "llo", "", "武", "\n", "\ufffd"]
    assert decoded_tokens(["[CLS]", "un", "##able", "to"], "wordpiece") == ["[CLS]", "un", "able", " to"]
    assert decoded_tokens(["▁x", "<0xE6>", "<0xAD>", "<0xA6>", "y"], "sentencepiece") == [" x", "", "", "武", "y"]
    assert decoded_tokens(raw, "text") == raw
    with pytest.raises(ConfigError, match="written='bytes'"):
        decoded_tokens(raw, "bytes")


def test_tokens_without_offsets_are_looked_for_in_the_text() -> None:
    pieces, spans = by_decoding("Hello  Würld, x", ["hello", "w", "ürld", ",", "zzz", "x"], [False] * 6)
    assert pieces == ["Hello", "W", "ürld", ",", "zzz", "x"]
    assert spans == [(0, 5), (7, 8), (8, 12), (12, 13), (13, 13), (14, 15)]
