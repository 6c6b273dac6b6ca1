"""The costs of a model or a layer as tables, computed by `headwise.costs`.

build    plans of a model and a layer, and the list of both     compare  designs, numbers of heads, ways over devices
tables   a plan: facts and tables of plain numbers, and these as text, Markdown and JSON
"""

from headwise.plan.build import listing, plan_design, plan_model, read_config
from headwise.plan.compare import compare_designs, measured_machine, plot_trade_off, trade_off
from headwise.plan.tables import Column, Plan, Table, markdown_table, print_plan, to_json, to_markdown

__all__ = [
    "Column",
    "Plan",
    "Table",
    "compare_designs",
    "listing",
    "markdown_table",
    "measured_machine",
    "plan_design",
    "plan_model",
    "plot_trade_off",
    "print_plan",
    "read_config",
    "to_json",
    "to_markdown",
    "trade_off",
]
