"""Where the tokens of other libraries stand in a text, and what each of them says in readable characters.

Tokenizers write a blank as Ġ or ▁, a line end as Ċ, the inside of a word as ##, and a character that they do not know
as up to four tokens of bytes. Here each token is the stretch of the text that it came from.
"""

from collections.abc import Sequence

Spans = list[tuple[int, int]]
BLANK = "Ġ▁"  # how a blank is written at the head of a token
# Byte-level tokenizers write each byte as a letter: itself where Latin-1 can show it, else the next one from U+0100 on.
SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in SHOWN]
LETTERS = {chr(byte): byte for byte in SHOWN} | {chr(256 + i): byte for i, byte in enumerate(HIDDEN)}
AHEAD = 64  # characters of the text that may have been dropped before a token


def by_offsets(text: str, tokens: Sequence[str], offsets: Spans, special: Sequence[bool]) -> tuple[list[str], Spans]:
    """Pieces and spans, as in `TokenizedText`, from the offsets that a fast tokenizer tells.

    Tokens that share a character have it in the offsets of each; it goes to the last of them. A blank that offsets
    leave out goes to the token that is written with it.
    """
    starts, following = [0] * len(tokens), len(text)
    for i in range(len(tokens) - 1, -1, -1):  # where the next token of the text begins
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
        if end == at and token and not token.strip(BLANK):  # trimmed to nothing, as blanks at the head of a text are
            end = min(after, at + len(token)) if text[at:after].isspace() else at
        start = at if token[:1] in BLANK and text[at:start].isspace() else min(max(start, at), end)
        said = text[start:end]
        # A blank that the tokenizer put before the text stands nowhere in it.
        pieces.append(said or (" " if token and not token.strip(BLANK) else ""))
        spans.append((start, end))
        at = end
    return pieces, spans


def by_decoding(text: str, tokens: Sequence[str], special: Sequence[bool]) -> tuple[list[str], Spans]:
    """The same from the tokens alone: each is written out, and looked for in the text from where the last one ended.
    What is not found there, such as a word that the tokenizer changed, is shown as the tokenizer writes it."""
    spans: Spans = []
    at, pieces = 0, readable(tokens, special)
    for i, (said, own) in enumerate(zip(pieces, special, strict=True)):
        start, end = (at, at) if own or not said else _found(text, at, said)
        pieces[i] = text[start:end] or said
        spans.append((start, end))
        at = end
    return pieces, spans


def readable(tokens: Sequence[str], special: Sequence[bool]) -> list[str]:
    """What tokens say, without the text: "Ġworld" is " world", "##ing" is "ing", and a character that is written as
    several tokens of bytes stands at the last of them."""
    plain = [token for token, own in zip(tokens, special, strict=True) if not own]
    # Only byte-level tokenizers write a blank as Ġ; then every letter stands for a byte.
    in_bytes = any("Ġ" in token or "Ċ" in token for token in plain) and all(c in LETTERS for c in "".join(plain))
    pieces: list[str] = []
    waiting = b""
    for token, own in zip(tokens, special, strict=True):
        if own:
            pieces.append(token)
            continue
        waiting += bytes(LETTERS[c] for c in token) if in_bytes else _bytes(token)
        try:
            said = waiting.decode()
        except UnicodeDecodeError as error:
            # Inside a character, unless the bytes are none.
            inside = error.end == len(waiting) and len(waiting) - error.start < 4
            said = "" if inside else waiting.decode(errors="replace")
        pieces.append(said)
        waiting = b"" if said else waiting
    return pieces


def _bytes(token: str) -> bytes:
    """What a token stands for in UTF-8."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return int(token[3:5], 16).to_bytes(1, "little")
    if token.startswith("##") and len(token) > 2:
        token = token[2:]
    shown = token.removesuffix("</w>").removesuffix("@@").translate({ord(c): " " for c in BLANK})
    return shown.encode(errors="replace")


def _found(text: str, at: int, said: str) -> tuple[int, int]:
    """Where `said` stands in the text from `at` on, whatever its case; an empty span at `at` if nowhere near."""
    for wanted in (said, said.strip()):
        near = text[at : at + AHEAD + len(wanted)]
        place = near.find(wanted)
        if place < 0 and len(near.casefold()) == len(near):
            place = near.casefold().find(wanted.casefold())
        if wanted and place >= 0:
            return at + place, at + place + len(wanted)
    return at, at
