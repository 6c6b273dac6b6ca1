"""Every claim and equation of the source texts as executable code, with measurements and the verdict that follows.

    claim   a claim, its checks, and how a verdict follows     model   inputs, layers and a trained model
    show    output as a table, Markdown, JSON and HTML         the other files: functions that measure claims

To add a claim, write a function that returns checks (and plots), at least one of them a control, decorate it with
`@claim`, and say in the TOML file of its group, in the same order, what is claimed: words in English and Chinese, its
places in the texts, what the control is, and what its plots show. To add a group, add its file and, in
`claim.ORDER`, its name.
"""

from collections.abc import Sequence

from headwise.errors import unknown_name
from headwise.wording import tr
from headwise_textbook.claims import capacity, demonstration, designs, formulas, memory, published, sizes, training
from headwise_textbook.claims.claim import Claim, Finding, Verdict, entries, run
from headwise_textbook.claims.show import print_findings, to_json, to_markdown, write_page
from headwise_textbook.texts import Place

__all__ = [
    "Claim",
    "Finding",
    "Verdict",
    "choose",
    "located",
    "print_findings",
    "run",
    "to_json",
    "to_markdown",
    "write_page",
]

_MEASURED = {
    x.id: x
    for file in (formulas, sizes, published, memory, designs, capacity, training, demonstration)
    for x in vars(file).values()
    if isinstance(x, Claim)
}


def choose(only: Sequence[str] = (), *, slow: bool = False) -> list[Claim]:
    """The claims with the given ids in that order; without ids, all quick claims, and with slow=True all.

    Raises:
        ConfigError: if an id is unknown.
    """
    every = {id: _MEASURED[id] for id in entries()}
    for name in only:
        if name not in every:
            raise unknown_name("claim", name, every, listed=tr("docs/claims.md lists all"))
    if only:
        return [every[name] for name in dict.fromkeys(only)]
    return [claim for claim in every.values() if slow or not claim.slow]


def located() -> list[tuple[Place, Claim]]:
    """Every place of the five texts that a claim cites, with the claim, in the order of the groups.

    >>> [claim.id for place, claim in located() if "5.3.10" in place.equations]
    ['block-diagonal']
    """
    return [(place, claim) for claim in choose(slow=True) for place in claim.places]
