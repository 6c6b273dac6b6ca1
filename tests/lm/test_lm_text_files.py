"""Texts from files: one reader for all of them."""

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from headwise.errors import TextError
from headwise.lm.texts import MARK, decoded, read_text


def test_line_ends_are_made_one_and_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(MARK + b"a\r\nb\rc\n\nd")
    assert read_text(tmp_path / "t") == "a\nb\nc\n\nd"
    assert decoded(MARK + b"a", "t", 7) == "\ufeffa"  # a mark only at the beginning


@pytest.mark.parametrize("mark", [b"", MARK])
def test_bytes_that_are_no_utf8_are_told_with_file_and_offset(tmp_path: Path, mark: bytes) -> None:
    # 水 is CB AE in GB 18030, which happens to be UTF-8 too; 浒, E4 B0, is not.
    (tmp_path / "gb.txt").write_bytes(mark + "abc水浒".encode("gb18030"))
    with pytest.raises(TextError, match=rf"gb\.txt.*0xe4 at offset {len(mark) + 5};"):
        read_text(tmp_path / "gb.txt")


@pytest.mark.parametrize("first", [0, 7])
def test_a_nul_byte_is_no_text(first: int) -> None:
    begun = b"" if first else MARK
    with pytest.raises(TextError, match=f"t.txt' is not text: NUL byte at offset {first + len(begun) + 3};"):
        decoded(begun + "水\0".encode(), "t.txt", first)


@pytest.mark.thorough
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), st.booleans(), st.integers(1, 1 << 40))
@settings(deadline=None, max_examples=60)
def test_the_offset_is_that_of_the_file(text: str, mark: bool, first: int) -> None:
    begun = MARK * mark + text.encode()
    with pytest.raises(TextError, match=f"byte 0xff at offset {len(begun)};"):
        decoded(begun + b"\xff!", "t.txt")
    with pytest.raises(TextError, match=f"byte 0xff at offset {first + len(begun)};"):
        decoded(begun + b"\xff!", "t.txt", first)


@pytest.mark.parametrize("content", [b"", MARK])
def test_a_file_without_text_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(TextError, match=r"t\.txt' is empty"):
        read_text(tmp_path / "t.txt")
