"""Some twenty checks of a model type: what headwise computes is what the model's own code ("eager") computes."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import registry_map_checks as of_maps
import registry_output_checks as of_outputs
import registry_step_checks as of_steps
from registry_case import Case, NotApplicable, Partly, Wrong, short_error
from registry_models import model_class

import headwise as hw
from headwise.errors import HeadwiseError

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
    """ "pass", or "refused: …", "not applicable: …", "wrong: …", "crash: …" with why."""
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
        hw.restore(case.model)
    return "pass"


def examine(model_type: str) -> dict[str, Any]:
    """The row of a model type: what was made, each check's result, and what they come to."""
    started = time.process_time()
    row: dict[str, Any] = {"type": model_type}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row["class"] = model_class(model_type).__name__
            case = Case(model_type)
    except Exception as error:
        why = str(error) if isinstance(error, NotApplicable) else short_error(error)
        return {**row, "status": "not made", "why": why, "seconds": round(time.process_time() - started, 2)}
    size = sum(x.numel() for x in case.model.parameters())
    row |= {"size": case.how, "inputs": case.kind, "parameters": size, "attention": len(case.attention)}
    if not case.attention:
        row |= {"status": "no attention"}
        return {**row, "seconds": round(time.process_time() - started, 2)}
    try:
        hw.switch(case.model)
        hw.restore(case.model)
    except HeadwiseError as error:
        return {**row, "status": "refused", "why": str(error), "seconds": round(time.process_time() - started, 2)}
    except Exception as error:
        return {**row, "status": "crash", "why": f"switch: {short_error(error)}"}
    row["checks"] = {name: check(case, name) for name in CHECKS}
    for status in ("crash", "wrong"):
        if any(said.startswith(status) for said in row["checks"].values()):
            row["status"] = status
            break
    else:
        for name in ("outputs", "every attention"):
            said = row["checks"][name]
            row["status"] = said.partition(":")[0]
            if said != "pass":
                row["why"] = said.partition(": ")[2]
                break
    row["seconds"] = round(time.process_time() - started, 2)
    return row
