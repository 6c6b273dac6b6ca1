"""The build backend of headwise: scikit-build-core, except that an editable install compiles into the source tree.

scikit-build-core's own editable modes put the library into site-packages, where `make native` does not update it, or
among CMake's files throughout the source folder. They also install an import finder that precedes `sys.path`, so that a
second checkout on PYTHONPATH would be ignored; this backend adds a path instead.
"""

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from scikit_build_core import build as skbuild
from scikit_build_core.build import *  # noqa: F403

from compile import REQUIRED, ROOT, CannotBuild, build_in_place

PATH_FILE = "headwise.pth"
LATER = os.environ.get("HEADWISE_COMPILE") == "later"  # by native/compile.py, as the Makefile does


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """CMake and Ninja, if the system lacks them: the same as for a wheel. Nothing if the kernels are compiled later."""
    if LATER:
        return []
    return skbuild.get_requires_for_build_wheel(config_settings)


def build_editable(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    """Compile the kernels, or continue without them unless they are required; then install a path to src."""
    try:
        if not LATER:
            build_in_place()
    except (CannotBuild, OSError, subprocess.CalledProcessError) as reason:
        if REQUIRED:
            raise SystemExit(f"HEADWISE_REQUIRE_NATIVE: the compiled kernels are not built: {reason}") from reason
        sys.stderr.write(f"headwise is installed without its compiled kernels: {reason}\n")
    name = skbuild.build_editable(wheel_directory, config_settings, metadata_directory)
    _with_plain_path(Path(wheel_directory) / name)
    return name


def _with_plain_path(wheel: Path) -> None:
    """Replace scikit-build-core's finder with a path file that names src."""
    with zipfile.ZipFile(wheel) as old:
        files = {name: old.read(name) for name in old.namelist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    kept = {name: data for name, data in files.items() if ".dist-info/" in name and name != record}
    kept[PATH_FILE] = f"{ROOT / 'src'}\n".encode()
    lines = [f"{name},{_digest(data)},{len(data)}" for name, data in kept.items()]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in kept.items():
            new.writestr(name, data)
        new.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")


def _digest(data: bytes) -> str:
    """The hash format of RECORD: https://packaging.python.org/en/latest/specifications/recording-installed-packages/."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
