import time

import psutil

from benchmarks.machine import busy_cores


def test_busy_core_computes_until_the_context_ends() -> None:
    others = set(psutil.Process().children())
    with busy_cores(1):
        (process,) = set(psutil.Process().children()) - others
        deadline = time.monotonic() + 60
        while process.cpu_times().user < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not process.is_running()
