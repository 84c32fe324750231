# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark runs."""

import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path

import torch

from diffllama.checkpoints.versions import versions


def processor() -> str:
    """The CPU's model, as far as this system tells."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def machine(device: str) -> dict[str, object]:
    """The machine, its load, and versions."""
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **versions(),
    }
