"""What pip calls to build headwise: scikit-build-core, except that an editable install compiles into the source tree.

scikit-build-core's own editable modes put the library elsewhere: into site-packages, where `make native` does not
reach it, or among CMake's files all over the source folder. They also import a finder at every start of Python that
precedes `sys.path`, so that a second checkout on PYTHONPATH would not be the one that is imported; a path after it is.
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

from compile import ROOT, CannotBuild, build_in_place

PATH_FILE = "headwise.pth"
LATER = os.environ.get("HEADWISE_COMPILE") == "later"  # by native/compile.py, as the Makefile does


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """CMake and Ninja, where the system has none: the same as for a wheel. Nothing if it is compiled later."""
    if LATER:
        return []
    return skbuild.get_requires_for_build_wheel(config_settings)


def build_editable(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    """Compile, or continue without the kernels; then install a path to src."""
    try:
        if not LATER:
            build_in_place()
    except (CannotBuild, OSError, subprocess.CalledProcessError) as reason:
        sys.stderr.write(f"headwise goes without its compiled kernels: {reason}\n")
    name = skbuild.build_editable(wheel_directory, config_settings, metadata_directory)
    _with_plain_path(Path(wheel_directory) / name)
    return name


def _with_plain_path(wheel: Path) -> None:
    """Put a line with the path to src in the place of scikit-build-core's finder."""
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
    """As RECORD has it: https://packaging.python.org/en/latest/specifications/recording-installed-packages/."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
