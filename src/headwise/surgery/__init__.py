"""Changes to the heads of a trained model: some taken out, keys and values shared, short caches where they do."""

from headwise.surgery.budgets import budget as budget, budget_effect as budget_effect
from headwise.surgery.folder import load_pruned as load_pruned, save_pruned as save_pruned
from headwise.surgery.healing import heal as heal
from headwise.surgery.merging import group_heads as group_heads, merge_kv as merge_kv
from headwise.surgery.pruning import Pruned as Pruned, prune as prune
