"""End a process when the process that started it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

EXIT_INTERRUPTED = 130
"""Exit code of shells after Ctrl-C: 128 and the number of SIGINT."""
PR_SET_PDEATHSIG = 1
"""Constant of Linux's <sys/prctl.h>."""


def end_with(parent: int) -> None:
    """Have Linux kill this process when its parent ends, however that happens: it may hold a GPU's memory.

    parent: process ID of the parent.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        sys.exit(EXIT_INTERRUPTED)
