"""All claims in the order of the texts. Each claim is a function in one of these files."""

from collections.abc import Sequence
from difflib import get_close_matches
from types import ModuleType

from headwise.errors import ConfigError
from headwise.textbook.claims import (
    capacity,
    counts,
    definitions,
    demonstration,
    forms,
    identities,
    learnt,
    memory,
    places,
    scaling,
    tasks,
)
from headwise.textbook.claims.claim import Claim

GROUPS: dict[str, ModuleType] = {
    "What multi-head attention is": definitions,
    "Scores and their scale": scaling,
    "What it costs": counts,
    "What it keeps": memory,
    "Blocks, mixtures and mixing of heads": forms,
    "What heads can express": capacity,
    "What heads can be trained to do": tasks,
    "Attention and convolution": places,
    "What heads learn": learnt,
    "The demonstration": demonstration,
    "Identities": identities,
}


def grouped() -> dict[str, list[Claim]]:
    """The claims of each group, in the order of its file."""
    return {title: [x for x in vars(module).values() if isinstance(x, Claim)] for title, module in GROUPS.items()}


def choose(only: Sequence[str] = (), *, slow: bool = False) -> list[Claim]:
    """Return the claims with the given ids in that order; without ids, all quick claims, and with slow=True all.

    Raises:
        ConfigError: if an id is unknown.
    """
    every = {claim.id: claim for claims in grouped().values() for claim in claims}
    for name in only:
        if name not in every:
            close = get_close_matches(name, every, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(every)}"
            raise ConfigError(f"claim {name!r}: unknown; {hint}")
    if only:
        return [every[name] for name in dict.fromkeys(only)]
    return [claim for claim in every.values() if slow or not claim.slow]


def group_of(claim: Claim) -> str:
    """The title of a claim's group."""
    return next(title for title, claims in grouped().items() if any(one.id == claim.id for one in claims))
