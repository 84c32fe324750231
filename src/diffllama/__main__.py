# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of the command `diffllama` and of `python -m diffllama`."""

import os
import signal
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """Handle a signal by ending the process at once, without cleanup."""
    os._exit(128 + number)


def main() -> None:
    """Run the command line. Ctrl-C prints no traceback, even during imports and at exit."""
    handled = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # a shell script ignores it for background jobs
    if handled:
        signal.signal(signal.SIGINT, leave)
    from diffllama.cli import main  # takes a third of a second to import

    try:
        main()
    finally:
        if handled:
            signal.signal(signal.SIGINT, leave)


if __name__ == "__main__":
    main()
