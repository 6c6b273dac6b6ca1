"""`headwise check --class FOLDER`: the answers of a class in one table, with the commonest smallest counterexamples.

A pupil has a folder, with a file for each exercise, FOLDER/anna/split_heads.py; for one exercise, a file is enough,
FOLDER/anna.py. Copies such as "split_heads (1).py" are answers too: of two answers of one pupil, none is graded.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.lm import read_text
from headwise.wording import Bilingual, tr
from headwise_textbook.exercises.classes import grade_class
from headwise_textbook.exercises.exercise import CLASS, Exercise
from headwise_textbook.exercises.grade import grade

MOST = 5  # counterexamples that are listed
_COPY = re.compile(r"([ _-]*(\(\d+\)|copy( of)?|v?\d+|final|new))+$", re.IGNORECASE)
Answers = dict[tuple[str, str], list[Path]]  # by pupil and exercise


@dataclass(frozen=True)
class Mark:
    """The grade of one answer. why: what is wrong; "" if nothing."""

    passed: bool
    why: Bilingual = field(default_factory=lambda: Bilingual("", ""))
    together: str = ""  # why the code was not apart from files and network


def found_answers(folder: Path, exercises: Iterable[str], only: str | None = None) -> tuple[Answers, list[Path]]:
    """The files of pupils, and those that belong to no exercise. only: the exercise of files beside the folders."""
    answers: Answers = defaultdict(list)
    unknown = []
    names = set(exercises)
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        stem = _plain(path.stem)
        if len(parts) == 1:
            pupil, exercise = stem, only
        else:
            pupil, exercise = _plain(parts[0]), stem if stem in names else only if stem == "answer" else None
        if exercise is None or (only is not None and exercise != only):
            unknown.append(path)
        else:
            answers[pupil, exercise].append(path)
    return dict(answers), unknown


def _plain(name: str) -> str:
    return _COPY.sub("", name.strip()).replace("_", "-").lower() or name.lower()


def mark(exercise: Exercise | None, path: Path, **limits: Any) -> Mark:
    """Grade one answer; what cannot be read is wrong. exercise: None for a class of attention."""
    try:
        source = read_text(path)
    except (HeadwiseError, OSError) as error:
        return Mark(False, Bilingual(str(error), getattr(error, "zh", str(error))))
    if exercise is None:
        report = grade_class(source, file=path.name, **limits)
        first = report.lines[0]
        mark, name = f"✗ {CLASS}: ", f"✗ {CLASS}："
        return Mark(report.passed, Bilingual(first.removeprefix(mark), first.zh.removeprefix(name)))
    result = grade(exercise, source, file=path.name, **limits)
    if result.counterexample is not None:
        case = result.counterexample
        given = ", ".join(f"{name} = {value}" for name, value in case.arguments)
        return Mark(False, tr("{given}: {why}", given=given, why=case.why), result.together)
    return Mark(result.passed, result.stopped or Bilingual("", ""), result.together)


def table(answers: Answers, marks: dict[tuple[str, str], Mark]) -> tuple[list[str], list[tuple[str, ...]]]:
    """The heads and rows of the table: a pupil each, ✓ right, ✗ wrong, 2× two answers, · none."""
    columns = sorted({exercise for _, exercise in answers})
    rows = []
    for pupil in sorted({pupil for pupil, _ in answers}):
        cells = []
        for exercise in columns:
            files, graded = answers.get((pupil, exercise), []), marks.get((pupil, exercise))
            cells.append("·" if not files else f"{len(files)}×" if graded is None else "✓" if graded.passed else "✗")
        rows.append((pupil, *cells, f"{cells.count('✓')}/{len(columns)}"))
    return columns, rows


def notes(
    folder: Path, answers: Answers, unknown: list[Path], marks: dict[tuple[str, str], Mark], seed: int
) -> list[Bilingual]:
    """What comes below the table: the commonest counterexamples, answers that were not graded, and the seed."""
    out: list[Bilingual] = []
    wrong: Counter[tuple[str, str]] = Counter()
    whose, texts = defaultdict(list), {}
    for (pupil, exercise), one in sorted(marks.items()):
        if not one.passed:
            key = (exercise, str(one.why))
            wrong[key] += 1
            whose[key].append(pupil)
            texts[key] = one.why
    for key, count in wrong.most_common(MOST):
        out.append(
            tr("✗ {count} × {exercise}: {why} ({pupils})", count=count, exercise=key[0], why=texts[key],
                pupils=", ".join(whose[key]),
            )
        )  # fmt: skip
    if len(wrong) > MOST:
        out.append(tr("… and {count} other counterexamples", count=len(wrong) - MOST))
    for (pupil, exercise), files in sorted(answers.items()):
        if len(files) > 1:
            named = ", ".join(str(path.relative_to(folder)) for path in files)
            out.append(
                tr("{pupil} has {count} answers to {exercise}, none of which is graded: {files}", pupil=pupil,
                    count=len(files), exercise=exercise, files=named,
                )
            )  # fmt: skip
    if unknown:
        listed = ", ".join(str(path.relative_to(folder)) for path in unknown[:MOST])
        more = ", …" if len(unknown) > MOST else ""
        out.append(tr("files of no exercise: {count} ({files}{more})", count=len(unknown), files=listed, more=more))
    if why := next((one.together for one in marks.values() if one.together), ""):
        out.append(
            tr(
                "the code was not kept from your files, in which the solutions are, nor from the network: {why}",
                why=why,
            )
        )
    out.append(tr("the inputs were drawn with a seed that no pupil knew; --seed {seed} repeats them", seed=seed))
    return out
