# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What options can be, here so that the command line need not import torch to know."""

from typing import Literal, get_args


Source = Literal["llama", "transformers", "unilm-v1", "unilm-v2"]
"""What can become ours: models of Llama's layout, transformers' own `diffllama`, microsoft/unilm's modules."""

Target = Literal["transformers", "unilm-v1", "unilm-v2"]
"""What ours can become: `transformers` and `unilm-v1` if it is V1, `unilm-v2` if it is V2."""

Variant = Literal["v1", "v2"]
Pairing = Literal["flash", "plain"]
DType = Literal["auto", "float32", "bfloat16", "float16"]

SOURCES, TARGETS, VARIANTS, PAIRINGS, DTYPES = map(get_args, (Source, Target, Variant, Pairing, DType))
