"""What pages are put together with: small files into one document, data that can only be data, and who may run.

>>> filled("<p>{{name}}: {{t:lead}}</p>", {"lead": "a < b"}, {"name": "<b>x</b>"})
'<p><b>x</b>: a &lt; b</p>'
"""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping
from importlib import resources


def source(name: str, package: str = "headwise.reports") -> str:
    """A file of the package's folder `page`."""
    return (resources.files(package) / "page" / name).read_text(encoding="utf-8")


def joined(sources: Iterable[str]) -> str:
    """Scripts as one, in strict mode and with no name of theirs outside."""
    return '"use strict";\n(() => {\n' + "\n".join(sources) + "})();\n"


def filled(template: str, words: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """The template with its marks filled in: {{t:name}} a word, escaped; {{name}} a part as it is.

    One pass: what is put in is never looked through for further marks.
    """
    return re.sub(
        r"\{\{(t:)?(\w+)\}\}",
        lambda mark: html.escape(words[mark[2]]) if mark[1] else parts[mark[2]],
        template,
    )


def inert(code: str) -> str:
    """JSON that can stand in a <script>: no end tag, no comment, no line separator, no lone surrogate."""
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", code)


def digest(code: str) -> str:
    """What a content security policy calls a script or style by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
