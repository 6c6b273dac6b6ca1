"""The report says what the model does, for any text."""

import io
import math
import re
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from headwise.edit import prune
from headwise.errors import TextError
from headwise.lm.loading import DecoderModel
from headwise.lm.model import Decoder
from headwise.lm.texts import CharTokenizer
from headwise.reports.numbers import _windows
from headwise.reports.page import write_report
from headwise.reports.passages import sentences
from headwise.reports.pictures import write_pngs
from headwise.reports.see import see
from headwise.reports.views import print_report
from headwise.stats import shown_in
from headwise.wording import in_language, scaled

Model = tuple[Decoder, CharTokenizer]


def dense(model: Model, text: str) -> np.ndarray:
    """The weights of every head, by the textbook."""
    decoder, tokenizer = model
    with torch.no_grad():
        _, maps = decoder(torch.from_numpy(tokenizer.encode(text))[None], return_maps=True)
    found = []
    for amap in maps:
        scores = amap.q.double() @ amap.k.double().mT * amap.rule.scale
        n = scores.shape[-1]
        found.append(scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)[0])
    return torch.stack(found).numpy()


@pytest.mark.thorough
def test_short_text_is_shown_exactly(model: Model) -> None:
    text = "武松打虎。又来，"
    report = see(text, DecoderModel(*model))
    assert report.shape == (2, 5)
    passage = report.passages[0]
    assert passage.tokens == list(text)
    assert passage.cell == 1
    assert passage.peaks is None
    np.testing.assert_allclose(passage.maps, dense(model, text), atol=1e-6)


@pytest.mark.thorough
def test_statistics_are_those_of_the_maps(model: Model) -> None:
    text = "武松打虎，再来？The tiger"
    report = see(text, DecoderModel(*model))
    p = dense(model, text)
    values = {name: report.statistics.dense(name).numpy() for name in report.statistics}
    assert set(shown_in("report")) - {"next_mass", "special_mass"} == set(values)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1).mean(-1)
    np.testing.assert_allclose(values["entropy"], entropy, rtol=1e-5)
    np.testing.assert_allclose(values["sink_mass"], p[..., 0].mean(-1), rtol=1e-5)
    marks = [c in "，？" for c in text]
    np.testing.assert_allclose(values["punctuation_mass"], p[..., marks].sum(-1).mean(-1), rtol=1e-5)


@pytest.mark.thorough
def test_unseen_characters_are_read_as_bytes_and_shown_whole(model: Model) -> None:
    text = "武😀松龘"
    report = see(text, DecoderModel(*model))
    passage = report.passages[0]
    assert passage.tokens == list(text)
    assert passage.maps.shape[2:] == (4, 4)
    np.testing.assert_allclose(passage.maps.sum(-1), 1, atol=1e-6)
    # 😀 is four bytes, 龘 three: characters 0, 1, 2, 3 are the tokens 0, 1–4, 5, 6–8.
    p = dense(model, text)
    parts = [[0], [1, 2, 3, 4], [5], [6, 7, 8]]
    expected = np.array([[p[:, :, i][..., j].sum(-1).mean(-1) for j in parts] for i in parts]).transpose(2, 3, 0, 1)
    np.testing.assert_allclose(passage.maps, expected, atol=1e-6)
    assert any("2 of the characters" in note for note in report.notes)


@pytest.mark.thorough
def test_long_text_is_pooled_mean_and_largest(model: Model) -> None:
    text = "武松打虎。" * 13
    report = see(text, DecoderModel(*model), cells=16, window=0)
    passage = report.passages[0]
    assert passage.cell == 5
    assert passage.maps.shape == (2, 5, 13, 13)
    p = dense(model, text)
    squares = p.reshape(2, 5, 13, 5, 13, 5)
    assert passage.peaks is not None
    np.testing.assert_allclose(passage.peaks, squares.max((3, 5)), atol=1e-6)
    allowed = np.tril(np.ones((65, 65))).reshape(13, 5, 13, 5).sum((1, 3))
    np.testing.assert_allclose(passage.maps, squares.sum((3, 5)) / np.maximum(allowed, 1), atol=1e-6)
    assert any("24 tokens at a time" in value for name, value in report.facts if name == "caution")


@pytest.mark.thorough
def test_pooled_text_keeps_every_character(model: Model) -> None:
    text = "武😀松\n" * 20
    assert "".join(see(text, DecoderModel(*model), cells=16).passages[0].tokens) == text


@pytest.mark.thorough
def test_one_character(model: Model) -> None:
    report = see("武", DecoderModel(*model))
    facts = [(in_language(name, "zh"), value, in_language(value, "zh")) for name, value in report.facts]
    size = scaled(model[0].num_parameters)
    assert facts[0] == ("文本", "1 character", "1 个字符")
    assert facts[1][1:] == (f"2 layers × 5 heads, d_model 20, {size} weights", f"2 层 × 5 头，d_model 20，{size} 参数")
    assert size.endswith(" k")
    np.testing.assert_allclose(report.passages[0].maps, np.ones((2, 5, 1, 1)), rtol=1e-6)
    assert bool(report.statistics.tensor().isfinite().all())


def test_empty_text_is_refused(model: Model) -> None:
    with pytest.raises(TextError, match="empty"):
        see("", DecoderModel(*model))


@pytest.mark.thorough
def test_progress_is_told_to_its_end(model: Model) -> None:
    told: dict[str, tuple[int, int]] = {}
    see(
        "武松打虎。" * 13,
        DecoderModel(*model),
        cells=16,
        window=0,
        progress=lambda what, done, of: told.__setitem__(what, (done, of)),
    )
    assert set(told) == {
        "reading", "measuring", "pooling (mean)", "pooling (max)", "roles", "comparing", "importance",
    }  # fmt: skip
    assert all(done == of for done, of in told.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("武松。打虎！", ["武松。", "打虎！"]),
        ("“好！”他说。走了", ["“好！”他说。", "走了"]),
        ("It is 3.5 m. Go on", ["It is 3.5 m.", " Go on"]),
        ("a\n\nb\n", ["a\n\n", "b\n"]),
        ("no end", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    found = sentences(list(text))
    assert [text[a:b] for a, b in found] == expected


@pytest.mark.thorough
def test_heads_are_compared_and_judged_by_the_loss(model: Model) -> None:
    text = "武松打虎，再来？The tiger sleeps!"
    report = see(text, DecoderModel(*model))
    assert [len(row) for row in report.labels] == [5, 5]
    assert len(report.comparisons) == 3
    for comparison in report.comparisons:
        np.testing.assert_allclose(comparison.values, comparison.values.T, atol=1e-6)
    cka = report.comparisons[0].values
    np.testing.assert_allclose(np.diag(cka), 1, atol=1e-5)
    decoder, tokenizer = model
    ids = torch.from_numpy(tokenizer.encode(text))
    losses = {}
    for head in (None, 3):  # by hand: the head's columns of W_O are zero
        layer = deepcopy(decoder)
        if head is not None:
            with torch.no_grad():
                layer.blocks[1].attention.o_proj.weight[:, head * 4 : head * 4 + 4] = 0
        with torch.no_grad():
            losses[head] = float(torch.nn.functional.cross_entropy(layer(ids[None])[0, :-1], ids[1:]))
    without = report.importance.dense("loss without it").numpy()
    assert without.shape == (2, 5)
    assert without[1, 3] == pytest.approx(losses[3] - losses[None], abs=1e-5)


def test_a_text_longer_than_the_context_is_judged_by_windows_of_it(model: Model) -> None:
    decoder, tokenizer = model
    ids = torch.from_numpy(tokenizer.encode("武松打虎，再来？" * 40))
    windows = _windows(ids, decoder.config.context)
    assert 1 < len(windows) <= 8
    assert {window.shape for window in windows} == {(1, decoder.config.context + 1)}
    assert torch.equal(windows[0][0], ids[: decoder.config.context + 1])
    assert torch.equal(windows[-1][0], ids[-decoder.config.context - 1 :])


@pytest.mark.thorough
def test_layers_with_different_heads_are_seen(model: Model, tmp_path: Path) -> None:
    decoder, tokenizer = model
    text = "武松打虎，再来？The tiger sleeps!"
    pruned = prune(decoder, {1: [0, 3]}, copy=True).model
    whole, report = see(text, DecoderModel(decoder, tokenizer)), see(text, DecoderModel(pruned, tokenizer))
    assert report.shape == (2, 5)
    assert report.counts == [5, 3]
    np.testing.assert_allclose(report.passages[0].maps[0], whole.passages[0].maps[0], atol=1e-6)
    assert not report.passages[0].maps[1, 3:].any()
    assert report.patterns[1][3:] == ["", ""]
    assert report.importance["loss without it"][1].isfinite().tolist() == [True] * 3
    console = Console(width=200, file=io.StringIO())
    print_report(report, console)
    assert console.file.getvalue().count("█") > 0
    pictures = write_pngs(report, tmp_path)
    assert len(pictures) == 1 + 8
    assert '"counts":[5,3]' in write_report(report, tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_a_text_of_a_few_characters_is_not_compared(model: Model) -> None:
    report = see("武松", DecoderModel(*model))
    assert report.comparisons == []
    assert list(report.importance) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("heldout", "warned"), [(2.0, True), (50.0, False), (None, False)])
def test_the_head_of_the_report_compares_the_loss_with_held_out_losses(
    model: tuple[Decoder, CharTokenizer], heldout: float | None, warned: bool
) -> None:
    info = {} if heldout is None else {"heldout": {"a.txt": 1.5, "b.txt": heldout, "all": 99.0}}
    facts = see("武松打虎，再来？", DecoderModel(*model, info=info)).facts
    said = dict(facts)
    assert said.get("held-out loss", "").startswith("" if heldout is None else f"1.50 to {heldout:.2f} nats per token")
    assert ("held-out loss" in said) == (heldout is not None)
    cautions = [value for name, value in facts if name == "caution"]
    assert len(cautions) == warned
    if warned:
        loss = float(said["loss"].split()[0])
        choices = int(re.search(r"among ([\d,]+) tokens", cautions[0])[1].replace(",", ""))  # type: ignore[index]
        assert choices == pytest.approx(math.exp(loss), rel=0.01, abs=1)
        assert "at most 2.00 (7 tokens)" in cautions[0]


def test_held_out_losses_of_a_model_that_was_changed_are_not_its_own(model: tuple[Decoder, CharTokenizer]) -> None:
    loaded = DecoderModel(*model, info={"heldout": {"a.txt": 1.5}, "changes": [{"prune": [[0, 1]]}]})
    assert loaded.heldout == {}


@pytest.mark.thorough
def test_the_head_of_the_report_says_what_is_beyond_the_trained_length(model: tuple[Decoder, CharTokenizer]) -> None:
    reports = [see("武" * n, DecoderModel(*model), window=0) for n in (24, 31)]
    cautions = [[value for name, value in report.facts if name == "caution"] for report in reports]
    assert cautions[0] == []
    assert "trained on 24 tokens at a time" in cautions[1][0]
    assert "the last 7 tokens" in cautions[1][0]
    assert "最后 7 个词元" in cautions[1][0].zh


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("args", "desktop", "opens"),
    [([], True, True), ([], False, False), (["--no-open"], True, False), (["--open"], False, True)],
)
def test_the_report_is_opened_on_a_desktop(headwise, model_folder, monkeypatch, tmp_path, args, desktop, opens):
    opened = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headwise.cli.see.on_desktop", lambda: desktop)
    monkeypatch.setattr("headwise.cli.see.open_in_browser", lambda path: opened.append(path.exists()) or True)
    done = headwise("see", "武松打虎。", "--model", model_folder, *args)
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("Wrote the report to report.html")
    assert opened == [True] * opens


def test_a_browser_that_is_not_there_is_one_sentence(headwise, model_folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda *_: False)
    monkeypatch.setattr("webbrowser.get", lambda *_: (_ for _ in ()).throw(__import__("webbrowser").Error("none")))
    done = headwise("see", "武松打虎。", "--model", model_folder, "--open")
    assert done.code == 0
    assert "No browser could be opened here" in done.out
    assert headwise("see", "武松", "--open", "--out", "-").code == 2


def test_a_desktop_has_a_display_and_a_person(monkeypatch):
    from headwise.cli.options import on_desktop

    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for name in ("CI", "SSH_CONNECTION", "WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not on_desktop()
    monkeypatch.setenv("DISPLAY", ":0")
    assert on_desktop()
    monkeypatch.setenv("SSH_CONNECTION", "1.2.3.4 5 6.7.8.9 22")
    assert not on_desktop()
