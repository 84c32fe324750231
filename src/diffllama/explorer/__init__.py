# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`diffllama explore`: chat with a model and look at its attention maps, in a browser."""
