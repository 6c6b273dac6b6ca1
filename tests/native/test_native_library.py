"""The library is found and loaded, or the reason is told."""

import _ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwise.errors import KernelError
from headwise.kernels.cpu.library import ABI, NAME, OVERRIDE, Library, library, load, wrong_target

ROOT = Path(__file__).parents[2]
ORDER = ["portable", "avx2", "avx512", "avx512bf16", "amx"]
BUILT = ROOT / "src" / "headwise" / "kernels" / "cpu" / NAME


@pytest.fixture
def anew() -> Iterator[None]:
    """The library is looked for again, before and after."""
    library.cache_clear()
    yield
    library.cache_clear()


def test_missing_library_is_told(tmp_path: Path) -> None:
    found = load(tmp_path / NAME)
    assert found.handle is None
    assert f"{NAME} is missing" in str(found.reason)
    assert found.target() is None
    assert found.targets() == []


def test_file_that_is_no_library_is_told(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text("not a library", encoding="utf-8")
    assert "does not load" in str(load(path).reason)


def test_other_library_is_told() -> None:
    assert "not libheadwise" in str(load(Path(_ctypes.__file__)).reason)


@pytest.mark.thorough
def test_other_version_is_told(tmp_path: Path) -> None:
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("there is no C compiler")
    source, path = tmp_path / "old.c", tmp_path / NAME
    source.write_text(f"int headwise_abi_version(void) {{ return {ABI + 7}; }}", encoding="utf-8")
    subprocess.run([cc, "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    assert f"ABI version {ABI + 7}, expected {ABI}" in str(load(path).reason)


@pytest.mark.usefixtures("anew")
def test_library_that_the_user_names_loads_or_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "mine.so"))
    with pytest.raises(KernelError, match=f"{OVERRIDE}=.*mine.so.*mine.so is missing.*unset"):
        library()


@pytest.mark.usefixtures("anew")
def test_library_that_the_user_names_takes_the_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not BUILT.exists():
        pytest.skip(f"there is no {NAME}: `make native` compiles it")
    mine = Path(shutil.copy(BUILT, tmp_path / "mine.so"))
    monkeypatch.setenv(OVERRIDE, str(mine))
    assert library().path == mine
    assert library().handle is not None


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("wanted", ORDER)
def test_environment_chooses_a_target(wanted: str) -> None:
    """In a process of its own; one that the CPU cannot run is never taken."""
    built = load(BUILT)
    if built.handle is None:
        pytest.skip(str(built.reason))
    runs = [target for target in built.targets() if built.refusal(target) is None]
    assert used_target() == runs[0]
    assert used_target(HEADWISE_TARGET=wanted) == (wanted if wanted in runs else runs[0])


WRONG = {
    "avx513": "there is no such target",
    "avx2 ": "there is no such target",
    "neon": "there is no such target",
}


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("wanted", WRONG)
def test_target_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("HEADWISE_TARGET", wanted)
    with pytest.raises(KernelError, match=f"HEADWISE_TARGET='{wanted}': {WRONG[wanted]}; name one .*portable.*unset"):
        library()


def test_target_that_this_machine_lacks_is_refused_with_those_that_it_has() -> None:
    path = Path("libheadwise.so")
    lacks = "this CPU lacks its instructions"
    of_avx2 = Library(path, Loaded(amx=lacks, avx512bf16=lacks, avx512=lacks, avx2="", portable=""), None)  # type: ignore[arg-type]
    assert wrong_target("avx512", of_avx2) == (
        f"HEADWISE_TARGET='avx512': {lacks}; name one that runs here (avx2, portable)"
    )
    of_portable = Library(path, Loaded(portable=""), None)  # type: ignore[arg-type]
    assert wrong_target("avx2", of_portable) == (
        "HEADWISE_TARGET='avx2': libheadwise.so was compiled without it; name one that runs here (portable)"
    )
    none = Library(path, None, "there is none")
    assert wrong_target("avx2", none) is None
    assert "no such target" in str(wrong_target("avx1024", none))
    for fine in (None, "", "avx2"):
        assert wrong_target(fine, of_avx2) is None


def test_target_that_is_not_the_first_choice_can_be_named() -> None:
    """On Intel's CPUs avx512 comes before avx512bf16, as it is faster there."""
    intel = Library(Path("libheadwise.so"), Loaded(avx512="", avx512bf16="", avx2="", portable=""), None)  # type: ignore[arg-type]
    assert [wrong_target(name, intel) for name in ("avx512", "avx512bf16", "avx2", "portable")] == [None] * 4


def test_tiles_that_the_operating_system_forbids_are_refused_with_its_reason() -> None:
    forbidden = "Linux does not permit tiles to this process"
    found = Library(Path("libheadwise.so"), Loaded(amx=forbidden, avx512=""), None)  # type: ignore[arg-type]
    assert wrong_target("amx", found) == f"HEADWISE_TARGET='amx': {forbidden}; name one that runs here (avx512)"


class Loaded:
    """A library as far as its targets go: those that are in it, with the reason why each does not run or ""."""

    def __init__(self, **refusals: str) -> None:
        self.headwise_targets = ",".join(refusals).encode
        self.headwise_refusal = lambda name: refusals[name.decode()].encode() if name.decode() in refusals else None


def used_target(**more: str) -> str:
    script = (
        "import ctypes, sys; name = ctypes.CDLL(sys.argv[1]).headwise_target_name; name.restype = ctypes.c_char_p; "
        "sys.stdout.write(name().decode())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HEADWISE_TARGET"} | more
    command = [sys.executable, "-S", "-c", script, str(BUILT)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "code"), [([], 1), (["--if-possible"], 0), (["--background"], 0)])
def test_compiling_without_a_compiler_is_told(options: list[str], code: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "native" / "compile.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == code
    assert re.fullmatch(r"the compiled kernels are not built: there is no .*\n", done.stderr)
