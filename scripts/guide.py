"""Run the code of the guide's pages, and write what it prints into them, and both tables of all places anew; or run all
claims once, some minutes, and write docs/claims.md in both languages:

python scripts/guide.py [TOPIC …]
python scripts/guide.py claims
"""

import sys
from pathlib import Path

from headwise.base import write_text
from headwise_textbook import places, statements
from headwise_textbook.claims import choose, run, to_markdown
from headwise_textbook.topics import LANGUAGES, code_hash, find_topic, output, page, stored_output, topics, with_output

DOCS = Path(__file__).parent.parent / "docs"


def write_claims() -> None:
    """Write the pages of claims, whose numbers are of one run. Exits with 1 if a verdict is not the expected one."""
    found = run(choose(slow=True), lambda name, done, count: print(f"{done}/{count} {name}", flush=True))
    for lang, name in zip(LANGUAGES, ("claims.md", "claims.zh.md"), strict=True):
        write_text(DOCS / name, to_markdown(found, lang))
    if wrong := [one.claim.id for one in found if not one.agrees]:
        sys.exit(f"not as expected: {', '.join(wrong)}")


def write_pages(names: list[str]) -> None:
    """Write the outputs into the pages of these topics, or of all, and both tables."""
    for topic in [find_topic(name) for name in names] or topics().values():
        codes = {lang: topic.code_in(lang) for lang in LANGUAGES}
        printed = {code: output(topic, lang) for lang, code in codes.items()}
        for lang, code in codes.items():
            text = with_output(page(topic.name, lang), code_hash(code), printed[code])
            write_text(DOCS / "guide" / lang / f"{topic.name}.md", text)
        print(topic.name)
    for lang in LANGUAGES:
        outputs = {name: stored_output(page(name, lang))[1] for name in topics()}
        write_text(DOCS / "guide" / lang / "sections.md", places.table(outputs, lang))
        write_text(DOCS / "guide" / lang / "statements.md", statements.table(lang))


if __name__ == "__main__":
    if sys.argv[1:] == ["claims"]:
        write_claims()
    else:
        write_pages(sys.argv[1:])
