"""Tokens of any tokenizer as text, and their positions in a text.

Tokenizers write a blank as Ġ or ▁, the continuation of a word as ##, and an unknown character as up to four byte
tokens. A text may contain these signs too, so tokens are decoded by the tokenizer's own decoder, not by their letters.
"""

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from headwise.analysis.head_roles.score import is_marker
from headwise.errors import check_choice

Spans = list[tuple[int, int]]
Decode = Callable[[list[Any]], str]
# Byte-level tokenizers write each byte as a letter: itself if printable in Latin-1, else the next one from U+0100 on.
SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in SHOWN]
LETTERS = {chr(byte): byte for byte in SHOWN} | {chr(256 + i): byte for i, byte in enumerate(HIDDEN)}
AHEAD = 64  # maximum number of characters that may have been dropped before a token
BESIDE = "a"  # a token on both sides of others while these are decoded: decoders remove blanks at the ends of a text
BROKEN = "\ufffd"  # decoded bytes that are no character, or not yet
BYTE = re.compile("<0x([0-9A-F]{2})>")
LONGEST = 4  # bytes of a character in UTF-8, and so tokens that may share one


class Pieces(NamedTuple):
    """Tokens as text."""

    texts: list[str]  # together they are the text; a character of several tokens is the last one's
    special: list[bool]  # whether each is not part of the text, such as [SEP]
    joins: bool  # whether the decoder puts blanks between words, which are then no part of a token


def pieces_of(tokenizer: Any, ids: Sequence[int], special: Sequence[bool] | None = None) -> Pieces:
    """Token ids as text, by the tokenizer of transformers, tokenizers, sentencepiece or tiktoken, or any object with
    decode(ids). Added, `special` and unknown ones stay as they are."""
    ids = list(ids)
    added: Collection[int]
    marks: Collection[int] | None
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        names = list(tokenizer.convert_ids_to_tokens(ids))
        fast = getattr(tokenizer, "backend_tokenizer", None)
        added, marks = _held(tokenizer, "added_tokens_decoder"), _held(tokenizer, "all_special_ids", None)
        decode = _held(tokenizer, "convert_tokens_to_string", "".join) if fast is None else _decoder(fast)
    elif hasattr(tokenizer, "id_to_token"):
        names, fast = [tokenizer.id_to_token(i) for i in ids], tokenizer
        known = tokenizer.get_added_tokens_decoder() if hasattr(tokenizer, "get_added_tokens_decoder") else {}
        unknown = getattr(getattr(tokenizer, "model", None), "unk_token", None)
        added, marks = known, [i for i, token in known.items() if token.special]
        marks += [i for i, name in zip(ids, names, strict=True) if name is not None and name == unknown]
        decode = _decoder(tokenizer) if hasattr(tokenizer, "decoder") else "".join
    elif hasattr(tokenizer, "id_to_piece"):
        names, fast, added, marks = [tokenizer.id_to_piece(i) for i in ids], None, (), None
        decode = getattr(tokenizer, "decode_pieces", SIGNS["sentencepiece"])
        if hasattr(tokenizer, "is_control"):
            marks = [i for i in ids if tokenizer.is_control(i) or tokenizer.is_unknown(i)]
    else:
        texts = _joined(ids, [False] * len(ids), partial(_again, tokenizer.decode))
        return Pieces(texts, [is_marker(text) for text in texts], False)
    tokens = [str(i) if name is None else str(name) for i, name in zip(ids, names, strict=True)]
    outside = [is_marker(token) if marks is None else i in marks for i, token in zip(ids, tokens, strict=True)]
    outside = outside if special is None else [a or b for a, b in zip(outside, special, strict=True)]
    between, joins = _between(decode)

    def merged(i: int, token: str) -> bool:  # an added token that is made of text, as it is in the vocabulary too
        return fast is not None and fast.model.token_to_id(token) == i and BROKEN not in between([token])

    apart = [
        own or name is None or (i in added and not merged(i, token))
        for i, name, token, own in zip(ids, names, tokens, outside, strict=True)
    ]
    return Pieces(_joined(tokens, apart, between, joins), outside, joins)


def decoded_tokens(tokens: Sequence[str], written: str) -> list[str]:
    """Raw tokens as text, written as "text", "byte_level" (Ġworld), "sentencepiece" (▁world, <0xE6>) or "wordpiece"
    (##ing)."""
    check_choice("written", written, ("text", *SIGNS))
    if written == "text":
        return list(tokens)
    between, joins = _between(SIGNS[written])
    return _joined(tokens, [is_marker(token) for token in tokens], between, joins)


def _held(tokenizer: Any, name: str, otherwise: Any = ()) -> Any:
    """An attribute; some tokenizers of transformers raise for those that they lack."""
    with suppress(AttributeError, NotImplementedError):
        return getattr(tokenizer, name)
    return otherwise


def _decoder(fast: Any) -> Decode:
    """The decoder of a `tokenizers.Tokenizer`; without one, that of its pre-tokenizer or its model."""
    if fast.decoder is not None:
        return fast.decoder.decode
    before, model = str(fast.pre_tokenizer), fast.model
    if "ByteLevel(" in before:
        return SIGNS["byte_level"]
    if "Metaspace(" in before or getattr(model, "byte_fallback", False):
        return SIGNS["sentencepiece"]
    if getattr(model, "end_of_word_suffix", None):
        return lambda tokens: "".join(tokens).replace(model.end_of_word_suffix, " ")
    if getattr(model, "continuing_subword_prefix", None):
        return partial(_without_prefix, prefix=model.continuing_subword_prefix)
    return " ".join if type(model).__name__ == "WordLevel" else "".join


def _between(decode: Decode) -> tuple[Decode, bool]:
    """A function of tokens to their text inside a text, and whether blanks are put between words."""
    try:
        joins = decode([BESIDE, BESIDE]) == f"{BESIDE} {BESIDE}"
    except Exception:  # of a tokenizer that decodes ids only, or tokens of its vocabulary only
        return "".join, False

    @cache  # a text has most of its tokens many times
    def between(*tokens: Any) -> str:
        text = str(decode([BESIDE, *tokens, BESIDE]))
        inside = text.startswith(BESIDE) and text.endswith(BESIDE) and len(text) >= 2 * len(BESIDE)
        return text[len(BESIDE) : -len(BESIDE)] if inside else str(decode(list(tokens)))

    return lambda tokens: between(*tokens), joins


def _again(decode: Decode, ids: list[int]) -> str:
    """The text of ids after the same ones: after other text, decoders keep the blank before a word."""
    one, both = str(decode(ids)), str(decode([*ids, *ids]))
    return both[len(one) :] if both.startswith(one) else one


def _joined(tokens: Sequence[Any], apart: Sequence[bool], between: Decode, joins: bool = False) -> list[str]:
    """The text of each token. apart: shown as they are."""
    pieces: list[str] = []
    waiting: list[Any] = []
    before, blank = "", False  # the text of those that wait; whether the last word ends with a blank that joins

    def put(text: str) -> str:
        nonlocal blank
        if not joins:
            return text
        lead, trail = text.startswith(" "), text.endswith(" ")
        joined = " " * (blank and lead) + text[lead : len(text) - trail]
        blank = trail
        return joined

    for token, own in zip(tokens, apart, strict=True):
        if own:
            if waiting:
                pieces[-1] = put(before)
            waiting, before, blank = [], "", False
            pieces.append(token)
            continue
        waiting.append(token)
        text = between(waiting)
        if (not text or text.rstrip(" ").endswith(BROKEN)) and len(waiting) < LONGEST:
            before = text
            pieces.append("")  # the beginning of a character
            continue
        if before and text.startswith(before) and not text.endswith(BROKEN):  # which were no beginning
            pieces[-1], text = put(before), text[len(before) :]
        pieces.append(put(text))
        waiting, before = [], ""
    if waiting:
        pieces[-1] = put(before)
    return pieces


def _bytes_of(tokens: Sequence[str]) -> str:
    parts = (
        bytes(map(LETTERS.__getitem__, token)) if LETTERS.keys() >= set(token) else token.encode(errors="replace")
        for token in tokens
    )
    return b"".join(parts).decode(errors="replace")


def _with_blanks(tokens: Sequence[str]) -> str:
    """As sentencepiece writes text; <0xE6> is a byte of an unknown character."""
    found = bytearray()
    for token in tokens:
        byte = BYTE.fullmatch(token)
        found += bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode(errors="replace")
    return found.decode(errors="replace")


def _without_prefix(tokens: Sequence[str], prefix: str = "##") -> str:
    """As WordPiece writes text, without blanks before these marks."""
    return re.sub(" ([.,!?])", r"\1", " ".join(tokens).replace(f" {prefix}", ""))


SIGNS: dict[str, Decode] = {"byte_level": _bytes_of, "sentencepiece": _with_blanks, "wordpiece": _without_prefix}


def by_offsets(text: str, decoded: Sequence[str], offsets: Spans, special: Sequence[bool]) -> tuple[list[str], Spans]:
    """Pieces and spans, as in `TokenizedText`, from a fast tokenizer's offsets and decoded tokens. A character of
    several tokens is the last one's, a blank in no offsets that of the token written with it."""
    starts, following = [0] * len(decoded), len(text)
    blanks, blank = [False] * len(decoded), False
    for i in range(len(decoded) - 1, -1, -1):  # the start of the next token of the text; a blank before a character
        starts[i] = following
        blanks[i] = blank = decoded[i].startswith(" ") if decoded[i] else blank
        if not special[i]:
            following = min(following, offsets[i][0])
    pieces: list[str] = []
    spans: Spans = []
    at = 0
    for token, (start, end), own, after, led in zip(decoded, offsets, special, starts, blanks, strict=True):
        if own:
            pieces.append(token)
            spans.append((at, at))
            continue
        end = max(at, min(end, after))
        blank = bool(token) and not token.strip(" ")
        if end == at and blank:  # an empty span, as of blanks at the start of a text
            end = min(after, at + len(token)) if text[at:after].isspace() else at
        start = at if led and text[at:start].isspace() else min(max(start, at), end)
        # A blank that the tokenizer added before the text has no position in it.
        pieces.append(text[start:end] or (" " if blank else ""))
        spans.append((start, end))
        at = end
    return pieces, spans


def by_decoding(text: str, decoded: Sequence[str], special: Sequence[bool]) -> tuple[list[str], Spans]:
    """As `by_offsets`, each decoded token searched in the text after the last; what is not found is as decoded."""
    spans: Spans = []
    at, pieces = 0, list(decoded)
    for i, (piece, own) in enumerate(zip(pieces, special, strict=True)):
        start, end = (at, at) if own or not piece else _found(text, at, piece)
        pieces[i] = text[start:end] or piece
        spans.append((start, end))
        at = end
    return pieces, spans


def _found(text: str, at: int, piece: str) -> tuple[int, int]:
    """The span of `piece` in the text from `at` on, ignoring case; an empty span at `at` if it is not nearby."""
    for wanted in (piece, piece.strip()):
        near = text[at : at + AHEAD + len(wanted)]
        place = near.find(wanted)
        if place < 0 and len(near.casefold()) == len(near):
            place = near.casefold().find(wanted.casefold())
        if wanted and place >= 0:
            return at + place, at + place + len(wanted)
    return at, at
