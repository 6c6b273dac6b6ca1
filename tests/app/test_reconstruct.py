"""The classic experiment, faithful and masked."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.errors import TextError
from headwise.textbook.reconstruct import EPOCHS, reconstruct, stolen


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    path = tmp_path / "sentences.txt"
    path.write_text("水浒好汉聚义\n林冲夜奔\n\n武松打虎景阳冈上\n鲁智深\n", encoding="utf-8")
    return path


def test_padding_takes_weight_only_without_the_mask(sentences: Path) -> None:
    told = []
    report = reconstruct(sentences, progress=lambda what, done, of: told.append((done, of)))
    assert told[-1] == (2 * EPOCHS, 2 * EPOCHS)
    assert report.shape == (2, 4)
    assert [p.title for p in report.passages] == ["水浒好汉聚义", "林冲夜奔", "武松打虎景阳冈上", "鲁智深"]
    assert all(len(p.tokens) == 8 for p in report.passages)
    shares = report.statistics.dense("padding_mass").numpy()
    assert (shares[0] > 0.02).all()
    assert (shares[1] == 0).all()
    maps = np.stack([p.maps for p in report.passages])  # [sentences, 2, heads, n, n]
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


def test_a_file_without_sentences_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x" * 65, encoding="utf-8")
    with pytest.raises(TextError, match="no line of 1 to 64"):
        reconstruct(path)
