# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation: tasks for the lm-eval harness, and the paper's experiments as commands.

Needs `pip install '.[eval]'`. `diffllama.evaluation.runs.run` is the Python equivalent of `diffllama probe`.
"""
