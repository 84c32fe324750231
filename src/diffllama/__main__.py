# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `diffllama`, which is also `python -m diffllama`."""

import os
import signal
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at once, as after Ctrl-C, when there is nothing to clean up."""
    os._exit(128 + number)


def main() -> None:
    """Runs the command line. Ctrl-C ends it without a traceback also while it is imported, and at its end."""
    handled = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # ignored in the background of a script
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
