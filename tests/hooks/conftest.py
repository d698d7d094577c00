from __future__ import annotations

import sys
from pathlib import Path

# What the other areas' tests have: adapters on disk, layers of the kernels, an admin endpoint in memory.
sys.path += [str(Path(__file__).parents[1] / area) for area in ("catalog", "kernels", "admin")]
