"""KV caches for decoding."""

from headwise.cache.base import Cache, StoredCache, remembered
from headwise.cache.budgets import BudgetCache
from headwise.cache.chosen import ChosenCache
from headwise.cache.full import KVCache
from headwise.cache.ragged import RaggedCache
from headwise.cache.sliding import SlidingCache

__all__ = ["BudgetCache", "Cache", "ChosenCache", "KVCache", "RaggedCache", "SlidingCache", "StoredCache", "remembered"]
