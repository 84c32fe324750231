# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared handling of model files: reading and writing weights, folders, JSON, and versions."""
