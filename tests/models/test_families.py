"""Every family and feature of docs/models.md: what headwise computes is what the model's own code computes."""

from pathlib import Path

import pytest
import torch
from family_checks import FEATURES, applies, output, switched, table
from model_families import FAMILIES, inputs, make

from headwise.models.adapters.huggingface.masks import MaskTensor
from parameters import each_value

CELLS = [(family, feature) for family in FAMILIES for feature in FEATURES if applies(family, feature)]
DOC = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(("family", "feature"), each_value(CELLS), ids=lambda x: x if isinstance(x, str) else x.name)
def test_family_computes_the_same(family, feature):
    FEATURES[feature](family)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_passes_its_mask_on(family, monkeypatch):
    """Without computing with it, so that it never takes n×m memory."""
    model = make(family)
    monkeypatch.setattr(MaskTensor, "make", lambda mask: pytest.fail(f"made: {mask.origin}"))
    with torch.no_grad(), switched(model):
        for side in (None,) if family.kind == "image" else (None, "left", "right"):
            output(model, **inputs(family, side)[0])


def test_document_shows_what_is_tested():
    text = DOC.read_text(encoding="utf-8")
    assert table() in text, "docs/models.md is old: python scripts/all_families.py --write"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_feature_that_is_missing_is_missing_in_the_family(family):
    """A cell is empty only where the model itself has no such thing."""
    model = make(family)
    if not applies(family, "generation with cache"):
        assert not model.can_generate()
    if not applies(family, "cross attention"):
        assert not model.config.is_encoder_decoder
