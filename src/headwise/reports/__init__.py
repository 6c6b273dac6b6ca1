"""Reports as data, tables, pictures and pages; and the viewer."""

from headwise.reports.data import Comparison, Passage, Report, Statistic
from headwise.reports.dynamics import write_dynamics
from headwise.reports.html import write_report
from headwise.reports.matrix import write_matrix
from headwise.reports.png import write_pngs
from headwise.reports.see import report

__all__ = [
    "Comparison",
    "Passage",
    "Report",
    "Statistic",
    "report",
    "write_dynamics",
    "write_matrix",
    "write_pngs",
    "write_report",
]
