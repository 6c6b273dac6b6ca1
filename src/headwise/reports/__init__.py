"""Reports as data, tables, pictures and pages, and the viewer."""

from headwise.reports.data import Comparison, Passage, Report
from headwise.reports.dynamics import write_dynamics
from headwise.reports.html import write_report
from headwise.reports.matrix import write_matrix
from headwise.reports.png import write_pngs
from headwise.reports.see import report, show
from headwise.reports.views import VIEWS, View, register, write_view

__all__ = [
    "VIEWS",
    "Comparison",
    "Passage",
    "Report",
    "View",
    "register",
    "report",
    "show",
    "write_dynamics",
    "write_matrix",
    "write_pngs",
    "write_report",
    "write_view",
]
