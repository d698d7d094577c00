from __future__ import annotations

import sys
from pathlib import Path

# The adapters that the documents speak of are made as in the adapter tests.
sys.path.append(str(Path(__file__).parents[1] / "adapter"))
