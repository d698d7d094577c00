from __future__ import annotations

import sys
from pathlib import Path

# Adapters for a model of one layer, and plugins made of functions.
sys.path += [str(Path(__file__).parents[1] / area) for area in ("catalog", "hooks")]
