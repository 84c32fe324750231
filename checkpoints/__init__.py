# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of models, once for everybody: reading and writing weights, folders, JSON, versions."""
