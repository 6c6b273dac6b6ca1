"""What the tests of the GPU kernels share with those of the core."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))  # samples
