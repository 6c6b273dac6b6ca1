"""The roles: what is scored, the threshold from which a head plays the role, and the sources of both."""

from dataclasses import dataclass

import numpy as np

from headwise.wording import Bilingual

VERSION = "roles-2"  # of the definitions below; scores of different versions do not compare

# A score must also be at least this far between a uniform head (0) and a perfect one (1): on a short text a uniform
# head has much weight on any key.
EXCESS = 0.2
# Least weight of a row on keys other than the first for the scores without the first key.
LEFT = 0.01

CLARK = "Clark et al. 2019, 1906.04341 §3"
VOITA = "Voita et al. 2019, 1905.09418 §4"
OURS = "headwise"


@dataclass(frozen=True)
class Definition:
    """A role.

    Attributes:
        name: of the role; word: as printed, in English and Chinese.
        what: the score, per eligible row. unit: "mass" (share of a row's weight), "rows" (share of rows), "nats",
            "share" (of the largest possible entropy), or "excess" (over a baseline, 1 is the largest possible).
        threshold: the least score of a head that plays the role. source: of the role; limit: source of the threshold.
        colour: of the role in every report and view. given: the argument of `roles` that it requires, or "".
        rows: the fewest eligible rows of a head that plays the role, where random heads reach the threshold on fewer.
    """

    name: str
    word: Bilingual
    what: str
    threshold: float
    source: str
    limit: str
    colour: str
    unit: str = "mass"
    given: str = ""
    rows: int = 0

    def holds(self, score: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Whether a score is enough, given that of a uniform head; boolean, False for NaN."""
        with np.errstate(invalid="ignore", divide="ignore"):
            enough = score >= self.threshold
            if self.unit in ("mass", "rows"):
                enough &= (score - uniform) / (1.0 - uniform) >= EXCESS
        return enough


DEFINITIONS: dict[str, Definition] = {
    d.name: d
    for d in (
        Definition(
            "previous", Bilingual("previous", "前一词元"), "weight on the key before", 0.5, CLARK, CLARK, "#4e79a7"
        ),
        Definition("self", Bilingual("itself", "自身"), "weight on the query's own key", 0.5, CLARK, CLARK, "#8c6bb1"),
        Definition("next", Bilingual("next", "后一词元"), "weight on the key after", 0.5, CLARK, CLARK, "#5b8ff9"),
        Definition(
            "offset", Bilingual("offset", "固定偏移"), "rows whose largest weight is at the best offset", 0.9, VOITA,
            VOITA, "#2a9d9f", unit="rows",
        ),
        Definition(
            "first", Bilingual("first", "首词元"), "weight on the first key", 0.3, "Xiao et al. 2023, 2309.17453",
            "Gu et al. 2024, 2410.10781 (sink metric)", "#c44e52",
        ),
        Definition(
            "local", Bilingual("nearby", "邻近"),
            "weight within the radius", 0.9, "Beltagy et al. 2020, 2004.05150", OURS, "#e08214"
        ),
        Definition(
            "broad", Bilingual("broad", "分散"), "entropy of the weights", 3.8, CLARK, CLARK, "#3f9b6c", unit="nats"
        ),
        Definition(
            "even", Bilingual("even", "均匀"),
            "entropy of the weights over its largest value, ln of the keys in sight", 0.9, CLARK, OURS, "#94a83a",
            unit="share",
        ),
        Definition(
            "separator", Bilingual("separator", "分隔符"),
            "weight on white space and markers such as [SEP]", 0.6, CLARK, CLARK, "#7a6a53",
            given="pieces",
        ),
        Definition(
            "punctuation", Bilingual("punctuation", "标点"),
            "weight on punctuation", 0.6, CLARK, CLARK, "#d37295", given="pieces"
        ),
        Definition(
            "duplicate", Bilingual("same token", "相同词元"), "weight on earlier occurrences of the query's token", 0.5,
            "Wang et al. 2022, 2211.00593", OURS, "#b8860b", given="tokens",
        ),
        Definition(
            "induction", Bilingual("induction", "归纳"),
            "weight on the tokens after earlier occurrences of the query's token", 0.5,
            "Olsson et al. 2022, 2209.11895 (prefix matching)", OURS, "#c2339b", given="tokens",
        ),
        Definition(
            "rare", Bilingual("rare", "低频词元"),
            "weight on the least frequent tokens of the input", 0.5, VOITA, OURS, "#64748f", given="frequencies"
        ),
        # With the embeddings of the vocabulary shuffled, the heads of trained models reach 0.04; 0.1 is also the margin
        # above the best simple rule that is required of relations.
        Definition(
            "semantic", Bilingual("similar meaning", "语义相近"),
            "similarity of embeddings beyond that of matched pairs, over that of the most similar key", 0.1, OURS, OURS,
            "#5b4fd1", unit="excess", given="embeddings", rows=50,
        ),
    )
}  # fmt: skip

# For relations: the least margin above the best simple rule, and the least number of cases.
MARGIN = 0.1
MARGIN_SOURCE = VOITA
CASES = 20
