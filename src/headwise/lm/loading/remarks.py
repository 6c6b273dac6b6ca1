"""Notes on a model or a text, as sentences with codes, so that they can be translated."""

from collections.abc import Mapping
from typing import Any

_UNCHOSEN = "A row without weights is a token that did not select the head; the gate's weight on a head is not shown."
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
    # What a map shows, of designs where it is not all that acts on the values.
    "talking_heads": "The weights are those after the softmax; the heads are mixed once more before the "
    "values are applied.",
    "head_mixing": "The weights are those over the text; afterwards the heads of each token attend to one another.",
    "gated_output": "The weights are those before the gate, which can switch a head off for a token.",
    "sparse_mixture": _UNCHOSEN,
    "mixture_of_heads": _UNCHOSEN,
}


class Remark(str):
    """An English sentence with its code and values.

    >>> Remark("so_many", "There are {count:,} of them.", count=1200)
    'There are 1,200 of them.'

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

    def told(self) -> dict[str, Any]:
        """For JSON: text, code and values, which may be sentences themselves."""
        values = {name: value.told() if isinstance(value, Remark) else value for name, value in self.values.items()}
        return {"text": str(self), "code": self.code, "values": values}


def remark(code: str, /, **values: int | str) -> Remark:
    """One of SENTENCES with its numbers."""
    return Remark(code, SENTENCES[code], **values)
