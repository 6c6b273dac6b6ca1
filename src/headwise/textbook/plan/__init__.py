"""`headwise plan`: what a model or a layer takes, put together from `headwise.costs` and `headwise.costs.configs`.

tables   a plan is facts and tables of plain numbers   build      of a model, of a layer, the list of both
show     as text, Markdown and JSON                    trade_off  heads against their size, as table and plot
compare  all designs beside one another                machine    what this machine reaches
ask      from a command line's options to a plan       spread     the attention over many devices
"""

from headwise.textbook.plan.ask import answer
from headwise.textbook.plan.build import listing, plan_design, plan_model
from headwise.textbook.plan.compare import compare_designs
from headwise.textbook.plan.show import print_plan, to_json, to_markdown
from headwise.textbook.plan.tables import Column, Plan, Table
from headwise.textbook.plan.trade_off import plot_trade_off, trade_off

__all__ = [
    "Column",
    "Plan",
    "Table",
    "answer",
    "compare_designs",
    "listing",
    "plan_design",
    "plan_model",
    "plot_trade_off",
    "print_plan",
    "to_json",
    "to_markdown",
    "trade_off",
]
