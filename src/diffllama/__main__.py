# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m diffllama` is the command `diffllama`."""

from diffllama.cli import main


main()
