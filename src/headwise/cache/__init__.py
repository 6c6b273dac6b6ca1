"""KV caches for decoding, for headwise's layers and for `generate` of transformers."""

from headwise.cache.base import Cache, StoredCache, remembered
from headwise.cache.generation import GenerationCache, for_transformers
from headwise.cache.kinds import BudgetCache, ChosenCache, KVCache, RaggedCache, SlidingCache

__all__ = [
    "BudgetCache",
    "Cache",
    "ChosenCache",
    "GenerationCache",
    "KVCache",
    "RaggedCache",
    "SlidingCache",
    "StoredCache",
    "for_transformers",
    "remembered",
]
