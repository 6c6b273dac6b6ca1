"""KV caches for decoding."""

from headwise.cache.base import Cache, StoredCache, remembered
from headwise.cache.kinds import BudgetCache, ChosenCache, KVCache, RaggedCache, SlidingCache

__all__ = ["BudgetCache", "Cache", "ChosenCache", "KVCache", "RaggedCache", "SlidingCache", "StoredCache", "remembered"]
