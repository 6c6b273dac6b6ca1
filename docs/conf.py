"""The documentation site: `make docs` writes it to build/docs. Pages are Markdown; formulas become MathML."""

import re
import zlib
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.application import Sphinx

from headwise import __version__
from headwise_textbook.topics import topics

HERE = Path(__file__).parent
project, author, version = "headwise", "headwise", __version__
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx", "sphinx.ext.viewcode",
    "sphinx_copybutton",
]  # fmt: skip
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "headwise"
html_static_path = ["static", "../src/headwise/reports/fonts/HeadwiseHan.otf"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
# Pages of other packages that signatures link to. Parts of their inventories are kept in docs/inventory, as no build
# needs the network; where a class is documented under another name than that of its module, it has both.
OTHERS = {
    "python": "https://docs.python.org/3/", "torch": "https://docs.pytorch.org/docs/stable/",
    "numpy": "https://numpy.org/doc/stable/",
}  # fmt: skip
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes of data classes are described once
# Docstrings are plain text for help() and for editors; what of it is not reStructuredText is shown as it is.
suppress_warnings = ["docutils", "myst.header", "misc.highlighting_failure", "autodoc"]
LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
TABLE = "```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{}\n```\n"


def _inventory(name: str) -> str:
    """The path of a kept inventory as Sphinx reads it: all but the first four lines compressed."""
    path = HERE.parent / "build" / f"{name}.inv"
    path.parent.mkdir(exist_ok=True)
    *head, rest = (HERE / "inventory" / f"{name}.txt").read_bytes().split(b"\n", 4)
    path.write_bytes(b"\n".join([*head, zlib.compress(rest)]))
    return str(path)


intersphinx_mapping = {name: (address, _inventory(name)) for name, address in OTHERS.items()}
# Pages whose text is that of a file at the root of the repository.
AT_THE_ROOT = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}


def _from_the_root(link: re.Match[str]) -> str:
    """A link of a file at the root as one of a page."""
    if "://" in link[2]:
        return link[0]
    target = link[2].removeprefix("docs/") if link[2].startswith("docs/") else f"../{link[2]}"
    return f"[{link[1]}]({target}{link[3] or ''})"


def _within(app: Sphinx, page: str, source: list[str]) -> None:
    """Links to files outside of docs/ become plain text; the list of topics gets a table of contents."""
    folder = (HERE / page).parent
    if page in AT_THE_ROOT:
        source[0] = LINK.sub(_from_the_root, (HERE.parent / AT_THE_ROOT[page]).read_text(encoding="utf-8"))

    def kept(link: re.Match[str]) -> str:
        target = link[2]
        if "://" in target or (folder / target).resolve().is_relative_to(HERE):
            return link[0]
        return link[1]

    source[0] = LINK.sub(kept, source[0])
    if page.startswith("guide/") and page.endswith("/index"):
        source[0] += "\n" + TABLE.format("\n".join(["sections", "statements", *topics()]))


def _formula(self: Any, node: nodes.Element) -> None:
    shown = "block" if isinstance(node, nodes.math_block) else "inline"
    self.body.append(f'<div class="formula">{convert(node.astext(), display=shown)}</div>' if shown == "block"
                     else convert(node.astext(), display=shown))  # fmt: skip
    raise nodes.SkipNode


def _as_written(app: Sphinx, page: nodes.document) -> None:
    """What of a docstring is not reStructuredText, such as a lone * or |, is shown as it is."""
    for node in list(page.findall(nodes.problematic)):
        node.parent.replace(node, nodes.Text(node.astext()))
    for node in list(page.findall(nodes.system_message)):
        node.parent.remove(node)


def _without_guesses(app: Sphinx, page: nodes.document) -> None:
    """A lower-case name without a dot, such as range, is no name of headwise that happens to end in it."""
    for node in page.findall(addnodes.pending_xref):
        target = str(node.get("reftarget", ""))
        if node.get("refdomain") == "py" and target.islower() and "." not in target and "refspecific" in node:
            del node["refspecific"]


def _without_type(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what is before a colon in the first line of a property as its type: no colon, no type."""
    if what in ("attribute", "property"):
        lines.insert(0, "\u200b")


def _described(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Fields of a named tuple are described in its docstring; Python's own text for each is left out."""
    return True if str(getattr(thing, "__doc__", None)).startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", _described)
    app.connect("doctree-read", _as_written)
    app.connect("doctree-read", _without_guesses)
    app.connect("autodoc-process-docstring", _without_type, priority=400)  # before Napoleon's
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("source-read", _within)
