# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The model. The other files of this folder are, as they are, what a Hub repository receives."""
