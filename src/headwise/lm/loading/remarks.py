"""What there is to know about a model or a text, in sentences that others can say in another language too."""

from collections.abc import Mapping
from typing import Any

from headwise.nn.named import design_of

SENTENCES = {
    "untrained_length": "The model was trained on {trained:,} tokens at a time; what it does further apart was never "
    "trained.",
    "no_next_token": "The model predicts no next token, so there is no loss that would say how much each head matters.",
    "read_as_bytes": "Not in the model's vocabulary and read as UTF-8 bytes: {count:,} of the characters; each is "
    "shown whole.",
    "unknown_tokens": "Not in the model's vocabulary: {count:,} of the {of:,} tokens; the model reads {sign} for each, "
    "here the text stands.",
    "parts_of_characters": "Characters of several tokens are shown whole: {count:,} tokens end inside a character.",
}


class Remark(str):
    """A sentence in English, made of what it says.

    >>> Remark("so_many", "There are {count:,} of them.", count=1200)
    'There are 1,200 of them.'

    Attributes:
        code: which sentence it is. values: the numbers and names in it.
    """

    code: str
    values: Mapping[str, int | str]

    def __new__(cls, code: str, sentence: str, /, **values: int | str) -> "Remark":
        """`sentence` with its values in it, as str.format puts them."""
        made = super().__new__(cls, sentence.format(**values))
        made.code, made.values = code, values
        return made

    def told(self) -> dict[str, Any]:
        """For JSON: text, code, and values, which may be sentences themselves."""
        values = {name: value.told() if isinstance(value, Remark) else value for name, value in self.values.items()}
        return {"text": str(self), "code": self.code, "values": values}


def remark(code: str, /, **values: int | str) -> Remark:
    """One of SENTENCES with its numbers."""
    return Remark(code, SENTENCES[code], **values)


def remarks_on_map(design: str) -> list[Remark]:
    """What the map of a head design does not show, by the design's own notes; empty if it shows all."""
    said = design_of(design).notes.map
    return [] if said is None else [Remark(map_code(design), said.en.replace("{", "{{").replace("}", "}}"))]


def map_code(design: str) -> str:
    """The code of a remark of `remarks_on_map`."""
    return f"map_of_{design}"
