"""Models of transformers whose layers have heads of their own number, as folders: weights, config, and the heads.

transformers' own configuration holds one number of heads for all layers, so a pruned model that it saved could not be
loaded again. Here a third file says how many heads each module has.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headwise.anatomy import HeadSite, find_heads
from headwise.errors import CheckpointError, ConfigError
from headwise.files import atomic_folder, sweep
from headwise.surgery.resize import make_room

WEIGHTS_FILE, CONFIG_FILE, HEADS_FILE = "model.safetensors", "config.json", "heads.json"
FORMAT = "headwise-heads-1"


def save_pruned(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a model of transformers whose heads were cut or merged: model.safetensors, config.json and heads.json
    (and generation_config.json), the whole folder or nothing. `load_pruned` reads it.

    Args:
        model: a model class of transformers itself; any numbers of heads.
        folder: a new one, or an empty one: no model is ever overwritten. Save the tokenizer after the model.
    Raises:
        ConfigError: for another model. CheckpointError: for a folder that is in use, and if it cannot be written.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers.") or not hasattr(model, "config"):
        raise ConfigError(
            f"model={kind.__name__}: expected a model class of transformers; headwise.lm.checkpoint.save_model writes "
            f"headwise's own"
        )
    sites = {site.name: {"num_heads": site.num_heads, "num_kv_heads": site.num_kv_heads} for site in find_heads(model)}
    tensors, same = _apart(model)
    heads = {"format": FORMAT, "class": kind.__name__, "sites": sites, "same": same}
    held: Any = model
    generation = getattr(held, "generation_config", None)
    with _new_folder(Path(folder)) as temporary:
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / CONFIG_FILE).write_text(held.config.to_json_string(use_diff=False), encoding="utf-8")
        if generation is not None:
            (temporary / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")
        (temporary / HEADS_FILE).write_text(json.dumps(heads, indent=1, ensure_ascii=False), encoding="utf-8")


def load_pruned(folder: str | os.PathLike[str]) -> Any:
    """The model that `save_pruned` wrote, in eval mode, in the dtypes that it was saved in.

    Raises:
        CheckpointError: if a file is missing, cannot be read, or does not fit the others. ConfigError: without
            transformers.
    """
    folder = Path(folder)
    heads = _json(folder / HEADS_FILE)
    if heads.get("format") != FORMAT:
        raise CheckpointError(f"{str(folder / HEADS_FILE)!r} is not of the format {FORMAT}")
    model = _empty_model(folder, str(heads.get("class")))
    sites = {site.name: site for site in find_heads(model)}
    try:
        if set(sites) != set(heads["sites"]):
            raise ValueError(f"its modules are not those of {heads['class']}")
        for name, sizes in heads["sites"].items():
            _resize(sites[name], sizes["num_heads"], sizes["num_kv_heads"])
        same = dict(heads["same"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{str(folder / HEADS_FILE)!r} does not fit the model: {error}") from None
    tensors = _tensors(folder / WEIGHTS_FILE)
    try:
        model.load_state_dict(tensors | {name: tensors[of] for name, of in same.items()}, assign=True)
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"{str(folder / WEIGHTS_FILE)!r} does not fit its own sizes: {error}") from None
    model.tie_weights()
    return model.eval()


def _resize(site: HeadSite, num_heads: int, num_kv_heads: int) -> None:
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{site.name}: {name}={value!r}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{site.name}: {num_heads} heads are no multiple of {num_kv_heads}")
    if (num_heads, num_kv_heads) != (site.num_heads, site.num_kv_heads):
        make_room(site, num_heads, num_kv_heads)


def _empty_model(folder: Path, name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError("load_pruned needs transformers: pip install 'headwise[hf]'") from None
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(f"{str(folder / HEADS_FILE)!r}: {name!r} is no model class of this transformers")
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{str(folder / CONFIG_FILE)!r} does not exist")
    try:
        made: Any = kind
        return made._from_config(made.config_class.from_json_file(folder / CONFIG_FILE))
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise CheckpointError(f"{str(folder / CONFIG_FILE)!r} cannot be read: {error}") from None


def _apart(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state with every tensor once, and for each name that shares one, the name it is saved under."""
    first: dict[tuple[int, int, tuple[int, ...]], str] = {}
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    for name, x in model.state_dict().items():
        key = (x.untyped_storage().data_ptr(), x.storage_offset(), tuple(x.shape))
        if key in first and x.numel():
            same[name] = first[key]
        else:
            first[key] = name
            tensors[name] = x.detach().contiguous()
    return tensors, same


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that is not there before, and there with all its files after; or nothing changes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{str(folder)!r} is not empty; expected a new folder, as no model is overwritten")
    try:
        sweep(folder.parent)
        with atomic_folder(folder) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{str(folder)!r} could not be written ({error}); nothing is left of it") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(
            f"{str(path)!r} does not exist; save_pruned writes it, and a folder without it is read by transformers' "
            f"own from_pretrained"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{str(path)!r} holds {type(found).__name__}; expected an object")
    return found


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{str(path)!r} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read, it may be truncated: {error}") from None
