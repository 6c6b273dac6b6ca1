"""All claims in the order of the texts. Each claim is a function in one of these files."""

from collections.abc import Sequence
from types import ModuleType

from headwise.errors import unknown_name
from headwise.wording import Bilingual
from headwise_textbook.claims import (
    blocks,
    capacity,
    counts,
    definitions,
    demonstration,
    forms,
    functions,
    identities,
    learnt,
    memory,
    parameters,
    places,
    printed,
    scaling,
    tasks,
    trainings,
)
from headwise_textbook.claims.claim import Claim
from headwise_textbook.texts import Place

GROUPS: dict[Bilingual, ModuleType] = {
    Bilingual("What multi-head attention is", "多头注意力是什么"): definitions,
    Bilingual("Scores and their scale", "分数与缩放"): scaling,
    Bilingual("Parameters and sizes of heads", "参数与头的大小"): parameters,
    Bilingual("What it costs", "计算量"): counts,
    Bilingual("What it keeps", "内存"): memory,
    Bilingual("The block around the heads", "头所在的块"): blocks,
    Bilingual("Mixtures, groups and mixing of heads", "混合、分组与跨头交互"): forms,
    Bilingual("What heads can express", "头能表示什么"): capacity,
    Bilingual("Kernels, freedom, approximation", "核、自由度与逼近"): functions,
    Bilingual("What heads can be trained to do", "头能学会什么"): tasks,
    Bilingual("One head against several, trained", "单头与多头的训练对比"): trainings,
    Bilingual("Attention and convolution", "注意力与卷积"): places,
    Bilingual("What heads learn", "头学到什么"): learnt,
    Bilingual("The demonstration", "演示"): demonstration,
    Bilingual("Formulas and listings as printed", "照印出来的公式与代码"): printed,
    Bilingual("Identities", "恒等式"): identities,
}


def grouped() -> dict[Bilingual, list[Claim]]:
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
            raise unknown_name(
                "claim", name, every, listed="docs/claims.md lists all",
                zh="docs/claims.zh.md 列出全部",
            )  # fmt: skip
    if only:
        return [every[name] for name in dict.fromkeys(only)]
    return [claim for claim in every.values() if slow or not claim.slow]


def located() -> list[tuple[Place, Claim]]:
    """Every place of the five texts that a claim cites, with the claim, in the order of the groups.

    >>> [claim.id for place, claim in located() if "5.3.10" in place.equations]
    ['block-diagonal']
    """
    return [(place, claim) for claims in grouped().values() for claim in claims for place in claim.places]


def group_of(claim: Claim) -> Bilingual:
    """The title of a claim's group."""
    return next(title for title, claims in grouped().items() if any(one.id == claim.id for one in claims))
