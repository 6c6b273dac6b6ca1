"""The trace is multi-head attention, step by step."""

import pytest
import torch
from rich.console import Console

from headwise.errors import ConfigError, ShapeError
from headwise.trace import print_trace, trace


@pytest.mark.parametrize(
    ("heads", "kv_heads", "causal"), [(1, None, False), (3, None, True), (6, 2, True), (6, 1, False)]
)
def test_steps_follow_from_one_another(heads: int, kv_heads: int | None, causal: bool) -> None:
    steps = {step.name: step.tensor for step in trace(5, 12, heads, num_kv_heads=kv_heads, batch=2, causal=causal)}
    kv, d = kv_heads or heads, 12 // heads
    assert steps["q_split"].shape == (2, 5, heads, d)
    assert steps["q_heads"].shape == (2, heads, 5, d)
    assert steps["k_heads"].shape == (2, kv, 5, d)
    assert steps["scores"].shape == (2, heads, 5, 5)
    assert torch.equal(steps["q_heads"][1, heads - 1, 3], steps["q"][1, 3, -d:])
    torch.testing.assert_close(steps["weights"].sum(-1), torch.ones(2, heads, 5))
    assert ("masked" in steps) == causal
    if causal:
        assert (steps["weights"].triu(1) == 0).all()
    group = heads // kv
    values = steps["v_heads"][:, torch.arange(heads) // group]
    torch.testing.assert_close(steps["heads"], steps["weights"] @ values)
    assert torch.equal(steps["concat"][0, 2], steps["back"][0, 2].flatten())
    assert steps["output"].shape == (2, 5, 12)


def test_print_shows_shapes_and_numbers_in_both_languages() -> None:
    for lang, word in (("en", "queries of all heads"), ("zh", "所有头的查询")):
        console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
        steps = trace(4, 8, 2, lang=lang)
        print_trace(steps, console)
        console.file.close()
        text = console.export_text()
        assert word in text
        assert "[1 × 2 × 4 × 4]" in text
        assert f"{steps[0].tensor[0, 0, 0]:7.3f}" in text


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ShapeError, match="d_model=10 is not divisible by num_heads=4"):
        trace(4, 10, 4)
    with pytest.raises(ConfigError, match="lang='fr'"):
        trace(lang="fr")
    with pytest.raises(ConfigError, match="seq=0"):
        trace(0)
