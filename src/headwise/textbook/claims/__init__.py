"""Every claim and equation of the source texts, executable: what was measured, and the verdict that follows.

    evidence   checks, and the rule that makes a verdict of them    claim      a claim, and how claims are run
    samples    what is measured on                                  registry   all claims, in the order of the texts
    show       as a table, as Markdown, as JSON                     page       as HTML with plots
    the others: a file for each group of claims

A new claim is a function that returns checks, and curves where it has any, under `@claim(...)`, in the file of its
group; a new group is a file and a line in `registry.GROUPS`.
"""

from headwise.textbook.claims.claim import Claim, Finding, run
from headwise.textbook.claims.evidence import Verdict
from headwise.textbook.claims.page import write_page
from headwise.textbook.claims.registry import choose
from headwise.textbook.claims.show import print_findings, to_json, to_markdown

__all__ = ["Claim", "Finding", "Verdict", "choose", "print_findings", "run", "to_json", "to_markdown", "write_page"]
