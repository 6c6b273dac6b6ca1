"""Changes of a checkpoint on disk: planned, written to a new file, and evaluated before and after.

Three changes: removing heads (`pruning`), sharing KV heads and shortening caches (`converting`). Each plans
on one part of a text; the result is read from disk and evaluated on another part, together with the original model.
The source is never overwritten.
"""

from headwise.compress.converting import (
    Budgeting as Budgeting,
    Conversion as Conversion,
    plan_budget as plan_budget,
    plan_conversion as plan_conversion,
)
from headwise.compress.judging import Candidate as Candidate, Verdict as Verdict, judge as judge
from headwise.compress.pruning import Pruning as Pruning, plan_pruning as plan_pruning
from headwise.compress.source import (
    Source as Source,
    Texts as Texts,
    check_target as check_target,
    open_source as open_source,
    split_text as split_text,
)
