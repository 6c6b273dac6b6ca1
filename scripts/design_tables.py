"""Write the tables of docs/designs.md anew, from what the designs say of themselves: python scripts/design_tables.py"""

from pathlib import Path

from headwise.base.files import atomic_path
from headwise.textbook.design_tables import filled

PAGE = Path(__file__).parent.parent / "docs" / "designs.md"

if __name__ == "__main__":
    page = filled(PAGE.read_text(encoding="utf-8"))
    with atomic_path(PAGE) as temporary:
        temporary.write_text(page, encoding="utf-8")
