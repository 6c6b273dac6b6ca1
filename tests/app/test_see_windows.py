"""Texts longer than a model was trained on are read in overlapping windows; every number is that of the windows."""

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.lm.loading import LoadedModel, load_model
from headwise.reports.text import check_length, owned, size_for, windows_of
from headwise.stats import shown_in

TEXT = "武松又来打虎，再来？话说。The tiger sleeps! " * 4  # 124 characters


@pytest.fixture(scope="module")
def loaded(model_folder) -> LoadedModel:
    """Trained on 24 tokens at a time."""
    return load_model(model_folder)


def test_windows_cover_each_token_once_with_half_a_window_before_it():
    for tokens, size, lead in ((53, 24, 0), (24 + 1, 24, 1), (1009, 31, 2)):
        windows = windows_of(tokens, size, lead)
        owned_tokens = [token for window in windows for token in range(max(window.own, lead), window.stop)]
        assert owned_tokens == list(range(lead, tokens))
        assert all(window.stop - window.start == size - lead for window in windows)
        assert all(window.own - window.start >= (size - lead) // 2 for window in windows[1:])


@pytest.mark.thorough
def test_maps_statistics_and_loss_are_those_of_the_windows(loaded):
    reading = loaded.read(TEXT)
    n, size = len(reading), 24
    report = hw.see(TEXT, loaded)
    (shown,) = report.passages
    assert shown.cell == 1
    expected = np.zeros((2, 5, n, n), np.float32)
    entropies, lost = torch.zeros(2, 5, n), torch.zeros(n)
    for window in windows_of(n, size, 0):
        ids = reading.ids[window.start : window.stop]
        first = window.own - window.start
        for layer, amap in enumerate(loaded.maps(ids).values()):
            dense = amap.to_dense()[0]
            expected[layer][:, window.own : window.stop, window.start : window.stop] = dense[:, first:]
            rows = -(dense * dense.clamp_min(1e-30).log()).sum(-1)
            entropies[layer, :, window.own : window.stop] = rows[:, first:]
        with torch.no_grad():
            nats = -loaded.model(ids[None])[0].float().log_softmax(-1)
        for i in range(max(first, 1), len(ids)):
            lost[window.start + i] = nats[i - 1, ids[i]]
    assert np.allclose(shown.maps, expected, atol=1e-5)
    assert torch.allclose(report.statistics.dense("entropy").float(), entropies.mean(-1), rtol=1e-4)
    assert dict(report.facts)["loss"] == f"{lost[1:].mean():.2f} nats per token"
    assert dict(report.facts)["windows"].startswith("the text is longer than the 24 tokens")
    assert "caution" not in dict(report.facts)


@pytest.mark.thorough
def test_the_largest_logit_is_that_of_all_windows(loaded):
    reading = loaded.read(TEXT)
    found = [
        owned(amap, range(window.own - window.start, 24)).measure("max_logit")["max_logit"].amax(0)
        for window in windows_of(len(reading), 24, 0)
        for amap in [next(iter(loaded.maps(reading.ids[window.start : window.stop]).values()))]
    ]
    assert torch.allclose(hw.see(TEXT, loaded).statistics["max_logit"][0].float(), torch.stack(found).amax(0))


@pytest.mark.thorough
def test_a_long_text_is_pooled_from_its_windows(loaded):
    exact = hw.see(TEXT, loaded).passages[0].maps
    shown = hw.see(TEXT, loaded, cells=31).passages[0]
    cell = shown.cell
    n = exact.shape[-1]
    side = -(-n // cell)
    whole = np.zeros((2, 5, side * cell, side * cell), np.float32)
    whole[..., :n, :n] = exact
    tiles = whole.reshape(2, 5, side, cell, side, cell)
    assert np.allclose(shown.peaks, tiles.max((3, 5)), atol=1e-6)
    within = (tiles > 0).sum((3, 5))
    assert np.allclose(shown.maps, tiles.sum((3, 5)) / np.maximum(within, 1), atol=1e-4)


@pytest.mark.thorough
def test_a_short_text_is_read_whole_and_zero_reads_every_text_whole(loaded):
    assert "windows" not in dict(hw.see(TEXT[:24], loaded).facts)
    whole = dict(hw.see(TEXT, loaded, window=0).facts)
    assert "windows" not in whole
    assert "Do not trust" in whole["caution"]
    assert size_for(loaded, 240, 11) == 11


@pytest.mark.thorough
def test_a_window_beyond_the_training_is_a_caution(loaded):
    assert "last 7 tokens" in dict(hw.see(TEXT, loaded, window=31).facts)["caution"]


@pytest.mark.parametrize("window", [-1, 7])
def test_a_window_that_is_too_small_is_refused(loaded, window):
    with pytest.raises(hw.ConfigError, match=f"window={window}: expected at least 8 tokens, or 0"):
        hw.see(TEXT, loaded, window=window)


@pytest.mark.parametrize("window", ["8", 8.5])
def test_a_window_that_is_no_number_of_tokens_is_refused(loaded, window):
    for model in (loaded, None):
        with pytest.raises(hw.ConfigError, match=f"window={window!r}: expected a whole number of tokens"):
            hw.see(TEXT, model, window=window)


@pytest.mark.thorough
def test_every_statistic_of_a_report_is_there_in_windows(loaded):
    short, long = (hw.see(text, loaded).statistics for text in (TEXT[:24], TEXT))
    assert list(long) == list(short)
    assert set(long) <= set(shown_in("report"))


def test_a_module_has_no_windows(loaded):
    with pytest.raises(hw.ConfigError, match="window: applies to a loaded model"):
        hw.see(torch.arange(3), torch.nn.MultiheadAttention(8, 2), window=8)


@pytest.mark.thorough
def test_a_text_of_megabytes_is_refused_with_the_time_it_would_take(headwise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large.txt").write_text("武松打虎，又打虎。\n" * 350_000, encoding="utf-8")  # 10 MB
    done = headwise("see", "--file", "large.txt")
    assert done.code == 2
    assert "the text has about 3,500,000 tokens and would take about" in done.err
    assert "headwise view" in done.err
    assert "headwise measure" in done.err
    assert not (tmp_path / "report.html").exists()


def test_a_text_that_is_long_in_characters_only_is_read(loaded, monkeypatch):
    monkeypatch.setattr("headwise.reports.text.MOST", 50)
    with pytest.raises(hw.TextError, match=f"about {len(TEXT)} tokens"):
        check_length(loaded, TEXT)
    monkeypatch.setattr("headwise.reports.text.MOST", 300)
    check_length(loaded, TEXT)


@pytest.mark.thorough
def test_a_character_of_several_tokens_is_one_cell(loaded):
    text = TEXT[:40] + "鱼" + TEXT[40:80]  # three bytes to this model
    shown = hw.see(text, loaded).passages[0]
    assert (len(shown.tokens), shown.maps.shape[-1], len(loaded.read(text))) == (81, 81, 83)
    assert np.allclose(shown.maps.sum(-1), 1, atol=1e-5)
