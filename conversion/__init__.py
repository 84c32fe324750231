# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints: other models' into ours, and ours into other models'. See `engine.convert`."""
