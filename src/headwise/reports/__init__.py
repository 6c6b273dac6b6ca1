"""Reports as data, tables, pictures and pages, and the viewer."""

from headwise.reports.data import Comparison, Passage, Report
from headwise.reports.dynamics import write_dynamics
from headwise.reports.figure import figure_class
from headwise.reports.fonts import font_face
from headwise.reports.html import write_report
from headwise.reports.matrix import write_matrix
from headwise.reports.over_image import image_figure, write_image_maps
from headwise.reports.panels import write_panels
from headwise.reports.png import write_pngs
from headwise.reports.see import report, show
from headwise.reports.views import VIEWS, View, register, write_view

__all__ = [
    "VIEWS",
    "Comparison",
    "Passage",
    "Report",
    "View",
    "figure_class",
    "font_face",
    "image_figure",
    "register",
    "report",
    "show",
    "write_dynamics",
    "write_image_maps",
    "write_matrix",
    "write_panels",
    "write_pngs",
    "write_report",
    "write_view",
]
