"""Settings of every test: no network, no telemetry, quiet engines in the test's own process.

One OpenMP thread, not bound to a core: the demo model is too small to gain from a second, and OpenMP's barriers
make two threads ten times slower than one as soon as anything else runs on the machine.
"""

from __future__ import annotations

import os
import signal

signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that fixtures end the servers that they started
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)
