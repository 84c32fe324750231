# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Training V1's vectors of λ in full beside an adapter.

peft trains and saves whole modules (`modules_to_save`), and these vectors are parameters of the attention itself. But
it loads whatever parameters of the model an adapter's file names, so it is enough to write them there.
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
    """Makes the vectors of λ, four [d] in every layer of a V1 model, trainable beside the model's adapter.

    From here on `model.save_pretrained` writes them into the adapter's file too, and so do a Trainer's checkpoints and
    `push_to_hub`. Loading needs nothing of this: peft and transformers set them with the adapter, wherever it is
    loaded. To train an adapter that was loaded, or to save it again, call this after loading, too.

    The vectors stay the model's own, not the adapter's: `disable_adapter()`, `unload()` and another active adapter
    leave them trained, adapters in one model share them, and loading an adapter that has some replaces them. Vectors
    in half precision become float32, as adapters do, or small steps would be rounded away; loading the adapter rounds
    them to the model's dtype again. A Trainer decays them if it has a `weight_decay`.

    Args:
        model: what `get_peft_model` or `PeftModel.from_pretrained` returned. It is changed.

    Returns:
        `model`.

    Raises:
        `TypeError`: `model` is no `PeftModel`.
        `ValueError`: it has no such vectors.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise TypeError(f"`model` is a {type(model).__name__}; `peft.get_peft_model(model, config)` makes a PeftModel.")
    vectors = _vectors(model.named_parameters())
    if not vectors:
        raise ValueError(
            f"`model` has no vectors of λ ({', '.join(LAMBDAS)}): its `diff_variant` is "
            f"{getattr(model.config, 'diff_variant', None)!r}, and 'v1' has them. The projection of λ in 'v2' is "
            'trained by `LoraConfig(modules_to_save=["lambda_proj"])`.'
        )
    for vector in vectors.values():
        vector.data = vector.data.to(at_least_float32(vector.dtype))
        vector.requires_grad_(True)
    model.save_pretrained = MethodType(_save_pretrained, model)
    return model


def _vectors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors if name.rpartition(".")[2] in LAMBDAS}


def _save_pretrained(self: "PeftModel", save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
    """`PeftModel.save_pretrained`, with the vectors of λ in every adapter's file.

    What is in the folder is replaced when everything is written: a file without the vectors would load without a word.
    """
    state_dict = kwargs.get("state_dict")  # a Trainer's, where the parameters are sharded
    tensors = self.named_parameters() if state_dict is None else state_dict.items()
    vectors = {name: tensor.detach().cpu().clone() for name, tensor in _vectors(tensors).items()}
    if not vectors:
        raise ValueError("`state_dict` has no vectors of λ; give that of the whole model, or none.")
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
