"""A model with its tokenizer, from a headwise checkpoint or a folder of Hugging Face transformers.

    >>> from headwise.lm.loading import load_model
    >>> model = load_model(None)                                  # the embedded decoder; or a folder
    >>> text = model.read("武松打虎")
    >>> text.pieces
    ['武', '松', '打', '虎']
    >>> maps = model.maps(text.ids)
    >>> list(maps) == list(model.layers)
    True

Nothing is downloaded, no code from the folder runs, and weights are read from safetensors files only.
"""

from headwise.lm.loading.base import LoadedModel as LoadedModel
from headwise.lm.loading.load import load_model as load_model
from headwise.lm.loading.tokenized import TokenizedText as TokenizedText
