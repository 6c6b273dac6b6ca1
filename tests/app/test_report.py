"""hw.report: what a record saw, as the page that see writes; its numbers are those of the model."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.errors import ConfigError, ShapeError
from headwise.lm.model import Decoder
from headwise.lm.texts import CharTokenizer
from headwise.reports.data import Report
from headwise.reports.pictures import write_pngs

Model = tuple[Decoder, CharTokenizer]
HOSTILE = "</script><img src=x onerror=alert(1)>"


def watched(model: nn.Module, *inputs: Any, maps: str = "lazy", **options: Any) -> Any:
    with hw.watch(model, maps=maps) as record, torch.no_grad():
        model(*inputs, **options)
    return record


class Pair(nn.Module):
    """An encoder and a decoder: three kinds of attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(12), enable_nested_tensor=False)
        self.body = nn.Transformer(12, 3, 2, 2, 17, 0.0, batch_first=True, custom_encoder=encoder).eval()

    def forward(self, source: torch.Tensor, target: torch.Tensor, padding: torch.Tensor | None = None) -> Any:
        causal = torch.ones(target.shape[1], target.shape[1]).triu(1).bool()
        return self.body(
            source, target, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )  # fmt: skip


@pytest.mark.thorough
def test_a_record_becomes_the_maps_of_its_last_forward(model: Model) -> None:
    decoder, tokenizer = model
    text = "武松打虎，又来。The tiger"
    ids = torch.from_numpy(tokenizer.encode(text))[None]
    record = watched(decoder, ids)
    report = hw.report(record, tokens=ids, tokenizer=tokenizer, title="a title")
    assert report.passages[0].tokens == list(text)
    for layer, (name, amap) in enumerate(record.maps.items()):
        assert report.layers[layer] == name
        np.testing.assert_allclose(report.passages[0].maps[layer], amap[0].numpy(), atol=1e-6)
    values = {name: report.statistics.dense(name).numpy() for name in report.statistics}
    for name in record.latest:
        np.testing.assert_allclose(values[name], record.latest[name].numpy(), rtol=1e-4, atol=1e-6)
    marks = [c in "，。" for c in text]
    expected = report.passages[0].maps[..., marks].sum(-1).mean(-1)
    np.testing.assert_allclose(values["punctuation_mass"], expected, rtol=1e-4)
    assert [len(row) for row in report.patterns] == [5, 5]
    assert [c.name for c in report.comparisons] == ["attention maps"]
    assert report.title == "a title"


@pytest.mark.thorough
def test_it_says_of_a_text_what_see_says(model: Model) -> None:
    from headwise.lm.loading import DecoderModel
    from headwise.reports.see import see

    decoder, tokenizer = model
    text = "武松打虎，再来？The tiger sleeps!"
    ids = torch.from_numpy(tokenizer.encode(text))[None]
    mine = hw.report(watched(decoder, ids), tokens=ids, tokenizer=tokenizer)
    other = see(text, DecoderModel(*model), window=0)
    np.testing.assert_allclose(mine.passages[0].maps, other.passages[0].maps, atol=1e-6)
    assert (mine.patterns, mine.labels) == (other.patterns, other.labels)
    assert mine.passages[0].tokens == other.passages[0].tokens
    for name, column in mine.statistics.items():
        np.testing.assert_allclose(column.flat, other.statistics[name].flat, rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
def test_bytes_of_a_character_are_shown_as_one(model: Model) -> None:
    decoder, tokenizer = model
    ids = torch.from_numpy(tokenizer.encode("武😀松"))[None]
    passage = hw.report(watched(decoder, ids), tokens=ids, tokenizer=tokenizer).passages[0]
    assert passage.tokens == ["武", "😀", "松"]
    np.testing.assert_allclose(passage.maps.sum(-1), 1, atol=1e-6)


@pytest.mark.thorough
def test_nobody_tells_of_the_tokens(model: Model) -> None:
    ids = torch.randint(0, 256, (1, 12))
    report = hw.report(watched(model[0], ids))
    assert report.passages[0].tokens == [str(i) for i in range(12)]
    assert len(report.passages[0].special) == 12
    assert "punctuation_mass" not in report.statistics
    by_id = hw.report(watched(model[0], ids), tokens=ids)
    assert by_id.passages[0].tokens == [str(int(i)) for i in ids[0]]


@pytest.mark.thorough
def test_a_batch_has_a_passage_an_entry_without_its_padding() -> None:
    torch.manual_seed(5)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(12, 3, 17, batch_first=True), 2, enable_nested_tensor=False
    )
    lengths = [7, 4, 2, 5, 6, 3]
    padding = torch.arange(7) >= torch.tensor(lengths)[:, None]
    record = watched(model.eval(), torch.randn(6, 7, 12), src_key_padding_mask=padding)
    pieces = [[f"{entry}{i}" for i in range(7)] for entry in range(6)]
    report = hw.report(record, pieces=pieces)
    assert [p.title for p in report.passages] == ["entry 0", "entry 1", "entry 2", "entry 3"]
    assert any("first 4 of 6" in note for note in report.notes)
    amap = next(iter(record.maps.values()))
    for entry, (passage, length) in enumerate(zip(report.passages, lengths, strict=False)):
        assert passage.tokens == pieces[entry][:length]
        np.testing.assert_allclose(passage.maps[0], amap[entry, :, :length, :length].numpy(), atol=1e-6)
        np.testing.assert_allclose(passage.maps.sum(-1), 1, atol=1e-5)
    assert [p.title for p in hw.report(record, entries=5).passages] == ["entry 5"]
    assert [p.title for p in hw.report(record, entries=[4, 1], pieces=pieces[0]).passages] == ["entry 4", "entry 1"]
    for wrong in (6, -1, [], "a"):
        with pytest.raises(ConfigError, match="entries"):
            hw.report(record, entries=wrong)


@pytest.mark.thorough
def test_cross_attention_is_shown_as_such(tmp_path: Path) -> None:
    model = Pair()
    padding = torch.arange(9) >= torch.tensor([[9], [6]])
    record = watched(model, torch.randn(2, 9, 12), torch.randn(2, 5, 12), padding)
    source = [[f" s{e}{i}" for i in range(9)] for e in range(2)]
    target = [[f" t{e}{i}" for i in range(5)] for e in range(2)]
    report = hw.report(record, tmp_path / "r.html", pieces=source, decoder_pieces=target, title=HOSTILE)
    titles = [p.title.split(",")[0] for p in report.passages]
    assert titles == ["encoder", "encoder", "decoder", "decoder", "cross attention", "cross attention"]
    # The tokens of each passage, without its padding.
    assert [p.title for p in report.passages[:2]] == ["encoder, 9 tokens, entry 0", "encoder, 6 tokens, entry 1"]
    assert report.passages[5].title == "cross attention, 5 tokens at 6, entry 1"
    cross = report.passages[5]
    assert cross.tokens == target[1]
    assert cross.keys == source[1][:6]
    names = list(record.maps)
    assert [names[layer] for layer in cross.layers] == [name for name in names if "multihead_attn" in name]
    for shown, layer in zip(cross.maps, cross.layers, strict=True):
        np.testing.assert_allclose(shown, record.maps[names[layer]][1, :, :, :6].numpy(), atol=1e-6)
    assert [passage.causal for passage in report.passages] == [False, False, True, True, False, False]
    for layer in cross.layers:
        assert report.patterns[layer] == [""] * 3
        values = {name: column[layer].numpy() for name, column in report.statistics.items()}
        assert np.isnan(values["previous_mass"]).all()
        assert np.isnan(values["mean_distance"]).all()
        assert np.isfinite(values["entropy"]).all()
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<img" not in page
    data = json.loads(re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert data["passages"][5]["rows"] == 5
    assert data["passages"][5]["columns"] == 6
    assert data["passages"][5]["mean"]["own"][cross.layers[0]] is not None
    assert data["passages"][0]["mean"]["own"][cross.layers[0]] is None
    pictures = write_pngs(replace(report, passages=[report.passages[0], cross]), tmp_path / "png")
    assert len(pictures) == 2 * (1 + 2 * 3)


@pytest.mark.thorough
def test_a_step_of_generation_looks_back_at_all_tokens() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    torch.manual_seed(2)
    config = transformers.GPT2Config(vocab_size=40, n_embd=12, n_layer=2, n_head=3, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 40, (1, 9))
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).past_key_values
    record = watched(model, ids[:, 6:], past_key_values=cache, use_cache=True)
    passage = hw.report(record, pieces=[f" {i}" for i in range(9)]).passages[0]
    assert passage.tokens == [" 6", " 7", " 8"]
    assert passage.keys == [f" {i}" for i in range(9)]
    assert passage.maps.shape == (2, 3, 3, 9)


@pytest.mark.thorough
def test_tokens_of_transformers_become_readable() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    from tokenizers import Tokenizer, models

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##able", "to", ","])}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece(words, unk_token="[UNK]")), cls_token="[CLS]", sep_token="[SEP]"
    )
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=9
    )
    ids = torch.tensor([[2, 4, 5, 7, 6, 3]])
    record = watched(transformers.BertModel(config).eval(), ids)
    raw = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    for told in ({"tokens": ids, "tokenizer": tokenizer}, {"pieces": raw, "written": "wordpiece"}):
        passage = hw.report(record, **told).passages[0]
        assert passage.tokens == ["[CLS]", "un", "able", ",", " to", "[SEP]"]
        assert passage.special == [0, 5]


@pytest.mark.parametrize("n", [12, 100])
def test_pictures_of_maps_are_shown_with_what_was_watched(model: Model, n: int) -> None:
    decoder = model[0]
    ids = torch.randint(0, 256, (2, n), generator=torch.Generator().manual_seed(1))
    record = watched(decoder, ids, maps="pooled")
    report = hw.report(record, tokens=ids)
    assert list(report.statistics) == list(record.latest)
    assert report.labels == []
    passage = report.passages[1]
    picture = next(iter(record.maps.values()))
    np.testing.assert_allclose(passage.maps[0], picture.mean[1].numpy(), atol=1e-7)
    assert (passage.cell, passage.peaks is None) == ((1, True) if n == 12 else (2, False))


@pytest.mark.thorough
def test_long_maps_are_pooled(model: Model) -> None:
    decoder = model[0]
    ids = torch.randint(0, 256, (2, 50))
    record = watched(decoder, ids)
    report = hw.report(record, tokens=ids, cells=16)
    for entry, passage in enumerate(report.passages):
        assert passage.cell == 4
        assert passage.peaks is not None
        for layer, amap in enumerate(record.maps.values()):
            np.testing.assert_allclose(passage.maps[layer], amap.pool(16)[entry].numpy(), atol=1e-6)
            np.testing.assert_allclose(passage.peaks[layer], amap.pool(16, "max")[entry].numpy(), atol=1e-6)


@pytest.mark.thorough
def test_layers_with_different_heads(model: Model) -> None:
    decoder = hw.edit.prune(model[0], {1: [0, 3]}, copy=True).model
    report = hw.report(watched(decoder, torch.randint(0, 256, (1, 12))))
    assert report.counts == [5, 3]
    assert not report.passages[0].maps[1, 3:].any()
    assert report.patterns[1][3:] == ["", ""]


@pytest.mark.thorough
def test_it_is_written_whole_and_in_chinese(model: Model, tmp_path: Path) -> None:
    record = watched(model[0], torch.randint(0, 256, (1, 9)))
    found = hw.report(record, tmp_path / "r.html", lang="zh")
    assert isinstance(found, Report)
    assert 'lang="zh"' in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    with pytest.raises(ConfigError, match="lang"):
        hw.report(record, tmp_path / "x.html", lang="xx")


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ({"pieces": ["a"] * 8}, ShapeError, "8 of them.* 9 tokens"),
        ({"pieces": [["a"] * 9] * 3}, ShapeError, "3 × 9"),
        ({"tokens": torch.zeros(1, 7, dtype=torch.long)}, ShapeError, "1 × 7"),
        ({"tokens": torch.zeros(1, 9)}, hw.DTypeError, "integers"),
        ({"pieces": "abcdefghi"}, hw.DTypeError, "list of strings"),
        ({"pieces": [["a"] * 9, ["a"] * 8]}, ShapeError, "the same number of tokens"),
        ({"tokens": torch.zeros(2, 9, dtype=torch.long), "pieces": ["a"] * 9}, ShapeError, "one for each token"),
        ({"tokens": torch.zeros(9, dtype=torch.long), "tokenizer": object()}, ConfigError, "convert_ids_to_tokens"),
        ({"decoder_pieces": ["a"] * 9}, ShapeError, "no cross attention"),
        ({"cells": 0}, ConfigError, "cells"),
    ],
)
def test_what_does_not_fit_is_refused(model: Model, told: Any, error: type[Exception], words: str) -> None:
    record = watched(model[0], torch.randint(0, 256, (2, 9)))
    with pytest.raises(error, match=words):
        hw.report(record, **told)


def test_a_record_without_maps_is_refused(model: Model) -> None:
    ids = torch.randint(0, 256, (1, 9))
    with pytest.raises(ConfigError, match="maps='lazy'"):
        hw.report(watched(model[0], ids, maps="none"))
    with pytest.raises(ConfigError, match="has not measured"):
        hw.report(hw.watch(model[0], maps="lazy"))
    with pytest.raises(ConfigError, match=r"expected the record of .*, got dict"):
        hw.report({})  # type: ignore[arg-type]
