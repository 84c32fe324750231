# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks for the LM Evaluation Harness: their YAML files, items and metrics."""
