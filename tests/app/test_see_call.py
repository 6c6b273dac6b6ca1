"""`hw.see`: what the command shows, as one call."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.lm.checkpoint import load_pretrained, save_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer
from headwise.reports.see import SAMPLE
from headwise.wording import in_language

TEXT = "武松打虎，再来一碗。"


def equal(one: hw.reports.Report, other: hw.reports.Report) -> bool:
    return all(np.array_equal(a.maps, b.maps) for a, b in zip(one.passages, other.passages, strict=True))


def small_model(folder: Path, text: str):
    """A loaded decoder with two heads, which knows the characters of a text."""
    torch.manual_seed(3)
    tokenizer = CharTokenizer.from_text(text, min_count=1)
    decoder = Decoder(DecoderConfig(tokenizer.vocab_size, d_model=8, num_layers=1, num_heads=2, context=12)).eval()
    save_model(folder / "model.safetensors", decoder, tokenizer, info={"step": 0})
    return hw.load_model(folder)


@pytest.mark.thorough
def test_text_path_and_loaded_model_give_one_report(tmp_path, capfd):
    loaded = hw.load_model()
    by_default = hw.see(TEXT)
    assert repr(by_default) == f"Report({TEXT!r}: 4 layers, 32 heads; 1 passage, 10 tokens)"
    assert equal(hw.see(TEXT, loaded), by_default)
    file, small = tmp_path / "tiger.txt", small_model(tmp_path, TEXT)
    file.write_text(TEXT, encoding="utf-8")
    of_file = hw.see(file=file, model=small)
    assert equal(of_file, hw.see(TEXT, small))
    assert of_file.title == "tiger.txt"
    assert hw.see(TEXT, small, title="a title").title == "a title"
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
@pytest.mark.parametrize(("lang", "words"), [("en", "I know it is the moon."), ("zh", "鲁智深是关西汉子")])
def test_without_a_text_readers_see_a_passage_in_their_language_that_the_model_knows(
    lang, words, tmp_path, monkeypatch
):
    monkeypatch.setenv("HEADWISE_LANG", "zh" if lang == "en" else "en")  # lang= counts more
    sample = "".join(in_language(SAMPLE, lang))
    assert set(sample) <= set(load_pretrained()[1].characters)
    loaded = small_model(tmp_path, sample)
    report = hw.see(model=loaded, lang=lang)
    assert words in "".join(report.passages[0].tokens).replace("␣", " ")
    assert not any("UTF-8" in note for note in report.notes)
    monkeypatch.setenv("HEADWISE_LANG", lang)
    assert equal(hw.see(model=loaded), report)


@pytest.mark.thorough
def test_a_page_is_in_the_language_of_the_locale_unless_lang_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWISE_LANG", "zh")
    loaded = hw.load_model()
    hw.see(TEXT, loaded, out=tmp_path / "see.html")
    decoder, _, _ = load_pretrained()
    with hw.watch(decoder, maps="lazy") as record, torch.no_grad():
        decoder(torch.arange(7)[None])
    hw.report(record, tmp_path / "report.html")
    for page in ("see.html", "report.html"):
        assert '<html lang="zh' in (tmp_path / page).read_text(encoding="utf-8")
    hw.see(TEXT, loaded, out=tmp_path / "see.html", lang="en")
    assert '<html lang="en' in (tmp_path / "see.html").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_files_are_written(tmp_path):
    loaded = small_model(tmp_path, TEXT)
    steps = []
    report = hw.see(TEXT, loaded, out=tmp_path / "r.html", png=tmp_path / "maps", lang="zh",
                    progress=lambda what, done, of: steps.append(what))  # fmt: skip
    assert TEXT in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert 'lang="zh' in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert report.shape == (1, 2)
    assert len(list((tmp_path / "maps").glob("*.png"))) == 3  # each head, and all
    assert {"reading", "importance"} <= set(steps)


@pytest.mark.thorough
def test_cells_pool_longer_texts(tmp_path):
    assert hw.see(TEXT, small_model(tmp_path, TEXT), cells=8).passages[0].cell == 2


def test_any_watched_model_is_seen():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 17, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    report = hw.see({"src": torch.randn(1, 7, 12)}, model, title="encoder")
    assert (report.shape, report.title) == ((2, 3), "encoder")
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention


@pytest.mark.thorough
def test_ids_of_a_model_are_its_tokens():
    loaded = hw.load_model()
    ids = loaded.read(TEXT).ids
    report = hw.see(ids, loaded.model)
    assert report.passages[0].tokens == [str(int(i)) for i in ids]
    np.testing.assert_allclose(report.passages[0].maps, hw.see(TEXT, loaded).passages[0].maps, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hw.see(TEXT, file="x.txt"), "text or file="),
        (lambda: hw.see(TEXT, lang="fr"), "lang='fr'"),
        (lambda: hw.see(torch.zeros(3, dtype=torch.long)), "reads a str, got Tensor"),
        (lambda: hw.see(TEXT, hw.MultiHeadAttention(8, 2)), "expected token ids"),
    ],
)
def test_wrong_arguments_are_named(call, words):
    with pytest.raises(hw.ConfigError, match=re.escape(words)):
        call()


@pytest.mark.thorough
@pytest.mark.parametrize("ids", [torch.zeros(0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long)])
def test_ids_of_no_token_are_an_empty_text(ids):
    with pytest.raises(hw.TextError, match="the text is empty; give at least one token"):
        hw.see(ids, hw.load_model().model)
