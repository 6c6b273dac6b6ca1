"""The manifest of a sweep: the settings and files that a resumed run must share."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

import headwise.corpus.sources as files
from headwise.corpus.plan import Limit
from headwise.corpus.sources import Print, Source
from headwise.errors import ConfigError
from headwise.lm.loading import LoadedModel


def weights_print(loaded: LoadedModel) -> str:
    """SHA-256 of all weights, with their names, dtypes and sizes."""
    digest = hashlib.sha256()
    for name, x in sorted(loaded.model.state_dict().items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        flat = x.detach().cpu().contiguous().flatten()
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def differences(
    then: Mapping[str, Any], options: Mapping[str, Any], model: Mapping[str, Any], given: Sequence[Source]
) -> list[str]:
    """The differences between the current settings and those of the manifest, in words."""
    found = []
    if then["model"]["sha256"] != model["sha256"]:
        names = {one["name"] for one in (then["model"], model)}
        found.append(f"the model: {' and '.join(sorted(names))} differ in weights or sizes")
    for name, value in options.items():
        if then["options"].get(name) != value:
            found.append(f"--{name.replace('_', '-')}: it was {_word(then['options'].get(name))} and is {_word(value)}")
    for name, value in model["versions"].items():
        if then["model"]["versions"].get(name) != value:
            found.append(f"{name}: it was {then['model']['versions'].get(name)} and is {value}")
    before, now = [known["path"] for known in then["given"]], [source.path for source in given]
    found += [f"{path!r} is new" for path in now if path not in before]
    found += [f"{path!r} is not among the files" for path in before if path not in now]
    if not found and before != now:
        found.append("the files are in another order")
    return found


def changes(then: Mapping[str, Any]) -> list[str]:
    """The files that have changed since they were checked, in words."""
    prints = [(Print(**known), upto) for known, upto in zip(then["files"], then["checked"], strict=True)]
    return [change for known, upto in prints if (change := files.changed(known, upto)) is not None]


def refuse(out: str, found: Sequence[str], *, finished: bool = False) -> ConfigError:
    """The error for an unfinished or finished sweep with other settings."""
    shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
    if finished:
        return ConfigError(
            f"{out!r} already exists, with different settings: {shown}. Give another --out, or --restart to "
            "measure again"
        )
    return ConfigError(
        f"{out!r} contains a run with different settings: {shown}. Use the same settings, another --out, or "
        "--restart to measure again"
    )


def limit_of(then: Mapping[str, Any]) -> Limit | None:
    """The limit of the corpus in the manifest."""
    return None if then["limit"] is None else Limit(**then["limit"])


def sources_of(then: Mapping[str, Any]) -> list[Source]:
    """The files in the manifest."""
    return [Source(**{**one, "groups": tuple(one["groups"])}) for one in then["given"]]


def manifest_of(
    options: Mapping[str, Any], model: Mapping[str, Any], given: Sequence[Source], prints: Sequence[Print],
    checked: Sequence[int], step: int, limit: Limit | None,
    count: int,
) -> dict[str, Any]:  # fmt: skip
    """The manifest. checked: the bytes that were checked of each measured file. count: of units."""
    return {
        "options": dict(options), "model": dict(model), "given": [asdict(source) for source in given],
        "files": [one.to_dict() for one in prints], "checked": list(checked), "step": step,
        "units": count,
        "limit": None if limit is None else asdict(limit),
    }  # fmt: skip


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "not given" if value is None else str(value)
