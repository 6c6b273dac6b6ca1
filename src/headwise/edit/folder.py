"""Saves and loads models of transformers whose layers have different numbers of heads.

A configuration of transformers has one number of heads for all layers, so from_pretrained cannot load a model of which
only some layers are pruned. `save_pruned` adds a file with the number of heads of each module.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.base.files import atomic_folder, sweep
from headwise.base.read import (
    Entry,
    bounded,
    check_built,
    check_config,
    check_room,
    one_line,
    parsed,
    read_tensors,
    reading,
    save_tensors,
    text_of,
    theirs,
    word,
)
from headwise.base.run import without_memory
from headwise.errors import CheckpointError, ConfigError, not_installed, warn
from headwise.models import find_heads
from headwise.models.adapters.huggingface.library import OLDEST
from headwise.models.configuration import num_layers
from headwise.models.configuration.sizes import difference
from headwise.models.site import make_room
from headwise.nn.owned import check_state
from headwise.wording import tr

WEIGHTS_FILE, CONFIG_FILE, HEADS_FILE = "model.safetensors", "config.json", "heads.json"
FORMAT = "headwise-pruned-2"
WEIGHTS_FORMAT = "pt"  # as transformers has it


def save_pruned(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a model of transformers whose heads were pruned or merged: model.safetensors, config.json and heads.json
    (and generation_config.json), the whole folder or nothing. `load_pruned` reads it; with a batch, where `find_heads`
    found the heads by one.

    `from_pretrained` of transformers reads it too if config.json can say the numbers of heads: if a model that is built
    from it has parameters of the same shapes. Otherwise a warning names the first that differs.

    Args:
        model: an instance of a model class of transformers, with any numbers of heads.
        folder: a new or empty folder; no model is ever overwritten. Save the tokenizer after the model.
    Raises:
        ConfigError: for a model of another library, and for a part of one whose class transformers does not export;
            for tensors on the meta device; for weights that a new model of the class does not have, as those of a
            parametrization. CheckpointError: for a folder that is in use or cannot be written.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers.") or not hasattr(model, "config"):
        raise ConfigError(
            f"model={kind.__name__}: expected a model class of transformers; headwise.lm.checkpoint.save_model writes "
            f"headwise's own"
        )
    if not hasattr(sys.modules.get("transformers"), kind.__name__):
        raise ConfigError(
            f"model={kind.__name__}: transformers does not export this class, so load_pruned could not find it; save "
            f"the model that it is a part of"
        )
    if without := [name for name, x in model.state_dict().items() if x.is_meta]:
        raise ConfigError(f"model: {without[0]} is on the meta device, where tensors have no values to be saved")
    sites = {site.name: {"num_heads": site.num_heads, "num_kv_heads": site.num_kv_heads} for site in find_heads(model)}
    held: Any = model
    with without_memory():
        built = held._from_config(deepcopy(held.config))
    check_state(model, lambda: built)
    if why := difference(model, built):
        cause = tr("its configuration cannot say such numbers of heads")
        if len({tuple(each.values()) for each in sites.values()}) > 1:
            cause = tr("its layers have different numbers of heads, and prune(…, uniform=True) would keep equally many")
        warn(tr(
            "{name}: from_pretrained of transformers cannot read this folder, as {cause}: {why}; load it with "
            "hw.edit.load_pruned", name=kind.__name__, cause=cause, why=why,
        ))  # fmt: skip
    tensors, same = _apart(model)
    heads = {"format": FORMAT, "class": kind.__name__, "sites": sites, "same": same}
    generation = getattr(held, "generation_config", None)
    with _new_folder(Path(folder)) as temporary:
        save_tensors(temporary / WEIGHTS_FILE, tensors, {"format": WEIGHTS_FORMAT})
        (temporary / CONFIG_FILE).write_text(held.config.to_json_string(use_diff=False), encoding="utf-8")
        if generation is not None:
            (temporary / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")
        (temporary / HEADS_FILE).write_text(json.dumps(heads, indent=1, ensure_ascii=False), encoding="utf-8")


def load_pruned(folder: str | os.PathLike[str], batch: Any = None) -> Any:
    """Load a model that `save_pruned` wrote, in eval mode and in its saved dtypes.

    Args:
        batch: for attention that `find_heads` found by a batch: one like it, on which the newly built model is called.
    Raises:
        CheckpointError: if a file is missing, cannot be read, or does not fit the others. ConfigError: without
            transformers.
    """
    folder = Path(folder)
    file, weights = folder / HEADS_FILE, folder / WEIGHTS_FILE
    heads = _heads(file)
    with reading(file, "list of heads"):
        name = heads.word("class")
    kind = _kind(name, file)
    path = folder / CONFIG_FILE
    with reading(path, "configuration"):
        values = Entry(parsed(text_of(path))).plain()
        check_config(values, path)
        with theirs(path, "it cannot be read"):
            config = kind.config_class.from_json_file(path)  # which reads their spelling of ∞ and NaN
        check_built(config, path)
    with reading(weights, "weights"):
        tensors, _ = read_tensors(weights, WEIGHTS_FORMAT)
    if (layers := num_layers(config) or 0) > len(tensors):  # before any layer is built
        raise CheckpointError(f"{str(path)!r}: {layers} layers, and {len(tensors)} weights in {WEIGHTS_FILE}")
    with theirs(path, f"it does not build a {kind.__name__}"), bounded(folder, len(tensors)):
        with without_memory():
            check_room(folder, kind._from_config(deepcopy(config)), sum(x.numel() for x in tensors.values()))
        model = kind._from_config(config)
    with reading(file, "list of heads"):
        _resize_all(model, heads, batch)
        same = heads.named("same", word)
        if missing := [name for name in same.values() if name not in tensors]:
            raise CheckpointError(f"same: {missing[0]!r} is not among the weights")
    try:
        model.load_state_dict(tensors | {name: tensors[of] for name, of in same.items()}, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{str(weights)!r} does not fit its own sizes: {one_line(error)}") from None
    model.tie_weights()
    return model.eval()


def is_pruned(folder: str | os.PathLike[str]) -> bool:
    """Whether `save_pruned` wrote a folder."""
    return (Path(folder) / HEADS_FILE).is_file()


def resize_as_saved(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Give a newly built model of transformers the heads and output layer of the one in a folder that `save_pruned`
    wrote, as uninitialized parameters. CheckpointError if they cannot be read, or are another model's."""
    file = Path(folder) / HEADS_FILE
    heads = _heads(file)
    with reading(file, "list of heads"):
        _resize_all(model, heads)


def _resize_all(model: Any, heads: Entry, batch: Any = None) -> None:
    inner = f"{model.base_model_prefix}."  # of names in a model with an output layer
    sizes, listed = {}, heads.entry("sites")
    for name in listed:
        one = listed.entry(name)
        sizes[name.removeprefix(inner)] = one.whole("num_heads", least=1), one.whole("num_kv_heads", least=1)
    hint = "" if batch is not None else "; if find_heads(model, batch) found them, give load_pruned a batch too"
    try:
        sites = {site.name.removeprefix(inner): site for site in find_heads(model, batch)}
    except ConfigError:
        raise CheckpointError(f"{type(model).__name__} has no attention heads of a known kind{hint}") from None
    if set(sites) != set(sizes):
        raise CheckpointError(f"its modules are not those of {type(model).__name__}{hint}")
    for name, site in sites.items():
        num_heads, num_kv_heads = sizes[name]
        if num_heads > site.num_heads or num_heads % num_kv_heads:
            raise CheckpointError(
                f"{site.name}: num_heads={num_heads}, num_kv_heads={num_kv_heads}; expected a multiple of the KV "
                f"heads, and at most {site.num_heads}"
            )
        if (num_heads, num_kv_heads) != (site.num_heads, site.num_kv_heads):
            make_room(site, num_heads, num_kv_heads)


def _heads(file: Path) -> Entry:
    missing = "save_pruned writes it; transformers' own from_pretrained reads others"
    with reading(file, "list of heads", missing=missing):
        heads = Entry(parsed(text_of(file)))
        if heads.word("format") != FORMAT:
            raise CheckpointError(f"expected the format {FORMAT}, got {heads.word('format')!r}")
        return heads


def _kind(name: str, file: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise not_installed("load_pruned()", f"transformers>={OLDEST}") from None
    kind: Any = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(f"{str(file)!r}: {name!r} is not a model class of the installed transformers")
    return kind


def _apart(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state with each tensor once, and for names of shared tensors the name it is saved under."""
    first: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    for name, x in model.state_dict().items():
        key = (x.untyped_storage().data_ptr(), x.storage_offset(), tuple(x.shape), x.stride())
        if key in first and x.numel():
            same[name] = first[key]
        else:
            first[key] = name
            tensors[name] = x
    return tensors, same


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` with all its files on success; otherwise nothing changes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{str(folder)!r} is not empty; expected a new folder, as no model is overwritten")
    try:
        sweep(folder.parent)
        with atomic_folder(folder) as temporary:
            yield temporary
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} could not be written ({error}); nothing was written") from error
