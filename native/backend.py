"""What pip calls to build headwise: scikit-build-core, except that an editable install compiles into the source tree.

scikit-build-core's own editable modes put the library elsewhere: into site-packages, where `make native` does not
reach it, or among CMake's files all over the source folder.
"""

import subprocess
import sys

from scikit_build_core import build as skbuild
from scikit_build_core.build import *  # noqa: F403

from compile import CannotBuild, build_in_place


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """CMake and Ninja, where the system has none: the same as for a wheel."""
    return skbuild.get_requires_for_build_wheel(config_settings)


def build_editable(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    """Compile, or go on without; then install a path to src."""
    try:
        build_in_place()
    except (CannotBuild, OSError, subprocess.CalledProcessError) as reason:
        sys.stderr.write(f"headwise goes without its compiled kernels: {reason}\n")
    return skbuild.build_editable(wheel_directory, config_settings, metadata_directory)
