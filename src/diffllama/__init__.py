# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""diffllama: differential attention (arXiv 2410.05258) as a Hugging Face model.

`import diffllama` registers the model with transformers' Auto classes. It imports neither torch nor transformers:
registration happens when the Auto classes are imported, or at once if they already are.
"""

import importlib
from typing import TYPE_CHECKING, Any

from diffllama._registration import register_when_imported
from diffllama.checkpoints.errors import DiffLlamaError


if TYPE_CHECKING:
    from diffllama.conversion.engine import convert
    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
    from diffllama.modeling_diff.modeling_diffllama import (
        DiffLlamaForCausalLM,
        DiffLlamaForQuestionAnswering,
        DiffLlamaForSequenceClassification,
        DiffLlamaForTokenClassification,
        DiffLlamaModel,
        DiffLlamaPreTrainedModel,
    )

__version__ = "0.1.0"

_MODELS = "diffllama.modeling_diff.modeling_diffllama"
_HOMES = {
    "DiffLlamaConfig": "diffllama.modeling_diff.configuration_diffllama",
    "convert": "diffllama.conversion.engine",
}
_FOLDERS = (
    "checkpoints",
    "configuration",
    "conversion",
    "evaluation",
    "hub_cards",
    "kernels",
    "modeling_diff",
    "training",
)


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"diffllama.{name}")
    if name in __all__:
        return getattr(importlib.import_module(_HOMES.get(name, _MODELS)), name)
    raise AttributeError(f"module 'diffllama' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_when_imported()

__all__ = [
    "DiffLlamaConfig",
    "DiffLlamaError",
    "DiffLlamaForCausalLM",
    "DiffLlamaForQuestionAnswering",
    "DiffLlamaForSequenceClassification",
    "DiffLlamaForTokenClassification",
    "DiffLlamaModel",
    "DiffLlamaPreTrainedModel",
    "__version__",
    "convert",
]
