"""Changes to the heads of a trained model: pruning, merging of KV heads, cache budgets, healing."""

from headwise.edit.budgets import budget, budget_effect, read_budget, save_budget
from headwise.edit.folder import load_pruned, save_pruned
from headwise.edit.healing import heal
from headwise.edit.merging import group_heads, merge_kv
from headwise.edit.pruning import Pruned, prune

__all__ = [
    "Pruned",
    "budget",
    "budget_effect",
    "group_heads",
    "heal",
    "load_pruned",
    "merge_kv",
    "prune",
    "read_budget",
    "save_budget",
    "save_pruned",
]
