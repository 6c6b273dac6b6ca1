"""Keys and values kept from earlier steps, so that decoding computes only what is new."""

from headwise.cache.base import Cache as Cache, remembered as remembered
from headwise.cache.budgets import BudgetCache as BudgetCache
from headwise.cache.full import KVCache as KVCache
from headwise.cache.ragged import RaggedCache as RaggedCache
from headwise.cache.sliding import SlidingCache as SlidingCache
