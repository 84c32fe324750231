# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Registration with transformers' Auto classes, no earlier than anyone needs it.

transformers takes seconds to import and the model's code more, while `import diffllama` should cost nothing. So the
configuration is registered as soon as transformers' `AutoConfig` or our own model package is imported, and the models
when the first configuration is made: no Auto class can look a model up before that. (Not when `AutoModel` is imported:
modules that the model needs import `AutoModel` half-way through themselves.)
"""

import functools
import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


AUTO_CONFIG = "transformers.models.auto.configuration_auto"


class _AfterAutoConfig(MetaPathFinder):
    """Imports our model package once, right after the module of transformers' `AutoConfig` has been imported."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                importlib.import_module("diffllama.modeling_diff")

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_config() -> None:
    """Registers `DiffLlamaConfig` with `AutoConfig`, and the models when one is made. Called by `modeling_diff`."""
    from transformers.models.auto.configuration_auto import AutoConfig

    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig

    AutoConfig.register(DiffLlamaConfig.model_type, DiffLlamaConfig, exist_ok=True)
    DiffLlamaConfig.register_for_auto_class()  # save_pretrained then writes the code beside config.json

    def register_models_and_make(cls: type, *args: Any, **kwargs: Any) -> Any:
        register_models()
        return object.__new__(cls)

    # Not `__init__`, which is not called when a configuration is unpickled
    setattr(DiffLlamaConfig, "__new__", register_models_and_make)  # noqa: B010 - mypy refuses the plain assignment


@functools.cache
def register_models() -> None:
    """Registers every model class with the Auto class that the configuration's `auto_map` names for it."""
    from transformers.models.auto import modeling_auto

    from diffllama.modeling_diff import modeling_diffllama
    from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig

    for auto_class, reference in AUTO_MAP.items():
        if auto_class != "AutoConfig":
            model_class = getattr(modeling_diffllama, reference.partition(".")[2])
            getattr(modeling_auto, auto_class).register(DiffLlamaConfig, model_class, exist_ok=True)
            model_class.register_for_auto_class(auto_class)


def register_when_needed() -> None:
    """Registers now if `AutoConfig` is imported already, else right after it is."""
    if AUTO_CONFIG in sys.modules:
        importlib.import_module("diffllama.modeling_diff")
    else:
        sys.meta_path.insert(0, _AfterAutoConfig())
