"""`recent_windows.pages_side_by_side` in the workers of an engine of several processes: an extension, by name."""

from __future__ import annotations

import pytest
from recent_windows import pages_side_by_side


class Extension:
    """Nothing of it is called: a worker imports this module before it builds a model."""


pages_side_by_side(pytest.MonkeyPatch())
