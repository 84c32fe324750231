# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation: tasks for the lm-eval harness, and the paper's experiments as commands.

What is here needs `pip install '.[eval]'`. `diffllama.evaluation.runs.run` does from Python what `diffllama
probe` does from the command line.
"""
