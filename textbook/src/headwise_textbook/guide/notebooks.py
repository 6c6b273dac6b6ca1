"""The topics as Jupyter notebooks, with the outputs of their pages."""

import json
from typing import Any

from headwise.wording import Bilingual, in_language
from headwise_textbook.guide.page import WORDS, claims_table, exercise_text
from headwise_textbook.guide.prose import wrapped_off
from headwise_textbook.guide.topic import Exercise, Topic

GRADE = Bilingual(
    "# Write the function above, run its cell, then this one.\n",
    "# 写好上面的函数并运行它所在的单元格，再运行本单元格。\n",
)


def notebook(topic: Topic, lang: str, output: str) -> dict[str, Any]:
    """A notebook of format 4.5. output: what the code of the topic prints."""
    code = topic.code_in(lang)
    if topic.is_command:
        code = "import sys\n!{sys.executable} -m " + code
    formula = f"$$\n{in_language(topic.formula, lang).strip()}\n$$"
    cells = [
        _text(
            f"# {in_language(topic.title, lang)}\n\n{wrapped_off(in_language(topic.introduction, lang))}\n\n{formula}"
        ),
        _code(code, output),
        _text(wrapped_off(in_language(topic.reading, lang))),
        _text(f"![](../../pictures/{topic.name}.{lang}.svg)\n\n*{in_language(topic.caption, lang)}*"),
    ]
    if topic.claims:
        cells.append(_text(f"## {in_language(WORDS['claims'], lang)}\n\n{claims_table(topic, lang)}"))
    cells.append(_text(f"## {in_language(WORDS['exercises'], lang)}"))
    for one in topic.exercises:
        cells += [_text(exercise_text(one, lang)), *_exercise(one, lang)]
    for number, cell in enumerate(cells):
        cell["id"] = f"{topic.name.replace('_', '-')}-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def to_json(made: dict[str, Any]) -> str:
    """The content of an .ipynb file."""
    return json.dumps(made, ensure_ascii=False, indent=1) + "\n"


def _exercise(one: Exercise, lang: str) -> list[dict[str, Any]]:
    """A cell in which a reader writes the function, and one that grades it."""
    written = f"%%writefile {one.function}.py\n{one.skeleton}\n    raise NotImplementedError\n"
    option = " --lang zh" if lang == "zh" else ""
    grade = f"import sys\n!{{sys.executable}} -m headwise check {one.name} {one.function}.py{option}"
    return [_code(written), _code(in_language(GRADE, lang) + grade)]


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def _code(source: str, output: str = "") -> dict[str, Any]:
    said = [{"name": "stdout", "output_type": "stream", "text": f"{output}\n"}] if output else []
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": said, "source": source.strip()}
