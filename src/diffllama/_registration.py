# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Registration with transformers' Auto classes, and with peft, no earlier than anyone needs it.

transformers takes seconds to import and the model's code more, while `import diffllama` should cost nothing. So the
configuration is registered as soon as transformers' `AutoConfig` or our own model package is imported, and the models
when the first configuration is made: no Auto class can look a model up before that. (Not when `AutoModel` is imported:
modules that the model needs import `AutoModel` half-way through themselves.) peft is told when it is imported.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Calls a function each time a module of `REGISTER` is executed. Asking for a module's spec changes nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's ordinary spec, whose loader calls the function when it has executed the module."""
        register = REGISTER.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if register else None
        if register is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # of this spec's loader alone
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


def register_target_modules() -> None:
    """Gives every method of peft the layers of a Llama as those that it adapts by default; ours have the same names."""
    from peft.utils import constants

    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig

    for name, mapping in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(mapping, dict) and "llama" in mapping:
            mapping.setdefault(DiffLlamaConfig.model_type, mapping["llama"])


REGISTER: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": register_config,
    "peft.utils.constants": register_target_modules,
}
"""Module -> what to call when it has been executed."""


def register_when_needed() -> None:
    """Registers with transformers and with peft: now with what is imported already, else right after it is."""
    sys.meta_path.insert(0, AfterImport())
    for name in REGISTER.keys() & sys.modules.keys():
        REGISTER[name]()
