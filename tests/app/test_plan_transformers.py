"""`headwise plan --config FOLDER` against the models of transformers: their parameters, their caches, their FLOPs."""

from pathlib import Path
from typing import Any

import pytest
from plan_models import (
    BART,
    BOTH,
    DECODERS,
    ENCODERS,
    EVERY,
    cached,
    decoded,
    flops,
    folder_of,
    ids,
    model_of,
    parameters,
    source_of,
)

import headwise as hw
from headwise.models.configuration.families import FAMILIES
from headwise.textbook.plan import Plan, plan_from_options

B, N, SOURCE = 2, 17, 23
CUTS: dict[str, tuple[dict[str, Any], dict[int, list[int]]]] = {
    "llama": ({**DECODERS["llama"], "num_key_value_heads": 6}, {1: [2, 3]}),
    "groups": (DECODERS["llama"], {0: [0, 1, 2], 2: [0, 4]}),
    "mistral": (DECODERS["mistral"], {0: [0, 3], 1: [1, 5]}),
    "qwen3": (DECODERS["qwen3"], {2: [3, 4, 5]}),
    "gpt2": (DECODERS["gpt2"], {0: [0], 2: [1, 2, 5]}),
    "gpt2 alike": (DECODERS["gpt2"], {0: [0, 1], 1: [2, 3], 2: [0, 5]}),
    "bert": (ENCODERS["bert"], {0: [0, 2, 3, 4, 5]}),
    "bert alike": (ENCODERS["bert"], {0: [0], 1: [1], 2: [5]}),
    "bart": (BART, {0: [0], 3: [1, 2], 4: [3]}),  # the encoder's first layer, self and cross attention of the decoder's
    "whisper": (BOTH["whisper"], {2: [5], 6: [0, 1]}),
}  # fmt: skip


def plan_of(folder: Any, source: int | None = None, **options: Any) -> Plan:
    return plan_from_options(config=str(folder), sizes={}, batch=B, source=source, **options)


def total(plan: Plan, key: str) -> Any:
    return plan.table(key).rows[-1][1]


def check(model: Any, folder: Any) -> None:
    """All that a plan of the folder claims, against the model."""
    both = model.config.is_encoder_decoder
    source = None if not both else getattr(model.config, "max_source_positions", SOURCE)
    given = None if model.config.model_type == "whisper" else source
    plan = plan_of(folder, given, seq=N, dtype="float32", materialised=True)
    assert total(plan, "parameters") == parameters(model)
    if model.config.model_type == "bert":
        assert total(plan, "pass") == flops(model, input_ids=ids(B, N))
        assert [table.key for table in plan.tables if table.key == "step"] == []
        return
    if both:
        inputs = source_of(model, B, source) | {"decoder_input_ids": ids(B, N)}
        last = 2 * B * (N - 1) * model.config.d_model * 101  # the logits of all other positions
        assert total(plan, "pass") == flops(model, **inputs, use_cache=False) - last
    else:
        assert total(plan, "pass") == flops(model, input_ids=ids(B, N), logits_to_keep=1, use_cache=False)
    for prefill, steps in ((11, 5), (1, 3)):
        cache, following = decoded(model, B, prefill, steps, source or 0)
        done = plan_of(folder, given, seq=prefill + steps, dtype="float32")
        assert dict(done.table("memory").rows)["cache, all tokens"] == cached(cache)
        after = plan_of(folder, given, seq=prefill + steps + 1, dtype="float32", materialised=True)
        assert total(after, "step") == flops(model, **following)


def test_the_families_are_all_tested() -> None:
    assert set(EVERY) == set(FAMILIES)


@pytest.mark.parametrize("kind", EVERY)
def test_a_plan_is_that_of_the_model(kind: str, tmp_path: Path) -> None:
    check(model_of(kind), folder_of(tmp_path, kind, **EVERY[kind]))


@pytest.mark.parametrize("case", CUTS)
def test_a_plan_of_a_pruned_model_is_that_of_the_model(case: str, tmp_path: Path) -> None:
    sizes, heads = CUTS[case]
    kind = "llama" if case == "groups" else case.partition(" ")[0]
    model = hw.edit.prune(model_of(kind, **sizes), heads).model
    hw.edit.save_pruned(model, tmp_path / "cut")
    check(model, tmp_path / "cut")
