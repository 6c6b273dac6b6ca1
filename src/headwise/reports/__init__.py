"""Reports as data, tables, pictures and pages, and the viewer."""

from headwise.reports.colours import font_face
from headwise.reports.data import Comparison, Passage, Report
from headwise.reports.figure import figure_class
from headwise.reports.images import image_figure, write_image_maps
from headwise.reports.page import write_report
from headwise.reports.pictures import write_matrix, write_panels, write_pngs
from headwise.reports.plots import write_dynamics
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
