"""Files become streams; windows stay inside one file's training part."""

from pathlib import Path

import pytest
import torch

from headwise.errors import ConfigError, TextError
from headwise.lm.texts import Corpus

CONTEXT = 11


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files with no character in common, whose held-out parts have characters of their own."""
    texts = {"one.txt": "abcdefgh" * 57 + "XY" * 12, "two.txt": "水浒武松林冲" * 114 + "宋江" * 18}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [tmp_path / name for name in texts]


def test_the_last_twentieth_of_each_file_is_held_out(files: list[Path]) -> None:
    corpus = Corpus.read(files, context=CONTEXT)
    for file, train, heldout in zip(files, corpus.train, corpus.heldout, strict=True):
        text = file.read_text(encoding="utf-8")
        assert corpus.tokenizer.decode(train) + corpus.tokenizer.decode(heldout) == text
        assert len(corpus.tokenizer.decode(heldout)) == int(len(text) * 0.05)
    assert not set("XY宋江") & set(corpus.tokenizer.characters)  # the vocabulary has not seen it either


def test_windows_lie_inside_the_training_part_of_one_file(files: list[Path]) -> None:
    corpus = Corpus.read(files, context=CONTEXT, byte_rate=0)
    streams = ["".join(map(chr, s.tolist())) for s in corpus.train]
    batch = corpus.batch(300, CONTEXT, seed=1, step=0)
    assert batch.shape == (300, CONTEXT + 1)
    where = [[("".join(map(chr, row.tolist()))) in stream for stream in streams] for row in batch]
    assert all(sum(found) == 1 for found in where)
    assert {found.index(True) for found in where} == {0, 1}


@pytest.mark.thorough
def test_every_window_can_be_drawn_and_the_last_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 20 * (CONTEXT + 1)))), encoding="utf-8")
    corpus = Corpus.read([tmp_path / "t"], context=CONTEXT)
    stream = corpus.train[0]
    starts = {tuple(row) for step in range(40) for row in corpus.batch(500, CONTEXT, seed=0, step=step).tolist()}
    assert starts == {tuple(stream[s : s + CONTEXT + 1].tolist()) for s in range(len(stream) - CONTEXT)}


def test_a_batch_is_given_by_seed_and_step(files: list[Path]) -> None:
    corpus = Corpus.read(files, context=CONTEXT)
    one = corpus.batch(7, CONTEXT, seed=1, step=5)
    assert torch.equal(one, corpus.batch(7, CONTEXT, seed=1, step=5))
    assert not torch.equal(one, corpus.batch(7, CONTEXT, seed=1, step=6))
    assert not torch.equal(one, corpus.batch(7, CONTEXT, seed=2, step=5))


@pytest.mark.thorough
def test_repeated_windows_repeat_their_beginning(tmp_path: Path) -> None:
    context = 64
    (tmp_path / "t").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 2000))), encoding="utf-8")
    corpus = Corpus.read([tmp_path / "t"], context=context, byte_rate=0)

    def repeats(row: torch.Tensor) -> bool:
        return any(torch.equal(row[p:], row[:-p]) for p in range(1, context // 2 + 1))

    assert all(repeats(row) for row in corpus.batch(40, context, seed=0, step=0, repeat_share=1.0))
    some = [repeats(row) for row in corpus.batch(400, context, seed=0, step=0, repeat_share=0.25)]
    assert sum(some) / 400 == pytest.approx(0.25, abs=0.07)
    assert not any(repeats(row) for row in corpus.batch(40, context, seed=0, step=0))


def test_heldout_windows_cover_the_held_out_part_in_order(files: list[Path]) -> None:
    corpus = Corpus.read(files, context=CONTEXT)
    for windows, stream in zip(corpus.heldout_windows(CONTEXT), corpus.heldout, strict=True):
        targets = windows[:, 1:].flatten()
        assert torch.equal(targets, stream[1 : 1 + len(targets)])
        assert len(stream) - len(targets) <= CONTEXT
    assert all(len(windows) == 1 for windows in corpus.heldout_windows(CONTEXT, most=1))


@pytest.mark.parametrize(("content", "problem"), [("", "is empty"), ("abc" * 50, "150 characters.*at least 240")])
def test_too_little_text_is_told_with_the_file(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "t.txt").write_text(content)
    with pytest.raises(TextError, match=rf"t\.txt.*{problem}"):
        Corpus.read([tmp_path / "t.txt"], context=CONTEXT)


def test_as_much_text_as_the_message_asks_for_is_enough(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("ab" * (10 * (CONTEXT + 1)))
    corpus = Corpus.read([tmp_path / "t.txt"], context=CONTEXT)
    assert len(corpus.heldout_windows(CONTEXT)[0]) == 1


def test_no_files_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no files"):
        Corpus.read([], context=CONTEXT)
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        Corpus.read([tmp_path / "absent.txt"], context=CONTEXT)
