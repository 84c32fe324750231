# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Registration with transformers' Auto classes, and with peft, no earlier than anyone needs it.

transformers takes seconds to import and the model's code more, while `import diffllama` should cost nothing. So the
configuration is registered as soon as transformers' `AutoConfig` or our own model package is imported, and the models
when the first configuration is made: no Auto class can look a model up before that. (Not when `AutoModel` is imported:
modules that the model needs import `AutoModel` half-way through themselves.) peft is told when it is imported.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


AUTO_CONFIG = "transformers.models.auto.configuration_auto"
PEFT_DEFAULTS = "peft.utils.constants"


class _After(MetaPathFinder):
    """Does something once, right after a module has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_more(module: ModuleType) -> None:
                execute(module)
                self.then(module)

            spec.loader.exec_module = execute_and_more  # type: ignore[method-assign]  # wraps this loader only
        return spec


def after(name: str, then: Callable[[ModuleType], object]) -> None:
    """Does something with a module: now if it is imported already, else right after it is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _After(name, then))


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


def register_target_modules(defaults: ModuleType) -> None:
    """Gives every method of peft the layers of a Llama as those that it adapts by default; ours have the same names."""
    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig

    for name, mapping in vars(defaults).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(mapping, dict) and "llama" in mapping:
            mapping.setdefault(DiffLlamaConfig.model_type, mapping["llama"])


def register_when_needed() -> None:
    """Registers with transformers when its `AutoConfig`, and with peft when its defaults are there."""
    after(AUTO_CONFIG, lambda module: importlib.import_module("diffllama.modeling_diff"))
    after(PEFT_DEFAULTS, register_target_modules)
