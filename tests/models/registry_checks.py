"""Some twenty checks of a model type: what headwise computes is what the model's own code ("eager") computes."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import registry_map_checks as of_maps
import registry_output_checks as of_outputs
import registry_step_checks as of_steps
from registry_case import Case, NotApplicable, Partly, Wrong, restore, short_error
from registry_models import model_class
from registry_statistics import arguments

from headwise.errors import HeadwiseError
from headwise.models.adapters import huggingface

CHECKS: dict[str, Callable[[Case], None]] = {
    "outputs": of_outputs.same_outputs,
    "every attention": of_maps.every_attention_seen,
    "same bits": of_outputs.same_bits_again,
    "alone": of_outputs.alone_as_in_a_batch,
    "padding left": of_outputs.padding_on_the_left,
    "padding right": of_outputs.padding_on_the_right,
    "padding of targets": of_outputs.padding_of_targets,
    "gradients": of_steps.gradients_of_weights,
    "input gradients": of_steps.gradients_of_inputs,
    "training": of_outputs.training_mode,
    "cache": of_steps.decoding_with_a_cache,
    "cache = full": of_steps.cache_as_the_full_pass,
    "generate": of_steps.generated_tokens,
    "weights": of_maps.returned_weights,
    "rows": of_maps.rows_of_weights,
    "observe": of_maps.observing_changes_nothing,
    "watch": of_maps.watched_measures,
    "short masks": of_maps.masks_stay_short,
    "bfloat16": of_outputs.bfloat16,
    "restore": of_outputs.restored,
    "untouched": of_outputs.weights_untouched,
}


def check(case: Case, name: str) -> str:
    """The word "pass"; or one of the other words of `registry_table.LETTERS`, and why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CHECKS[name](case)
    except NotApplicable as error:
        return f"not applicable: {error}"
    except Partly as error:
        return f"in part: {error}"
    except Wrong as error:
        return f"wrong: {error}"
    except HeadwiseError as error:
        return f"refused: {' '.join(str(error).split())}"
    except Exception as error:
        return f"crash: {short_error(error)}"
    finally:
        restore(case.model)
    return "pass"


def examine(model_type: str) -> dict[str, Any]:
    """The row of a model type: what was made, each check's result, and what they come to."""
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = {"type": model_type, **_examined(model_type)}
    return {**row, "seconds": round(time.process_time() - started, 2)}


def _examined(model_type: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    try:
        row["class"] = model_class(model_type).__name__
        case = Case(model_type)
    except Exception as error:
        return {
            **row,
            "status": "not made",
            "why": str(error) if isinstance(error, NotApplicable) else short_error(error),
        }
    size = sum(x.numel() for x in case.model.parameters())
    row |= {"size": case.how, "inputs": case.kind, "parameters": size, "attention": len(case.attention)}
    if not case.attention:
        return {**row, "status": "no attention"}
    try:
        huggingface.convert(case.model)
    except HeadwiseError as error:
        try:
            of_outputs.unchanged(case)
        except Wrong as wrong:
            return {**row, "status": "wrong", "why": f"refused, but {wrong}"}
        return {**row, "status": "refused", "why": str(error)}
    except Exception as error:
        return {**row, "status": "crash", "why": f"turn: {short_error(error)}"}
    restore(case.model)
    with arguments() as found:
        row["checks"] = {name: check(case, name) for name in CHECKS}
    row |= {"arguments": sorted(found)} if found else {}
    for status in ("crash", "wrong"):
        if any(said.startswith(status) for said in row["checks"].values()):
            return {**row, "status": status}
    for name in ("outputs", "every attention"):
        status, _, why = row["checks"][name].partition(": ")
        if status != "pass":
            return {**row, "status": status, "why": why}
    return {**row, "status": "pass"}
