"""What the tools beside Triton's compiler say of machine code; they need no GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path


def dump(option: str, file: Path) -> str:
    """What cuobjdump says of a file of machine code: "--dump-resource-usage" or "--dump-sass"."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = tool if os.access(tool, os.X_OK) else "cuobjdump"
    return subprocess.run([command, option, file], check=True, capture_output=True, text=True).stdout


def resources(file: Path) -> dict[str, tuple[int, int, int]]:
    """Registers of a thread, bytes of its stack and of its local memory, by kernel."""
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", dump("--dump-resource-usage", file))
    return {name: (int(registers), int(stack), int(local)) for name, registers, stack, local in found}
