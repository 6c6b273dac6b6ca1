"""A report in a notebook: the page itself."""

from headwise.reports.data import Report
from headwise.reports.notebook.frame import framed
from headwise.shown import register


def _report(report: Report, lang: str) -> str:
    return framed(report, report.lang or lang)


register(Report, _report)
