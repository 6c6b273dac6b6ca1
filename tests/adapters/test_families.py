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


def test_document_shows_what_is_tested():
    said = families.table(lambda family, feature: "yes" if families.applies(family, feature) else "–")
    assert said in DOC.read_text(encoding="utf-8"), "docs/models.md is old: python scripts/model_table.py --write"


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.name)
def test_a_feature_that_is_missing_is_missing_in_the_family(family):
    """A cell is empty only where the model itself has no such thing."""
    model = families.make(family)
    config = model.config
    if not families.applies(family, "generation with cache"):
        assert not model.can_generate()
    if not families.applies(family, "cross attention"):
        assert not config.is_encoder_decoder
        assert not hasattr(config, "add_cross_attention") or not getattr(config, "is_decoder", False)
