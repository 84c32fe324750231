# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`."""

from benchmarks.command import main


if __name__ == "__main__":
    main()
