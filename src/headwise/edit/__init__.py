"""Changes to the heads of a trained model: some taken out, keys and values shared, short caches where they do."""

from headwise.edit.budgets import budget as budget, budget_effect as budget_effect
from headwise.edit.folder import load_pruned as load_pruned, save_pruned as save_pruned
from headwise.edit.healing import heal as heal
from headwise.edit.merging import group_heads as group_heads, merge_kv as merge_kv
from headwise.edit.pruning import Pruned as Pruned, prune as prune
