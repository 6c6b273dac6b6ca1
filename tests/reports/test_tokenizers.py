"""A text is shown with the tokenizer of any library, and a wrong tokenizer is refused by name."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.lm.texts import CharTokenizer
from headwise.reports.passages import decoded, inputs_of


def raises(text: str) -> Any:
    raise KeyError(text)


LETTERS = "abcdefghijklmnopqrstuvwxyz ,"
BY_LETTER = SimpleNamespace(
    encode=lambda s: [LETTERS.index(c) for c in s], decode=lambda x: "".join(LETTERS[i] for i in x)
)
BY_BYTE = SimpleNamespace(encode=lambda s: [*s.encode()], decode=lambda x: bytes(x).decode("utf-8", "replace"))
PIECES = ["<s>", "▁the", "▁ti", "ger"]
SENTENCEPIECE = SimpleNamespace(encode=lambda s: [0, 1, 2, 3], id_to_piece=PIECES.__getitem__, decode=raises)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(300, 6), hw.MultiHeadAttention(6, 3)).eval()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tokenizer", "text", "tokens"),
    [
        (BY_LETTER, "the tiger", list("the tiger")),
        (BY_BYTE, "é虎a", ["é", "虎", "a"]),
        (SENTENCEPIECE, "the tiger", ["<s>", " the", " ti", "ger"]),
        (CharTokenizer("tigerh "), "the tiger", list("the tiger")),
    ],
)
def test_a_text_is_shown_token_by_token(model: nn.Module, tokenizer: Any, text: str, tokens: list[str]) -> None:
    assert hw.show(model, tokenizer, text).passages[0].tokens == tokens  # bytes of a character are one unit
    ids = torch.as_tensor(np.asarray(tokenizer.encode(text)))
    assert hw.show(model, tokenizer, ids).passages[0].tokens == tokens


@pytest.mark.thorough
def test_one_of_the_package_tokenizers(model: nn.Module) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (the hf extra)")
    words = {word: i for i, word in enumerate(["[UNK]", "the", "ti", "##ger", ","])}
    own = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    own.decoder = tokenizers.decoders.WordPiece()
    report = hw.show(model, own, "the tiger, the")
    assert report.passages[0].tokens == ["the", " ti", "ger", ",", " the"]
    assert hw.show(model, own, "the bear").passages[0].special == [1]


def test_blanks_are_kept_of_a_tokenizer_that_only_decodes_and_removes_those_at_the_ends() -> None:
    words = ["▁the", "▁ti", "ger"]
    stripping = SimpleNamespace(decode=lambda ids: "".join(words[i] for i in ids).replace("▁", " ").strip())
    assert decoded(stripping, [0, 1, 2]).texts == [" the", " ti", "ger"]


def test_a_character_that_never_ends_is_shown() -> None:
    assert decoded(BY_BYTE, [97, 0xE8]).texts == ["a", "�"]
    assert decoded(BY_BYTE, [0xE8] * 5).texts == ["", "", "", "�" * 4, "�"]


def test_ids_outside_of_a_vocabulary_are_shown_as_numbers() -> None:
    assert decoded(SimpleNamespace(id_to_token={1: "##ger"}.get), [1, 7]).texts == ["##ger", "7"]


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (object(), r"tokenizer: object has no encode; expected a tokenizer of transformers .*encode\(text\)"),
        (len, "tokenizer: builtin_function_or_method has no encode"),
        (BY_LETTER, "tokenizer: encode of SimpleNamespace raised ValueError: substring not found"),
        (SimpleNamespace(encode=raises), "encode of SimpleNamespace raised KeyError: '虎'"),
        (SimpleNamespace(encode=lambda s: []), r"encode\(text\) of 1 characters returned \[\], no token ids"),
        (SimpleNamespace(encode=lambda s: ["ti", "ger"]), "returned .'ti', 'ger'., no token ids"),
        (SimpleNamespace(encode=lambda s: None), "returned None, no token ids"),
        (SimpleNamespace(encode=lambda s: [[1], [2, 3]]), "no token ids"),
        (SimpleNamespace(encode=lambda s: [0.5]), "no token ids"),
        (SimpleNamespace(encode=lambda s: [1]), "has no convert_ids_to_tokens and no decode; .*or give pieces="),
        (SimpleNamespace(encode=lambda s: [1], decode=lambda x: {}[x[0]]), "decode of SimpleNamespace raised KeyError"),
    ],
)  # fmt: skip
def test_what_is_no_tokenizer_is_named(model: nn.Module, tokenizer: Any, words: str) -> None:
    with pytest.raises(hw.ConfigError, match=words):
        hw.show(model, tokenizer, "虎")


def test_the_inputs_of_transformers_are_those_of_its_tokenizer() -> None:
    class Theirs:
        def convert_ids_to_tokens(self, ids: Any) -> list[str]:
            return []

        def __call__(self, text: str, return_tensors: str) -> dict[str, str]:
            return {"input_ids": text, "kind": return_tensors}

    assert inputs_of("a", Theirs()) == {"input_ids": "a", "kind": "pt"}


TEXTS = [
    "Ġunju tal San",
    "ħarġa Ġ",
    "▁▂▃ tal",
    "fin@@ C## b</w> @@x",
    "山 über 😀",
    "山山",
    "üü",
    "😀\tx\ny",
    "\ufffd x \ufffd",
]
WORDS = sorted({word for text in TEXTS for word in text.split()})


def _fast(model: Any, pre: Any, decoder: Any, **names: Any) -> Any:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    own = tokenizers.Tokenizer(model)
    own.pre_tokenizer = pre
    if decoder is not None:
        own.decoder = decoder
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, **names)


def _kinds() -> dict[str, Any]:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (the hf extra)")
    models, pre, decoders = tokenizers.models, tokenizers.pre_tokenizers, tokenizers.decoders
    alphabet = {letter: i for i, letter in enumerate(sorted(pre.ByteLevel.alphabet()))}
    words = {word: i for i, word in enumerate(["[UNK]", *WORDS])}
    signs = ["<unk>", "▁", *sorted({letter for word in WORDS for letter in word} | set("\t\n"))]
    unigram = models.Unigram([(sign, -1.0) for sign in dict.fromkeys(signs)], 0, False)
    bytelevel = pre.ByteLevel(add_prefix_space=False)
    meta, without = pre.Metaspace(prepend_scheme="never"), [text for text in TEXTS if "▁" not in text]
    return {
        "byte level": (_fast(models.BPE(alphabet, []), bytelevel, decoders.ByteLevel()), TEXTS),
        "byte level without decoder": (_fast(models.BPE(alphabet, []), bytelevel, None), TEXTS),
        "metaspace": (_fast(unigram, meta, decoders.Metaspace(prepend_scheme="never")), without),
        "metaspace without decoder": (_fast(unigram, meta, None), without),
        "words": (_fast(models.WordLevel(words, unk_token="[UNK]"), pre.WhitespaceSplit(), None), TEXTS[:5]),
        "word pieces": (
            _fast(models.WordPiece(words, unk_token="[UNK]"), pre.WhitespaceSplit(), decoders.WordPiece()), TEXTS[:5]
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    ["byte level", "byte level without decoder", "metaspace", "metaspace without decoder", "words", "word pieces"],
)
def test_tokens_are_the_text_whatever_signs_are_in_it(kind: str) -> None:
    tokenizer, texts = _kinds()[kind]
    for text in texts:
        for asked in (tokenizer, tokenizer.backend_tokenizer):
            ids = tokenizer(text)["input_ids"]
            assert "".join(decoded(asked, ids).texts) == text
        assert decoded(tokenizer, ids).special == [False] * len(ids)


def test_an_added_token_is_shown_as_it_is_and_changes_no_other() -> None:
    tokenizer, _ = _kinds()["byte level"]
    tokenizer.add_tokens(["<｜turn｜>", "Ġold"])
    tokenizer.add_special_tokens({"pad_token": "<｜ĠPAD｜>"})
    ids = tokenizer("山<｜turn｜> üĠold<｜ĠPAD｜>a")["input_ids"]
    found = decoded(tokenizer, ids)
    assert [text for text in found.texts if text] == ["山", "<｜turn｜>", " ", "ü", "Ġold", "<｜ĠPAD｜>", "a"]
    assert [text for text, own in zip(found.texts, found.special, strict=True) if own] == ["<｜ĠPAD｜>"]


def test_an_added_token_of_the_models_own_vocabulary_is_made_of_text() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (the hf extra)")
    own = tokenizers.models.BPE({"a": 0, "▁": 1, "▁▁": 2}, [("▁", "▁")])
    metaspace = tokenizers.decoders.Metaspace(prepend_scheme="never")
    tokenizer = _fast(own, None, metaspace)
    tokenizer.add_tokens(["▁▁"])
    assert decoded(tokenizer, [0, 2, 0]).texts == ["a", "  ", "a"]


def test_a_tokenizer_in_python_is_asked_for_its_text() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    byt5 = transformers.ByT5Tokenizer()
    ids = byt5("Ġ山 ü▁")["input_ids"]
    found = decoded(byt5, ids)
    assert "".join(found.texts) == "Ġ山 ü▁</s>"
    assert found.special == [False] * (len(ids) - 1) + [True]


def test_a_tokenizer_that_joins_by_a_suffix_is_asked_for_its_text() -> None:
    class Phobert:
        names = ("<s>", "fin@@", "al", "tal", "Ġ")
        all_special_ids = (0,)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self.names[i] for i in ids]

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return " ".join(tokens).replace("@@ ", "").strip()

    assert decoded(Phobert(), [0, 1, 2, 3, 4]).texts == ["<s>", "fin", "al", " tal", " Ġ"]


@pytest.mark.thorough
def test_pieces_are_shown_as_they_are_unless_their_writing_is_named(model: nn.Module) -> None:
    with torch.no_grad(), hw.watch(model, maps="lazy") as record:
        model(torch.arange(3)[None])
    raw = ["Ġunju", "C##", "▁▂"]
    assert hw.report(record, pieces=raw).passages[0].tokens == raw
    raw = ["Ġhi", "å±", "±"]
    assert hw.report(record, pieces=raw, written="byte_level").passages[0].tokens == [" hi", "山"]
    amap = next(iter(record.maps.values()))
    assert hw.show(amap, pieces=["▁hi", "▁", "a"], written="sentencepiece").passages[0].tokens == [" hi", " ", "a"]
    with pytest.raises(hw.ConfigError, match="written='utf-8'"):
        hw.report(record, pieces=raw, written="utf-8")


def test_letters_that_look_like_signs_are_no_blanks_in_roles() -> None:
    q = torch.zeros(1, 1, 4, 4)
    _, amap = hw.attend(q, torch.eye(4)[None, None], q, return_map=True)
    found = hw.analysis.roles(amap, pieces=["Ġ", "▁", "x", " "])
    assert found["separator"].mass == pytest.approx(0.25)  # the blank alone
