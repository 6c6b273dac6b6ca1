"""Write the pages, pictures and tables of docs/guide anew: python scripts/guide.py [TOPIC …]"""

import sys
from pathlib import Path

from headwise.base.files import write_text
from headwise_textbook.diagrams import diagram
from headwise_textbook.guide.book import table
from headwise_textbook.guide.notebooks import notebook, to_json
from headwise_textbook.guide.outputs import output
from headwise_textbook.guide.page import index, page, stored_output
from headwise_textbook.guide.registry import find_topic, topics

LANGUAGES = ("en", "zh")
FOLDER = Path(__file__).parent.parent / "docs" / "guide"


if __name__ == "__main__":
    for topic in [find_topic(name) for name in sys.argv[1:]] or topics().values():
        picture = topic.picture()
        said = {code: output(topic, lang) for lang in LANGUAGES for code in [topic.code_in(lang)]}
        for lang in LANGUAGES:
            write_text(FOLDER / lang / f"{topic.name}.md", page(topic, lang, said[topic.code_in(lang)]))
            copy = to_json(notebook(topic, lang, said[topic.code_in(lang)]))
            write_text(FOLDER / "notebooks" / lang / f"{topic.name}.ipynb", copy)
            write_text(FOLDER / "pictures" / f"{topic.name}.{lang}.svg", diagram(picture, lang))
        print(topic.name)
    for lang in LANGUAGES:
        outputs = {name: stored_output((FOLDER / lang / f"{name}.md").read_text("utf-8"))[1] for name in topics()}
        write_text(FOLDER / lang / "index.md", index(lang))
        write_text(FOLDER / lang / "sections.md", table(outputs, lang))
