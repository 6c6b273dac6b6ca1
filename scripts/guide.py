"""Write the pages, pictures and tables of docs/guide anew: python scripts/guide.py [TOPIC …]"""

import sys
from pathlib import Path

from headwise.base.files import atomic_path
from headwise.reports.curves import diagram
from headwise.textbook.guide.book import table
from headwise.textbook.guide.notebooks import notebook, to_json
from headwise.textbook.guide.outputs import output
from headwise.textbook.guide.page import index, page, stored_output
from headwise.textbook.guide.registry import find_topic, topics
from headwise.wording import LANGUAGES

FOLDER = Path(__file__).parent.parent / "docs" / "guide"


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for topic in [find_topic(name) for name in sys.argv[1:]] or topics().values():
        picture = topic.picture()
        said = {code: output(topic, lang) for lang in LANGUAGES for code in [topic.code_in(lang)]}
        for lang in LANGUAGES:
            write(FOLDER / lang / f"{topic.name}.md", page(topic, lang, said[topic.code_in(lang)]))
            copy = to_json(notebook(topic, lang, said[topic.code_in(lang)]))
            write(FOLDER / "notebooks" / lang / f"{topic.name}.ipynb", copy)
            write(FOLDER / "pictures" / f"{topic.name}.{lang}.svg", diagram(picture, lang))
        print(topic.name)
    for lang in LANGUAGES:
        outputs = {name: stored_output((FOLDER / lang / f"{name}.md").read_text("utf-8"))[1] for name in topics()}
        write(FOLDER / lang / "index.md", index(lang))
        write(FOLDER / lang / "sections.md", table(outputs, lang))
