# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The model. Hub repositories receive unchanged copies of the other files in this folder."""
