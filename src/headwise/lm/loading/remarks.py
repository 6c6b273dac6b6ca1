"""Notes on a model or a text: sentences with codes, so that they can be translated."""

from collections.abc import Mapping
from typing import Any

from headwise.nn.named import design_of

SENTENCES = {
    "untrained_length": "The model was trained on {trained:,} tokens at a time; its behaviour beyond that length is "
    "untrained.",
    "no_next_token": "The model does not predict the next token, so there is no loss to measure the "
    "importance of heads.",
    "read_as_bytes": "Not in the model's vocabulary and read as UTF-8 bytes: {count:,} of the characters; each is "
    "shown as a whole.",
    "unknown_tokens": "Not in the model's vocabulary: {count:,} of the {of:,} tokens; the model sees {sign}, "
    "the original text is shown.",
    "parts_of_characters": "Characters that consist of several tokens are shown as a whole: {count:,} "
    "tokens end inside a character.",
}


class Remark(str):
    """An English sentence with its code and values.

    >>> Remark("tokens", "The text has {count:,} tokens.", count=1200)
    'The text has 1,200 tokens.'

    Attributes:
        code: identifies the sentence. values: the numbers and names in it.
    """

    code: str
    values: Mapping[str, int | str]

    def __new__(cls, code: str, sentence: str, /, **values: int | str) -> "Remark":
        """Format `sentence` with `values`, as str.format does."""
        made = super().__new__(cls, sentence.format(**values))
        made.code, made.values = code, values
        return made

    def to_dict(self) -> dict[str, Any]:
        """For JSON: text, code and values, which may be remarks themselves."""
        values = {name: value.to_dict() if isinstance(value, Remark) else value for name, value in self.values.items()}
        return {"text": str(self), "code": self.code, "values": values}


def remark(code: str, /, **values: int | str) -> Remark:
    """One of SENTENCES with its values."""
    return Remark(code, SENTENCES[code], **values)


def remarks_on_map(design: str) -> list[Remark]:
    """What the map of a design does not show, according to the design's notes; empty if it shows everything."""
    note = design_of(design).notes.map
    return [] if note is None else [Remark(map_code(design), note.en.replace("{", "{{").replace("}", "}}"))]


def map_code(design: str) -> str:
    """The code of a remark of `remarks_on_map`."""
    return f"map_of_{design}"
