"""The samples and small models of the core's and of pruning's tests serve here too."""

import sys
from pathlib import Path

for folder in ("core", "edit"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
