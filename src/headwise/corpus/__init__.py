"""Measure every head of a model on a corpus, with one or many processes, resumable at any time.

>>> import pathlib, tempfile
>>> from headwise.corpus import measure_corpus
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = pathlib.Path(folder, "text.txt").write_text("武松打虎。" * 40, encoding="utf-8")
...     found = measure_corpus(None, folder, f"{folder}/stats.csv", measures=["entropy"], window=64, device="cpu")
>>> found.table.dense("entropy").shape                                  # [layers, heads]
torch.Size([4, 8])
>>> found.total.windows, found.total.tokens
(4, 200)
"""

from headwise.corpus.merging import merge
from headwise.corpus.passages import CorpusPassage, HeadPassages, Key, Passages
from headwise.corpus.result import CorpusMeasures
from headwise.corpus.run import measure_corpus

__all__ = ["CorpusMeasures", "CorpusPassage", "HeadPassages", "Key", "Passages", "measure_corpus", "merge"]
