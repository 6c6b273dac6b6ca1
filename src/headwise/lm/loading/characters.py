"""Positions of other libraries' tokens in a text, and their readable form.

Tokenizers write a blank as Ġ or ▁, a line end as Ċ, the continuation of a word as ##, and an unknown character as up to
four byte tokens. Here each token is mapped to the part of the text that it came from.
"""

from collections.abc import Sequence

Spans = list[tuple[int, int]]
BLANK = "Ġ▁"  # a blank at the start of a token
# Byte-level tokenizers write each byte as a letter: itself if printable in Latin-1, else the next one from U+0100 on.
SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in SHOWN]
LETTERS = {chr(byte): byte for byte in SHOWN} | {chr(256 + i): byte for i, byte in enumerate(HIDDEN)}
AHEAD = 64  # maximum number of characters that may have been dropped before a token


def by_offsets(text: str, tokens: Sequence[str], offsets: Spans, special: Sequence[bool]) -> tuple[list[str], Spans]:
    """Pieces and spans, as in `TokenizedText`, from the offsets of a fast tokenizer.

    A character in the offsets of several tokens is assigned to the last of them. A blank that is in no offsets is
    assigned to the token that is written with it.
    """
    starts, following = [0] * len(tokens), len(text)
    for i in range(len(tokens) - 1, -1, -1):  # the start of the next token of the text
        starts[i] = following
        if not special[i]:
            following = min(following, offsets[i][0])
    pieces: list[str] = []
    spans: Spans = []
    at = 0
    for token, (start, end), own, after in zip(tokens, offsets, special, starts, strict=True):
        if own:
            pieces.append(token)
            spans.append((at, at))
            continue
        end = max(at, min(end, after))
        if end == at and token and not token.strip(BLANK):  # an empty span, as of blanks at the start of a text
            end = min(after, at + len(token)) if text[at:after].isspace() else at
        start = at if token[:1] in BLANK and text[at:start].isspace() else min(max(start, at), end)
        # A blank that the tokenizer added before the text has no position in it.
        pieces.append(text[start:end] or (" " if token and not token.strip(BLANK) else ""))
        spans.append((start, end))
        at = end
    return pieces, spans


def by_decoding(text: str, tokens: Sequence[str], special: Sequence[bool]) -> tuple[list[str], Spans]:
    """As `by_offsets`, from the tokens alone: the readable form of each is searched in the text after the last one.
    What is not found, such as a word that the tokenizer changed, is shown as the tokenizer writes it."""
    spans: Spans = []
    at, pieces = 0, readable(tokens, special)
    for i, (piece, own) in enumerate(zip(pieces, special, strict=True)):
        start, end = (at, at) if own or not piece else _found(text, at, piece)
        pieces[i] = text[start:end] or piece
        spans.append((start, end))
        at = end
    return pieces, spans


def readable(tokens: Sequence[str], special: Sequence[bool]) -> list[str]:
    """The readable form of tokens, without the text: "Ġworld" is " world", "##ing" is "ing", and a character of several
    byte tokens is assigned to the last of them."""
    plain = [token for token, own in zip(tokens, special, strict=True) if not own]
    # Only byte-level tokenizers write a blank as Ġ; then every letter is a byte.
    in_bytes = any("Ġ" in token or "Ċ" in token for token in plain) and all(c in LETTERS for c in "".join(plain))
    pieces: list[str] = []
    waiting = b""
    for token, own in zip(tokens, special, strict=True):
        if own:
            pieces.append(token)
            continue
        waiting += bytes(LETTERS[c] for c in token) if in_bytes else _bytes(token)
        try:
            piece = waiting.decode()
        except UnicodeDecodeError as error:
            inside = error.end == len(waiting) and len(waiting) - error.start < 4  # of a character, if it is valid
            piece = "" if inside else waiting.decode(errors="replace")
        pieces.append(piece)
        waiting = b"" if piece else waiting
    return pieces


def _bytes(token: str) -> bytes:
    """The UTF-8 bytes of a token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return int(token[3:5], 16).to_bytes(1, "little")
    if token.startswith("##") and len(token) > 2:
        token = token[2:]
    shown = token.removesuffix("</w>").removesuffix("@@").translate({ord(c): " " for c in BLANK})
    return shown.encode(errors="replace")


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
