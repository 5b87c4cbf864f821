#!/usr/bin/env python3
"""Run packed-kv-patch from a checkout: scripts/patches.py status|apply|revert|verify."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "overlay"))

from vllm_patches.patcher import main

if __name__ == "__main__":
    sys.exit(main())
