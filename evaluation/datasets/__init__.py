# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The data of the probes and tasks: readers of the published files, and a small built-in sample of each."""
