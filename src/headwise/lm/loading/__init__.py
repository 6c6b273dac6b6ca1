"""A model and its tokenizer, whoever made them: what reads a text, and gives the map of every head on it.

    >>> from headwise.lm.loading import open_subject
    >>> subject = open_subject(None)                                # the embedded decoder; or a folder
    >>> reading = subject.read("武松打虎")
    >>> reading.pieces
    ['武', '松', '打', '虎']
    >>> maps = subject.maps(reading.ids)
    >>> list(maps) == list(subject.layers)
    True

A folder is a headwise checkpoint, or a model of Hugging Face transformers with its tokenizer. Nothing is fetched, no
code of the folder runs, and weights come from safetensors alone.
"""

from headwise.lm.loading.base import Subject as Subject
from headwise.lm.loading.opening import open_subject as open_subject
from headwise.lm.loading.reading import Reading as Reading
