"""What `watch` measures of the model types whose calls have arguments of their own, against their own weights."""

import pytest
from registry_case import Case, run
from registry_statistics import compare
from registry_table import RESULTS, read

ROWS = read(RESULTS)
NAMES = [name for name, row in ROWS.items() if row.get("arguments")]


def test_the_table_has_the_types_with_arguments_of_their_own():
    assert len(NAMES) >= 14
    found = {one for name in NAMES for one in ROWS[name]["arguments"]}
    assert found >= {"indices", "sinks", "grid_thw", "input_ids", "sliding_window", "max_new_tokens"}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_those_of_the_models_own_weights(name):
    case = Case(name)
    assert set(compare(case, lambda: run(case.model, case.given)).values()) == {"equal"}
    if "max_new_tokens" in ROWS[name]["arguments"]:
        found = compare(case, lambda: case.model.generate(**case.given, max_new_tokens=3))
        assert set(found.values()) == {"equal"}
