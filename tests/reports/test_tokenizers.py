"""A text is shown with the tokenizer of any library, and a wrong tokenizer is refused by name."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.lm.tokenizer import CharTokenizer
from headwise.reports.see.tokenizers import decoded, inputs_of


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


def test_one_of_the_package_tokenizers(model: nn.Module) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (the hf extra)")
    words = {word: i for i, word in enumerate(["[UNK]", "the", "ti", "##ger", ","])}
    own = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    own.decoder = tokenizers.decoders.WordPiece()
    report = hw.show(model, own, "the tiger, the")
    assert report.passages[0].tokens == ["the", " ti", "ger", ",", " the"]
    assert hw.show(model, own, "the bear").passages[0].special == [1]


def test_a_character_that_never_ends_is_shown() -> None:
    assert decoded(BY_BYTE, [97, 0xE8]) == (["a", "�"], False)
    assert decoded(BY_BYTE, [0xE8] * 5) == (["", "", "", "�" * 4, "�"], False)


def test_ids_outside_of_a_vocabulary_are_shown_as_numbers() -> None:
    assert decoded(SimpleNamespace(id_to_token={1: "##ger"}.get), [1, 7]) == (["##ger", "7"], True)


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
