"""The colour of each role of heads, the same in every report and view."""

from headwise.analysis.head_roles import DEFINITIONS
from headwise.reports.messages import message
from headwise.wording import in_language

MIXED = "#9b9ba3"


def role_colours(lang: str) -> dict[str, str]:
    """The word of each role in that language, and of heads without one, → "#rrggbb"."""
    words = [(role.word, role.colour) for role in DEFINITIONS.values()]
    return {in_language(word, lang): colour for word, colour in [*words, (message("mixed"), MIXED)]}
