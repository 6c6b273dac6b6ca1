"""Every family and feature of docs/models.md: what headwise computes is what the model's own code computes."""

from pathlib import Path

import families
import pytest

CELLS = [(family, feature) for family in families.FAMILIES for feature in families.FEATURES]
DOC = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize(
    ("family", "feature"),
    [pytest.param(f, name, id=f"{f.name}-{name}") for f, name in CELLS if families.applies(f, name)],
)
def test_family_computes_the_same(family, feature):
    families.FEATURES[feature](family)


@pytest.mark.parametrize("family", families.REFUSED, ids=lambda family: family.name)
def test_family_that_computes_attention_by_itself_is_refused(family):
    families.refusal(family)


@pytest.mark.parametrize("family", families.OTHERS, ids=lambda family: family.name)
def test_other_family_computes_the_same(family):
    for feature in families.FEATURES_OF_OTHERS:
        if families.applies(family, feature):
            families.FEATURES[feature](family)


def test_document_shows_what_is_tested():
    text = DOC.read_text(encoding="utf-8")
    assert families.table() in text, "docs/models.md is old: python scripts/model_table.py --write"
    names = ", ".join(family.name for family in families.OTHERS)
    assert names in " ".join(text.split()), f"docs/models.md does not name the others: {names}"


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.name)
def test_a_feature_that_is_missing_is_missing_in_the_family(family):
    """A cell is empty only where the model itself has no such thing."""
    model = families.make(family)
    if not families.applies(family, "generation with cache"):
        assert not model.can_generate()
    if not families.applies(family, "cross attention"):
        assert not model.config.is_encoder_decoder
