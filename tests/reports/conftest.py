"""The report that most tests of the views show."""

import pytest
from view_samples import passage, report_of

from headwise.reports.data import Passage, Report


@pytest.fixture
def chinese() -> Report:
    """Two sentences of nine characters, exact."""
    one = passage("武松打虎。虎死了！")
    return report_of(Passage(one.title, one.tokens, one.maps, sentences=[(0, 5), (5, 9)]), title="《水浒传》")
