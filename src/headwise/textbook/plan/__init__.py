"""`headwise plan`: the costs of a model or a layer, computed by `headwise.costs`.

tables   a plan: facts and tables of plain numbers   build      plans of a model and a layer, and the list of both
show     output as text, Markdown and JSON           trade_off  number of heads against head size, as table and plot
compare  all designs in one table                    machine    measured FLOP/s and bandwidth of this machine
command  from the command's options to a plan        spread     the attention partitioned over devices
"""

from headwise.textbook.plan.build import listing, plan_design, plan_model
from headwise.textbook.plan.command import plan_from_options
from headwise.textbook.plan.compare import compare_designs
from headwise.textbook.plan.show import print_plan, to_json, to_markdown
from headwise.textbook.plan.tables import Column, Plan, Table
from headwise.textbook.plan.trade_off import plot_trade_off, trade_off

__all__ = [
    "Column",
    "Plan",
    "Table",
    "compare_designs",
    "listing",
    "plan_design",
    "plan_from_options",
    "plan_model",
    "plot_trade_off",
    "print_plan",
    "to_json",
    "to_markdown",
    "trade_off",
]
