"""A model and its tokenizer, whoever made them: what reads a text, and gives the map of every head on it.

    >>> from headwise.lm.loading import load_model
    >>> subject = load_model(None)                                # the embedded decoder; or a folder
    >>> reading = subject.read("武松打虎")
    >>> reading.pieces
    ['武', '松', '打', '虎']
    >>> maps = subject.maps(reading.ids)
    >>> list(maps) == list(subject.layers)
    True

A folder is a headwise checkpoint, or a model of Hugging Face transformers with its tokenizer. Nothing is fetched, no
code of the folder runs, and weights come from safetensors alone.
"""

from headwise.lm.loading.base import LoadedModel as LoadedModel
from headwise.lm.loading.opening import load_model as load_model
from headwise.lm.loading.reading import TokenizedText as TokenizedText
