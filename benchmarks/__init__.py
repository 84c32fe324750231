# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: programs that compare our models with others in one run and print ratios."""
