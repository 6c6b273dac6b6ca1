"""Run the code of the guide's pages, and write what it prints into them, and both tables of all places anew:

python scripts/guide.py [TOPIC …]
"""

import sys
from pathlib import Path

from headwise.base import write_text
from headwise_textbook import places, statements
from headwise_textbook.topics import LANGUAGES, code_hash, find_topic, output, page, stored_output, topics, with_output

FOLDER = Path(__file__).parent.parent / "docs" / "guide"

if __name__ == "__main__":
    for topic in [find_topic(name) for name in sys.argv[1:]] or topics().values():
        codes = {lang: topic.code_in(lang) for lang in LANGUAGES}
        printed = {code: output(topic, lang) for lang, code in codes.items()}
        for lang, code in codes.items():
            text = with_output(page(topic.name, lang), code_hash(code), printed[code])
            write_text(FOLDER / lang / f"{topic.name}.md", text)
        print(topic.name)
    for lang in LANGUAGES:
        outputs = {name: stored_output(page(name, lang))[1] for name in topics()}
        write_text(FOLDER / lang / "sections.md", places.table(outputs, lang))
        write_text(FOLDER / lang / "statements.md", statements.table(lang))
