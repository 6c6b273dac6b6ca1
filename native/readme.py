"""The README of the package's metadata, which PyPI shows: README.md with the address of the repository in its links.

README.md has links relative to the repository; here they point to the files of the tag of this version.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The field `readme` of `[project]`: https://packaging.python.org/en/latest/specifications/pyproject-toml/."""
    address, tag = project["urls"]["Repository"], f"v{project['version']}"
    text = LINK.sub(
        lambda found: f"{found[1]}[{found[2]}]({address}/{'raw' if found[1] else 'blob'}/{tag}/{found[3]})",
        (ROOT / "README.md").read_text(encoding="utf-8"),
    )
    return {"readme": {"text": text, "content-type": "text/markdown"}}
