"""The tests of `tq-calibrate` share the small models of the engine tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))
