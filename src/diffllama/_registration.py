# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Registers the model with transformers' Auto classes, with peft and with Liger when these are imported.

transformers takes seconds to import and the model's code more, while `import diffllama` should take no time. So the
configuration is registered when transformers' `AutoConfig` is imported, and the models when the first configuration is
created: no Auto class looks up a model before that. Importing `AutoModel` cannot register them, because modules that
the model needs import `AutoModel` while they are only partly imported themselves.
"""

import functools
from types import ModuleType
from typing import Any

import wrapt


def register_when_imported() -> None:
    """Register with the modules that are imported already, and with the others right after their import."""
    wrapt.register_post_import_hook(register_config, "transformers.models.auto.configuration_auto")
    wrapt.register_post_import_hook(register_models_with_first, "diffllama.modeling_diff.configuration_diffllama")
    wrapt.register_post_import_hook(register_attention, "diffllama.modeling_diff.modeling_diffllama")
    wrapt.register_post_import_hook(register_target_modules, "peft.utils.constants")
    wrapt.register_post_import_hook(register_liger_kernels, "liger_kernel.transformers.monkey_patch")


def register_config(configuration_auto: ModuleType) -> None:
    """Register `DiffLlamaConfig` with `AutoConfig`."""
    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig

    configuration_auto.AutoConfig.register(DiffLlamaConfig.model_type, DiffLlamaConfig, exist_ok=True)
    DiffLlamaConfig.register_for_auto_class()  # save_pretrained then writes the code beside config.json


def register_models_with_first(configuration_diffllama: ModuleType) -> None:
    """Make the first `DiffLlamaConfig` register the models when it is created.

    This hook itself must import nothing: a thread that imports the configuration and one that imports `AutoConfig`
    would deadlock.
    """

    def register_models_and_make(cls: type, *args: Any, **kwargs: Any) -> Any:
        register_models()
        return object.__new__(cls)

    # `__new__`, because unpickling a configuration does not call `__init__`
    configuration_diffllama.DiffLlamaConfig.__new__ = register_models_and_make


@functools.cache
def register_models() -> None:
    """Register every model class with the Auto class that the configuration's `auto_map` names for it."""
    from transformers.models.auto import modeling_auto

    from diffllama.modeling_diff import modeling_diffllama
    from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig

    for auto_class, reference in AUTO_MAP.items():
        if auto_class != "AutoConfig":
            model_class = getattr(modeling_diffllama, reference.partition(".")[2])
            getattr(modeling_auto, auto_class).register(DiffLlamaConfig, model_class, exist_ok=True)
            model_class.register_for_auto_class(auto_class)


def register_attention(modeling_diffllama: ModuleType) -> None:
    """Register the attention function `diff_attention`, the default of V1."""
    from diffllama import attention  # noqa: F401 - importing it registers


def register_target_modules(constants: ModuleType) -> None:
    """Register Llama's default target modules with every peft method for this model, whose layers have those names."""
    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig

    for name, mapping in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(mapping, dict) and "llama" in mapping:
            mapping.setdefault(DiffLlamaConfig.model_type, mapping["llama"])


def register_liger_kernels(monkey_patch: ModuleType) -> None:
    """Register what `TrainingArguments(use_liger_kernel=True)` does to this model."""
    from diffllama import liger  # noqa: F401 - importing it registers
