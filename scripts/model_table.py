"""Runs every cell of the table in docs/models.md and prints the table; `--write` puts it into the document.

    python scripts/model_table.py

The cells are the checks of tests/adapters/family_checks.py: tiny random models, each compared with its own code.
"""

import argparse
import sys
import warnings
from pathlib import Path

import blocks

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: python scripts/model_table.py --write -->", "<!-- end of table -->"


def main() -> int:
    """Print the table; 1 if a cell fails."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    write = options.parse_args().write
    sys.path.insert(0, str(ROOT / "tests" / "adapters"))
    warnings.simplefilter("ignore")
    import family_checks as checks
    from model_families import Family
    from transformers.utils import logging

    logging.set_verbosity_error()
    failed = []

    def cell(family: Family, feature: str) -> str:
        said = checks.cell(family, feature)
        if said == "–":
            return said
        try:
            (checks.refusal if said == "refused" else checks.FEATURES[feature])(family)
        except Exception as error:
            failed.append(f"{family.name}, {feature}: {type(error).__name__}: {error}")
            return "FAILS"
        return said

    table = checks.table(cell)
    print(table)
    print(*failed, sep="\n", file=sys.stderr)
    if write and not failed:
        blocks.write(DOC, BEGIN, END, table)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
