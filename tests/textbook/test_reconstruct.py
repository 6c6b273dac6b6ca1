"""The classic experiment, faithful and masked."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.errors import ConfigError, TextError
from headwise_textbook.demonstration import BRIGHT, PASSAGES, demonstrate
from headwise_textbook.reconstruct import EPOCHS, reconstruct, sentences_in, stolen

PARAGRAPHS = "\n".join(PASSAGES) + "\n"


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    path = tmp_path / "sentences.txt"
    path.write_text("水浒好汉聚义\n林冲夜奔\n\n武松打虎景阳冈上\n鲁智深\n", encoding="utf-8")
    return path


@pytest.mark.thorough
def test_padding_takes_weight_only_without_the_mask(sentences: Path) -> None:
    told = []
    report = reconstruct(sentences, progress=lambda what, done, of: told.append((done, of)))
    assert told[-1] == (2 * EPOCHS, 2 * EPOCHS)
    assert report.shape == (3, 4)
    assert [p.title for p in report.passages] == ["水浒好汉聚义", "林冲夜奔", "武松打虎景阳冈上", "鲁智深"]
    assert all(len(p.tokens) == 8 for p in report.passages)
    shares = report.statistics.dense("padding_mass").numpy()
    assert (shares[0] > 0.02).all()
    assert (shares[1] == 0).all()
    maps = np.stack([p.maps for p in report.passages])  # [sentences, 3, heads, n, n]
    np.testing.assert_allclose(maps[:, 0].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(maps[3, 1, :, :3].sum(-1), 1, atol=1e-5)
    assert (maps[3, 1, :, 3:] == 0).all()


@pytest.mark.thorough
def test_both_learn_and_repeat_with_the_seed(sentences: Path) -> None:
    one, two = reconstruct(sentences, seed=5), reconstruct(sentences, seed=5)
    assert one.facts == two.facts
    for name in ("loss, faithful (layer 0)", "loss, masked (layer 1)"):
        first, last = (float(x) for x in dict(one.facts)[name].split(" → "))
        assert last < 0.5 * first


def test_stolen_counts_real_queries_only() -> None:
    weights = torch.zeros(2, 1, 3, 3)
    weights[0, 0] = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # one real character
    weights[1, 0] = torch.eye(3)  # all real
    assert stolen(weights, torch.tensor([1, 3])).tolist() == [pytest.approx(0.5 / 4)]


@pytest.mark.thorough
def test_whole_paragraphs_and_the_view_after_dropout(tmp_path: Path) -> None:
    path = tmp_path / "paragraphs.txt"
    path.write_text(PARAGRAPHS, encoding="utf-8")
    report = reconstruct(path, length=137)
    assert [len(p.title) for p in report.passages] == [137, 81, 74]
    assert "".join(report.passages[2].tokens) == report.passages[2].title + "·" * 63
    assert report.passages[2].special == list(range(74, 137))
    plain, dropped = report.passages[0].maps[0], report.passages[0].maps[2]
    assert 0.08 < (dropped == 0).mean() < 0.12
    kept = dropped > 0
    np.testing.assert_allclose(dropped[kept], plain[kept] / 0.9, rtol=1e-5)
    sums = dropped.sum(-1)
    assert sums.min() < 0.8
    assert 1.05 < sums.max() < 1.112
    assert any("exactly 0" in note for note in report.notes)


def test_paragraphs_are_split_at_their_sentences_and_nothing_is_lost() -> None:
    found = sentences_in(PARAGRAPHS, 64)
    assert "".join(found.used) == PARAGRAPHS.replace("\n", "")
    assert max(map(len, found.used)) <= 64
    assert found.used[0] == "話說大宋仁宗天子在位，嘉祐三年三月三日五更三點，天子駕坐紫宸殿，受百官朝賀。"
    assert all(one[-1] in "。”" for one in found.used)
    assert found.notes[0].startswith("3 of 3 lines have more than 64 characters and were split")


def test_long_sentences_are_cut_at_commas_and_then_anywhere() -> None:
    assert sentences_in("He ran, she sat. Mr X slept, at 3.5 p.m., well.", 17).used == [
        "He ran, she sat.", "Mr X slept,", "at 3.5 p.m.,", "well.",
    ]  # fmt: skip
    found = sentences_in("abcdefghijkl,mn", 5)
    assert found.used == ["abcde", "fghij", "kl,mn"]
    assert "cut at commas, or every 5 characters" in found.notes[1]


def test_sentences_beyond_the_first_32_are_named() -> None:
    found = sentences_in("好" * 10_000, 64)
    assert len(found.used) == 32
    assert found.notes[-1] == "Left out: the last 125 of 157 sentences (7,952 characters); at most 32 are used."


@pytest.mark.thorough
def test_one_character_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("水", encoding="utf-8")
    weights = reconstruct(path).passages[0].maps[1]
    assert weights.shape == (4, 1, 1)
    assert abs(weights - 1.0).max() < 2e-7


def test_brightness_is_relative_to_a_uniform_head_and_padding_counts_apart() -> None:
    """Two epochs leave weights that are nearly uniform, as they are before any training."""
    found = demonstrate(("天子，", "宋仁宗天"), epochs=2)
    weights = np.stack([passage.maps[0] for passage in found.report.passages]) * 4  # [passages, heads, n, n]
    assert list(found.keys) == ["itself", "beside", "first", "marks", "padding"]
    assert list(found.pairs) == ["宋 → 天", "天 → 子", "子 → 天"]
    np.testing.assert_allclose(found.pairs["宋 → 天"], weights[1, :, 0, 3])
    np.testing.assert_allclose(found.pairs["子 → 天"], weights[0, :, 1, 0])
    np.testing.assert_allclose(found.keys["padding"], weights[0, :, :3, 3].mean(-1), rtol=1e-6)
    np.testing.assert_allclose(found.keys["marks"], weights[0, :, :3, 2].mean(-1), rtol=1e-6)
    real = np.concatenate((weights[0, :, :3, :3].ravel(), weights[1].ravel()))
    assert found.bright == pytest.approx((real >= BRIGHT).mean())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "only white space"),
        (b"\x89PNG\r\n", "not UTF-8"),
        (b"ab\0c", "NUL byte at offset 2"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(TextError, match=words):
        reconstruct(path)


@pytest.mark.parametrize("length", [0, 301])
def test_lengths_without_room_are_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConfigError, match=f"length={length}: expected 1 to 300"):
        reconstruct(tmp_path / "unread.txt", length=length)
