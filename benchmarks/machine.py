# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Describes the machine that a benchmark runs on."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import torch

from diffllama.checkpoints.versions import versions


BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(10**6))"  # ends with its parent


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep `count` cores busy with other processes while the context lasts."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BUSY, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def machine(device: str, busy: int = 0) -> dict[str, object]:
    """Return the machine, its load, the number of cores kept busy, and the versions of packages."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    cpu = model[1] if model else platform.processor() or platform.machine()
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "cores": os.cpu_count(),
        "busy_cores": busy,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **versions(),
    }
