# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Train V1's λ vectors in full together with a peft adapter.

peft trains and saves whole modules (`modules_to_save`), but these vectors are parameters of the attention module. It
loads all parameters of the model that an adapter's file names, so it is enough to write the vectors there.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from diffllama.modeling_diff.differential_attention import at_least_float32


if TYPE_CHECKING:  # else when it is needed
    from peft import PeftModel

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def train_lambdas(model: "PeftModel") -> "PeftModel":
    """Make the λ vectors, four [d] in every layer of a V1 model, trainable together with the model's adapter.

    Afterwards, `model.save_pretrained`, a Trainer's checkpoints and `push_to_hub` write them into the adapter's file,
    too. Loading does not need this function: peft and transformers load them with the adapter. To train a loaded
    adapter further, or to save it again, call this function after loading.

    The vectors belong to the model, not to the adapter: `disable_adapter()`, `unload()` and another active adapter do
    not reset them, all adapters of a model share them, and loading an adapter that has them replaces them. Vectors in
    half precision become float32, as adapters do, because small updates would be lost to rounding. Loading the adapter
    rounds them to the model's dtype again. A Trainer with `weight_decay` decays them.

    Args:
        model: a model returned by `get_peft_model` or `PeftModel.from_pretrained`. It is modified.

    Returns:
        `model`.

    Raises:
        `TypeError`: `model` is not a `PeftModel`.
        `ValueError`: the model has no λ vectors.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise TypeError(f"`model` must be a PeftModel (see `peft.get_peft_model`), got {type(model).__name__}.")
    vectors = _vectors(model.named_parameters())
    if not vectors:
        raise ValueError(
            f"`model` has no λ vectors ({', '.join(LAMBDAS)}), which need `diff_variant` 'v1', got "
            f"{getattr(model.config, 'diff_variant', None)!r}. To train the λ projection of 'v2', use "
            '`LoraConfig(modules_to_save=["lambda_proj"])`.'
        )
    for vector in vectors.values():
        vector.data = vector.data.to(at_least_float32(vector.dtype))
        vector.requires_grad_(True)
    model.save_pretrained = MethodType(_save_pretrained, model)
    return model


def _vectors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors if name.rpartition(".")[2] in LAMBDAS}


def _save_pretrained(self: "PeftModel", save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
    """Save a `PeftModel`, with the λ vectors in every adapter's file.

    Files in the folder are replaced when all are written, because a file without the vectors would load silently.
    """
    state_dict = kwargs.get("state_dict")  # given by a Trainer with sharded parameters
    tensors = self.named_parameters() if state_dict is None else state_dict.items()
    vectors = {name: tensor.detach().cpu().clone() for name, tensor in _vectors(tensors).items()}
    if not vectors:
        raise ValueError("`state_dict` has no λ vectors. Pass that of the whole model, or none.")
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        if (folder / "README.md").exists():  # peft updates it
            shutil.copy(folder / "README.md", temporary)
        type(self).save_pretrained(self, temporary, *args, **kwargs)
        files = [file for file in Path(temporary).rglob("*") if file.is_file()]
        for file in files:
            if file.name == "adapter_model.safetensors":
                save_file(load_file(file) | vectors, file, metadata={"format": "pt"})
            elif file.name == "adapter_model.bin":
                torch.save(torch.load(file, weights_only=True) | vectors, file)
        for file in files:
            target = folder / file.relative_to(temporary)
            target.parent.mkdir(exist_ok=True)
            os.replace(file, target)
