# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains matched Transformers and differential models from scratch, and compares them: `python -m examples.study`."""
