"""Every claim and equation of the source texts as executable code, with measurements and the verdict that follows.

    evidence   checks, and how a verdict follows from them     claim      a claim, and how claims are run
    samples    inputs and layers for measurements              registry   all claims, and the places that they cite
    show       output as a table, Markdown and JSON            page       output as HTML with plots
    every other file holds one group of claims: functions in NAME.py, what is claimed in NAME.toml

To add a claim, write a function that returns checks (and curves), at least one of them a control, decorate it with
`@claim` in the file of its group, and say in the TOML file beside it what is claimed: words in English and Chinese, its
places in the texts, and what the control is. To add a group, add both files and a line in `registry.GROUPS`.
"""

from headwise_textbook.claims.claim import Claim, Finding, run
from headwise_textbook.claims.evidence import Verdict
from headwise_textbook.claims.page import write_page
from headwise_textbook.claims.registry import choose, located
from headwise_textbook.claims.show import print_findings, to_json, to_markdown

__all__ = [
    "Claim",
    "Finding",
    "Verdict",
    "choose",
    "located",
    "print_findings",
    "run",
    "to_json",
    "to_markdown",
    "write_page",
]
