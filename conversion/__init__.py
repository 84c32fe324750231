# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints between other models and diffllama. See `engine.convert`."""
