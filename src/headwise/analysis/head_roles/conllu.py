"""Dependency trees from CoNLL-U files (universaldependencies.org/format.html)."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import TextError
from headwise.files import check_regular

COLUMNS = 10  # ID FORM LEMMA UPOS XPOS FEATS HEAD DEPREL DEPS MISC


@dataclass(frozen=True)
class Sentence:
    """A sentence with its tree.

    Attributes:
        words: the forms. heads: of each word, the index of its head in `words`, −1 for the root.
        relations: of each word to its head, such as "nsubj" or "nmod:poss"; line: its first line in the file, from 1.
    """

    words: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]
    line: int = 1


def read_conllu(path: str | os.PathLike[str]) -> list[Sentence]:
    """Read the sentences of a CoNLL-U file.

    Lines of multiword tokens (3-4) and of empty nodes (3.1) are skipped: arcs are between words.

    Raises:
        TextError: if the file cannot be read, is not UTF-8, or holds a line that is not CoNLL-U or arcs that are not a
            tree; the message names the line.
    """
    name = str(path)
    try:
        check_regular(path)
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TextError(f"{name!r} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TextError(f"{name!r} is not UTF-8 at byte {error.start}; CoNLL-U files are") from None
    return parse_conllu(text.split("\n"), name)


def parse_conllu(lines: Iterable[str], name: str = "CoNLL-U") -> list[Sentence]:
    """Read sentences from lines; errors call them `name`."""
    sentences: list[Sentence] = []
    block: list[tuple[int, list[str]]] = []  # line number and columns of each word
    for number, line in enumerate([*lines, ""], 1):
        line = line.rstrip("\r\n")
        if not line.strip():
            if block:
                sentences.append(_sentence(block, name))
            block = []
        elif not line.startswith("#"):
            columns = line.split("\t")
            if len(columns) != COLUMNS:
                hint = "; are they separated by spaces instead of tabs?" if len(columns) == 1 else ""
                raise TextError(f"{name}, line {number}: {len(columns)} columns, expected {COLUMNS}{hint}")
            if not _is_skipped(columns[0], number, name):
                block.append((number, columns))
    return sentences


def _is_skipped(identity: str, number: int, name: str) -> bool:
    """Whether the line is a multiword token or an empty node."""
    for sign in "-.":
        parts = identity.split(sign)
        if len(parts) == 2 and all(part.isdecimal() for part in parts):
            return True
    if not identity.isdecimal():
        raise TextError(f"{name}, line {number}: ID {identity!r}, expected a number such as 3, 3-4 or 3.1")
    return False


def _sentence(block: list[tuple[int, list[str]]], name: str) -> Sentence:
    heads = []
    for place, (number, columns) in enumerate(block, 1):
        where = f"{name}, line {number}"
        if int(columns[0]) != place:
            raise TextError(f"{where}: ID {columns[0]}, expected {place}: words are counted from 1 in each sentence")
        if not columns[1] or columns[1] != columns[1].strip():
            raise TextError(f"{where}: FORM {columns[1]!r}, expected a word")
        if not columns[6].isdecimal() or not 0 <= int(columns[6]) <= len(block):
            raise TextError(f"{where}: HEAD {columns[6]!r}, expected 0 (the root) to {len(block)}, a word's ID")
        if columns[7] in ("", "_"):
            raise TextError(f"{where}: DEPREL {columns[7]!r}, expected a relation such as nsubj")
        heads.append(int(columns[6]) - 1)
    _check_tree(heads, [number for number, _ in block], name)
    return Sentence(
        tuple(columns[1] for _, columns in block), tuple(heads), tuple(columns[7] for _, columns in block), block[0][0]
    )


def _check_tree(heads: list[int], numbers: list[int], name: str) -> None:
    roots = [i for i, head in enumerate(heads) if head < 0]
    if len(roots) != 1:
        raise TextError(f"{name}, line {numbers[0]}: {len(roots)} words have HEAD 0 in this sentence, expected one")
    safe = set(roots)
    for start in range(len(heads)):
        path = []
        at = start
        while at not in safe:
            if at in path:
                raise TextError(f"{name}, line {numbers[at]}: following HEAD from this word leads back to it")
            path.append(at)
            at = heads[at]
        safe.update(path)
