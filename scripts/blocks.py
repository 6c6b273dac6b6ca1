"""The blocks of a Markdown page that a script writes: what stands between two marks."""

from pathlib import Path

from headwise.base.files import atomic_path


def replaced(text: str, begin: str, end: str, made: str, page: Path) -> str:
    """The page's text with a block's lines as they are now made; ends the program if the page lacks the marks."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} lacks {begin} … {end}")
    return f"{before}{begin}\n{made}\n{end}{after}"


def write(page: Path, begin: str, end: str, made: str) -> None:
    """Put the block into the page's file."""
    text = replaced(page.read_text(encoding="utf-8"), begin, end, made, page)
    with atomic_path(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
