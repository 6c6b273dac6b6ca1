"""Attention knockout."""

from collections.abc import Sequence
from dataclasses import replace

from headwise.interventions.edit import Arguments, Edit
from headwise.interventions.tokens import Tokens, checked_tokens
from headwise.masks import Forbidden, Mask


class Forbid(Edit):
    """The queries may not attend to the keys: their scores become −∞, and the remaining weights of a row sum to 1.

    A query that loses all its keys is fully masked, and its output is 0.

    Args:
        queries, keys: the two sets of tokens; None for all. heads: numbers of the query heads; None for all.
    Source: attention knockout, Geva et al. 2023, 2304.14767, §4.
    """

    by_row = True

    def __init__(self, queries: Tokens, keys: Tokens, *, heads: Sequence[int] | int | None = None) -> None:
        super().__init__(heads, queries)
        self.tokens = {**self.tokens, "keys": checked_tokens("Forbid(keys)", keys)}

    def changed(self, call: Arguments) -> Arguments:
        return replace(call, mask=call.mask & Forbidden(self.rows(call), call.keys(self.tokens["keys"])))

    def mask(self, call: Arguments) -> Mask:
        chosen = self.chosen(call)
        heads = None if bool(chosen.all()) else chosen
        return call.mask & Forbidden(self.rows(call), call.keys(self.tokens["keys"]), heads)

    def applies(self, call: Arguments) -> bool:
        return super().applies(call) and bool(call.keys(self.tokens["keys"]).any())
