"""Assembly of HTML pages: source files joined to one document, inert data, and a content security policy.

>>> filled("<p>{{name}}: {{t:lead}}</p>", {"lead": "a < b"}, {"name": "<b>x</b>"})
'<p><b>x</b>: a &lt; b</p>'
"""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping
from importlib import resources

from headwise.reports.colours import stops

COLOURS = {theme: stops(theme) for theme in ("light", "dark")}


def source(name: str, package: str = "headwise.reports") -> str:
    """The text of a file in the package's folder `page`."""
    return (resources.files(package) / "page" / name).read_text(encoding="utf-8")


def document(
    template: str, words: Mapping[str, str], parts: Mapping[str, str], style: str, scripts: Iterable[str], allow: str
) -> str:
    """A template with its words and parts, one style sheet, one script, and the script that sets the theme. The policy
    allows these and `allow`, and nothing else: text cannot become code."""
    early, script = source("theme.js"), '"use strict";\n(() => {\n' + "\n".join(scripts) + "})();\n"
    policy = (
        f"default-src 'none'; script-src {digest(early)} {digest(script)}; style-src {digest(style)}; {allow}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    fixed = {"policy": policy, "style": style, "early": early, "script": script}
    return filled(template, words, {**fixed, "head": filled(source("head.html"), words, fixed), **parts})


def filled(template: str, words: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """The template with its marks replaced: {{t:name}} by a word, escaped; {{name}} by a part as it is. Marks in the
    inserted text are not replaced."""
    return re.sub(
        r"\{\{(t:)?(\w+)\}\}",
        lambda mark: html.escape(words[mark[2]]) if mark[1] else parts[mark[2]],
        template,
    )


def inert(code: str) -> str:
    """JSON for a <script> element: no end tag, comment, line separator or lone surrogate."""
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", code)


def digest(code: str) -> str:
    """The source expression of a script or style sheet in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
