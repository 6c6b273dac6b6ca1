"""Check a corpus before it is measured: every file is read once, so that errors are raised early, and the limit is
found if only a number of tokens is measured."""

from collections.abc import Sequence

from headwise.corpus import pieces
from headwise.corpus.plan import Limit
from headwise.corpus.sources import Advance, Print, Source, check
from headwise.corpus.work import Work


def survey(work: Work, max_tokens: int | None, advance: Advance) -> tuple[list[Print], list[int], Limit | None]:
    """The prints of the measured files, the bytes that were checked of each, and the limit.

    Raises:
        TextError: naming the file and the place that cannot be read.
    """
    limit = None if max_tokens is None else _limit(work, max_tokens)
    sources = work.sources if limit is None else work.sources[: limit.source + 1]
    prints, checked = [], []
    for i, source in enumerate(sources):
        upto = source.size
        if limit is not None and i == limit.source:
            upto = pieces.end(source, limit.piece, work.step)
        prints.append(check(source, work.field, upto, advance))
        if source.kind == "jsonl":
            pieces.check_lines(source, 0, upto, work.field)
        checked.append(upto)
    return prints, checked, limit


def _limit(work: Work, max_tokens: int) -> Limit | None:
    """The place at which the corpus reaches `max_tokens`; None if it has fewer."""
    left = max_tokens
    for i, source in enumerate(work.sources):
        for piece in range(pieces.count(source, work.step)):
            there = 0
            for _, ids, _ in work.texts(i, piece):
                there += len(ids)
                if there >= left:
                    return Limit(i, piece, left)
            left -= there
    return None


def total(sources: Sequence[Source]) -> int:
    """Bytes of all files."""
    return sum(source.size for source in sources)
