"""The library offers what its header declares and nothing else, and needs the C library alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.kernels.cpu.library import ABI, NAME

ROOT = Path(__file__).parents[2]
HEADER = (ROOT / "native" / "headwise.h").read_text(encoding="utf-8")
LIBRARY = ROOT / "src" / "headwise" / "kernels" / "cpu" / NAME

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")


def read(tool: str, *options: str) -> str:
    if not LIBRARY.exists():
        pytest.skip(f"there is no {NAME}: `make native` compiles it")
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} (binutils) is not installed")
    return subprocess.run([tool, *options, str(LIBRARY)], capture_output=True, text=True, check=True).stdout


@pytest.mark.thorough
def test_exports_are_the_headers() -> None:
    declared = set(re.findall(r"^HEADWISE_EXPORT\b[^;]*?\b(headwise_\w+)\(", HEADER, re.MULTILINE))
    assert "headwise_forward" in declared
    exported = {line.split()[-1] for line in read("nm", "-D", "--defined-only").splitlines()}
    assert exported == declared


def test_needs_the_c_library_alone() -> None:
    """No libstdc++ and no OpenMP runtime that could meet another copy of itself in the process."""
    needed = set(re.findall(r"^\s*NEEDED\s+(\S+)", read("objdump", "-p"), re.MULTILINE))
    allowed = r"(libc|libm|libpthread|ld-linux-[\w-]+)\.so\.\d+|libc\.musl-\w+\.so\.\d+"
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []


def test_python_knows_the_headers_version() -> None:
    found = re.search(r"^#define HEADWISE_ABI (\d+)$", HEADER, re.MULTILINE)
    assert found is not None
    assert int(found[1]) == ABI
