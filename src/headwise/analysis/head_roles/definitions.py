"""What each role is, from which score on a head is said to play it, and who says so."""

from dataclasses import dataclass

import numpy as np

from headwise.wording import Bilingual

VERSION = "roles-1"  # of the definitions below; scores of different versions do not compare

# A role must also lie this far up the way from a uniform head (0) to a perfect one (1): on a short text a uniform head
# has much of its weight anywhere.
EXCESS = 0.2
# Left beside the first key: a row with less of its weight there says nothing of what the head does otherwise.
LEFT = 0.01

CLARK = "Clark et al. 2019, 1906.04341 §3"
VOITA = "Voita et al. 2019, 1905.09418 §4"
OURS = "headwise"


@dataclass(frozen=True)
class Definition:
    """A role.

    Attributes:
        name: the role; word: how it is printed, in English and Chinese.
        what: the score, per eligible row. unit: "mass" (share of a row's weight), "rows" (share of rows), "nats", or
            "share" (of the largest entropy that there could be).
        threshold: the least score of a head that plays it; source: of the role; limit: of the threshold.
        given: the argument of `roles` that it needs, or "".
    """

    name: str
    word: Bilingual
    what: str
    threshold: float
    source: str
    limit: str
    unit: str = "mass"
    given: str = ""

    def holds(self, score: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Whether a score (NaN: unknown) is enough, beside that of a uniform head; boolean."""
        with np.errstate(invalid="ignore", divide="ignore"):
            enough = score >= self.threshold
            if self.unit in ("mass", "rows"):
                enough &= (score - uniform) / (1.0 - uniform) >= EXCESS
        return enough


DEFINITIONS: dict[str, Definition] = {
    d.name: d
    for d in (
        Definition("previous", Bilingual("previous", "前一词元"), "weight on the key before", 0.5, CLARK, CLARK),
        Definition("self", Bilingual("itself", "自身"), "weight on the query's own key", 0.5, CLARK, CLARK),
        Definition("next", Bilingual("next", "后一词元"), "weight on the key after", 0.5, CLARK, CLARK),
        Definition(
            "offset", Bilingual("offset", "固定偏移"),
            "rows whose largest weight is at one and the same offset, the best one", 0.9, VOITA,
            VOITA, unit="rows",
        ),
        Definition(
            "first", Bilingual("first", "首词元"), "weight on the first key", 0.3, "Xiao et al. 2023, 2309.17453",
            "Gu et al. 2024, 2410.10781 (sink metric)",
        ),
        Definition(
            "local", Bilingual("nearby", "邻近"),
            "weight within the radius", 0.9, "Beltagy et al. 2020, 2004.05150", OURS
        ),
        Definition("broad", Bilingual("broad", "分散"), "entropy of the weights", 3.8, CLARK, CLARK, unit="nats"),
        Definition(
            "even", Bilingual("even", "均匀"),
            "entropy of the weights over its largest value, ln of the keys in sight", 0.9, CLARK, OURS,
            unit="share",
        ),
        Definition(
            "separator", Bilingual("separator", "分隔符"),
            "weight on white space and markers such as [SEP]", 0.6, CLARK, CLARK,
            given="pieces",
        ),
        Definition(
            "punctuation", Bilingual("punctuation", "标点"),
            "weight on punctuation", 0.6, CLARK, CLARK, given="pieces"
        ),
        Definition(
            "duplicate", Bilingual("same token", "相同词元"), "weight on earlier places of the query's token", 0.5,
            "Wang et al. 2022, 2211.00593", OURS, given="tokens",
        ),
        Definition(
            "induction", Bilingual("induction", "归纳"),
            "weight on what followed earlier places of the query's token", 0.5,
            "Olsson et al. 2022, 2209.11895 (prefix matching)", OURS, given="tokens",
        ),
        Definition(
            "rare", Bilingual("rare", "低频词元"),
            "weight on the least frequent tokens of the input", 0.5, VOITA, OURS, given="frequencies"
        ),
    )
}  # fmt: skip

# Of syntax: how much better than its best fixed offset (or, of coreference, than the best simple rule) a head must be,
# and on how many cases at least.
MARGIN = 0.1
MARGIN_SOURCE = VOITA
CASES = 20
