# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""microsoft/unilm's modules (Diff-Transformer and Diff-Transformer-V2) <-> ours.

Their heads have our order. They rotate the pairs (2i, 2i + 1) of a vector, we rotate (i, i + w/2), so rows of queries
and keys are reordered. V1's output projection and head norm have other names. Under grouped queries, the plain module
`multihead_diffattn.py` repeats keys before it pairs them, so its heads read other keys than those of the Flash modules:
the result then has keys and a value for every head.
"""

import hashlib
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffllama.checkpoints.errors import CheckpointError, lines
from diffllama.checkpoints.files import NAMES
from diffllama.checkpoints.json_files import read_json, write_json
from diffllama.checkpoints.models import check_layers, check_sizes, copy_auxiliary_files, expected_tensors
from diffllama.checkpoints.options import Variant
from diffllama.checkpoints.reading import SUFFIXES, Checkpoint, StoredTensor, open_checkpoint
from diffllama.conversion import unilm_reference
from diffllama.conversion.llama import BODY
from diffllama.conversion.operations import half_from_interleaved, interleaved_from_half, repeat_keys, repeat_values
from diffllama.conversion.options import GqaLayout
from diffllama.conversion.transformers_diffllama import LAMBDAS, refuse
from diffllama.conversion.unilm_reference import under
from diffllama.conversion.verification import token_ids
from diffllama.conversion.weight_map import Operation, Rule, WeightMap, plan
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaAttention


_ATTENTION = "model.layers.{i}.self_attn."
_KEY, _VALUE, _OUTPUT, _NORM = (f"{_ATTENTION}{name}.weight" for name in ("k_proj", "v_proj", "o_proj", "head_norm"))
_OUT_PROJ, _SUBLN = f"{_ATTENTION}out_proj.weight", f"{_ATTENTION}subln.weight"


def _weight_map(variant: Variant, rotation: Operation, renamed: dict[str, str]) -> WeightMap:
    names = (*BODY, _VALUE, *(LAMBDAS if variant == "v1" else (_OUTPUT, f"{_ATTENTION}lambda_proj.weight")))
    return (
        {name: Rule(name) for name in names}
        | {f"{_ATTENTION}{name}_proj.weight": Rule(f"{_ATTENTION}{name}_proj.weight", (rotation,)) for name in "qk"}
        | {old: Rule(new) for old, new in renamed.items()}
    )


_V1 = _weight_map("v1", half_from_interleaved, {_OUT_PROJ: _OUTPUT, _SUBLN: _NORM})
_REPEATED: WeightMap = {_KEY: Rule(_KEY, (half_from_interleaved, repeat_keys)), _VALUE: Rule(_VALUE, (repeat_values,))}
FROM_UNILM: dict[tuple[str, str], WeightMap] = {
    ("v1", "grouped"): _V1,
    ("v1", "repeated"): {**_V1, **_REPEATED},
    ("v2", "grouped"): _weight_map("v2", half_from_interleaved, {}),
}
"""Variant and layout of grouped queries -> weight map."""
TO_UNILM: dict[str, WeightMap] = {
    "v1": _weight_map("v1", interleaved_from_half, {_OUTPUT: _OUT_PROJ, _NORM: _SUBLN}),
    "v2": _weight_map("v2", interleaved_from_half, {}),
}
"""Variant -> weight map."""

LACKING: dict[str, object] = {
    "lambda_init": "exponential",
    "head_norm": True,
    "head_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "use_qk_norm": False,
    "no_rope_layers": None,
    "sliding_window": None,
    "hidden_act": "silu",
    "gated_mlp": True,
}
"""Our fields -> the only value that unilm's modules support."""

NOT_FIELDS = ("model_type", "auto_map", "architectures", "transformers_version")
"""Fields of config.json that our configuration lacks."""


def attention_weights(variant: Variant) -> list[str]:
    """Return unilm's names of the weights of an attention module."""
    return list(under(FROM_UNILM[variant, "grouped"], _ATTENTION))


def canonical(name: str, variant: Variant, layer: int) -> str:
    """Return the name in a whole model of a tensor of one attention module.

    `q_proj.weight` is in the given layer; `3.q_proj.weight`, `layers.3.q_proj.weight` and
    `layers.3.self_attn.q_proj.weight` are in layer 3.
    """
    weights = "|".join(map(re.escape, attention_weights(variant)))
    match = re.fullmatch(rf"(?:(?:(?:model\.)?layers\.)?(\d+)\.(?:self_attn\.)?)?({weights})", name)
    return f"{_ATTENTION.format(i=match[1] or layer)}{match[2]}" if match else name


class UnilmModel:
    """Weights of unilm's modules: one or more state dicts of attention, or a whole model, see docs/layouts.md.

    Args:
        src: a file or a folder of files (.safetensors, .bin, .pt, .pth).
        variant: `"v1"` or `"v2"`.
        gqa_layout: which keys the heads of V1 read under grouped queries, `"grouped"` or `"repeated"`.

    Raises:
        FileNotFoundError: `src` does not exist.
    """

    def __init__(self, src: Path, variant: Variant, gqa_layout: GqaLayout = "grouped") -> None:
        if not src.exists():
            raise FileNotFoundError(f"{src} does not exist. Name a folder or a file of weights.")
        self.src, self.variant, self.gqa_layout = src, variant, gqa_layout

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The source's tensors, under the names of a whole model."""
        if self.src.is_file() or any((self.src / f"{n}{end}").is_file() for n in NAMES for end in ("", ".index.json")):
            parts = [open_checkpoint(self.src)]
        else:
            files = sorted(file for file in self.src.iterdir() if file.suffix in SUFFIXES)
            if not files:
                raise FileNotFoundError(f"{self.src} has no weight files ({', '.join(SUFFIXES)}).")
            layers = {int((re.findall(r"\d+", file.stem) or [-1])[-1]): file for file in files}
            first = min(layers)
            if len(files) > 1 and (first < 0 or sorted(layers) != list(range(first, first + len(files)))):
                problem = f"Files of {self.src} must end in the numbers of their layers, without gaps"
                raise CheckpointError(lines(problem, [file.name for file in files]))
            parts = [open_checkpoint(file) for _, file in sorted(layers.items())]
        homes: dict[str, StoredTensor] = {}
        for layer, part in enumerate(parts):
            for name, home in part.homes.items():
                if (name := canonical(name, self.variant, layer)) in homes:
                    raise CheckpointError(f"Two files in {self.src} have the tensor {name}.")
                homes[name] = home
        digests = "".join(part.index_sha256 for part in parts)
        return Checkpoint(homes, digests if len(parts) == 1 else hashlib.sha256(digests.encode()).hexdigest())

    @property
    def attention_only(self) -> bool:
        """Whether the source has only attention modules."""
        return "model.embed_tokens.weight" not in self.checkpoint.tensors

    @cached_property
    def config(self) -> DiffLlamaConfig:
        """The source's sizes and settings as a configuration of ours, with the source's key/value heads.

        Raises `CheckpointError` if sizes cannot be derived from tensors, and `ValueError` if config.json is missing,
        belongs to another model, or has a feature that unilm's modules lack.
        """
        file = self.src / "config.json"
        fields = read_json(file) if file.is_file() else {}
        if fields.get("model_type", self.model_type) != self.model_type:
            raise ValueError(
                f"{file} must have fields of DiffLlamaConfig, with `model_type` {self.model_type!r} or without it, got "
                f"{fields['model_type']!r}."
            )
        if not file.is_file() and not self.attention_only:
            raise ValueError(
                f"{file} does not exist. A whole model needs it for what weights do not determine: `rms_norm_eps`, "
                "`rope_parameters`, `max_position_embeddings`, `bos_token_id`, `eos_token_id`."
            )
        fields = {name: value for name, value in fields.items() if name not in NOT_FIELDS}
        fields = self.sizes() | {"diff_variant": self.variant} | fields
        check_sizes(fields, file if file.is_file() else self.src)
        config = DiffLlamaConfig(**fields)
        config._attn_implementation = "eager"  # the source's might be downloaded, and is not the result's
        refuse_for_unilm(config, self.variant)
        return config

    @property
    def model_type(self) -> str:
        """`model_type` in config.json."""
        return f"unilm-{self.variant}"

    def sizes(self) -> dict[str, Any]:
        """Infer fields of a configuration from the tensors' shapes."""
        tensors = self.checkpoint.tensors
        layers = [int(match[1]) for name in tensors if (match := re.match(r"model\.layers\.(\d+)\.", name))]
        first = f"model.layers.{min(layers, default=0)}."
        try:
            attention = under(tensors, f"{first}self_attn.")
            rows, hidden_size = attention["q_proj.weight"].shape
            if self.variant == "v1":
                width = 2 * attention["lambda_q1"].shape[0]
                heads = rows // width
            else:
                heads = attention["lambda_proj.weight"].shape[0]
                width = rows // (2 * heads)
            sizes = {
                "hidden_size": hidden_size,
                "num_attention_heads": 2 * heads,
                "num_key_value_heads": attention["k_proj.weight"].shape[0] // width,
                "head_dim": width,
                "num_hidden_layers": max(layers) + 1,
            }
            if not self.attention_only:
                sizes["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
                sizes["intermediate_size"] = tensors[f"{first}mlp.gate_proj.weight"].shape[0]
        except (LookupError, ValueError, ZeroDivisionError) as error:
            shapes = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()]
            problem = (
                f"{self.src} is not {self.model_type}: sizes cannot be derived without {error}. Attention has "
                f"{', '.join(attention_weights(self.variant))}. The file has only"
            )
            raise CheckpointError(lines(problem, shapes[:20] + ["…"] * (len(shapes) > 20))) from error
        return sizes | {"tie_word_embeddings": "lm_head.weight" not in tensors}

    def expected(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the source must have: those of our model, converted to unilm's layout."""
        check_layers(self.config.num_hidden_layers, len(self.checkpoint.tensors))
        ours = expected_tensors(self.config)
        names = {name: step.result for name, step in plan(ours, TO_UNILM[self.variant], self.config).items()}
        return {name: tensor for name, tensor in names.items() if not self.attention_only or ".self_attn." in name}

    def outputs(
        self, dtype: torch.dtype, implementation: str = "", rounded: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Compute unilm's formulas: logits, or every attention module's output for random inputs."""
        weights = {name: self.checkpoint.read(name).to(rounded or dtype).to(dtype) for name in self.checkpoint.tensors}
        return reference_outputs(weights, self.config, self.gqa_layout, self.attention_only)

    def save_auxiliary_files(self, folder: Path) -> None:
        """Save tokenizer and generation settings into a folder, if the source is a folder that has them."""
        copy_auxiliary_files(self.src, folder)


@torch.inference_mode()
def reference_outputs(
    weights: dict[str, torch.Tensor],
    config: DiffLlamaConfig,
    gqa_layout: GqaLayout = "grouped",
    attention_only: bool = False,
) -> list[torch.Tensor]:
    """Compute unilm's formulas with weights under unilm's names. They have no KV cache, which must not matter."""
    rotary = LlamaRotaryEmbedding(config.rotary_config())
    arguments: dict[str, Any] = {
        "inverse_frequencies": rotary.inv_freq,
        "attention_scaling": rotary.attention_scaling,
        "gqa_layout": gqa_layout,
    }
    if attention_only:
        x = attention_inputs(config).to(next(iter(weights.values())).dtype)
        outputs = [
            unilm_reference.attention(x, under(weights, _ATTENTION.format(i=i)), layer=i, **arguments)
            for i in range(config.num_hidden_layers)
        ]
        return 2 * [torch.cat(outputs)]
    ids = token_ids(config.vocab_size, config.max_position_embeddings)
    return 2 * [unilm_reference.logits(ids, weights, rms_norm_eps=config.rms_norm_eps, **arguments)]


@torch.inference_mode()
def attention_outputs(
    folder: Path, config: DiffLlamaConfig, dtype: torch.dtype, implementation: str
) -> list[torch.Tensor]:
    """Compute the outputs of our attention modules with the weights in a folder, for random inputs."""
    weights = {
        name: tensor for file in folder.glob("attention*.safetensors") for name, tensor in load_file(file).items()
    }
    x = attention_inputs(config).to(dtype)
    config = DiffLlamaConfig(**config.to_dict(), attn_implementation=implementation)
    cosines_and_sines = LlamaRotaryEmbedding(config.rotary_config())(x, torch.arange(x.shape[1])[None])
    future = torch.full((x.shape[1],) * 2, -torch.inf, dtype=dtype).triu(1)
    outputs = []
    for i in range(config.num_hidden_layers):
        module = DiffLlamaAttention(config, i).to(dtype).eval()
        module.load_state_dict(under(weights, _ATTENTION.format(i=i)))
        outputs.append(module(x, cosines_and_sines, future)[0])
    return 2 * [torch.cat(outputs)]


def attention_inputs(config: DiffLlamaConfig) -> torch.Tensor:
    """Return random inputs of attention modules, always the same: [3, 32, hidden_size]."""
    return torch.randn(3, 32, config.hidden_size, generator=torch.Generator().manual_seed(0))


def convert_config(source: DiffLlamaConfig, gqa_layout: GqaLayout) -> DiffLlamaConfig:
    """Return our configuration, with keys and values for every head if the plain module repeated keys."""
    if gqa_layout == "grouped":
        return source
    return DiffLlamaConfig(**{**source.to_dict(), "num_key_value_heads": source.num_attention_heads // 2})


def convert_config_back(config: DiffLlamaConfig, variant: Variant) -> DiffLlamaConfig:
    """Return unilm's form of a configuration. Raises `ValueError` for a feature that unilm's modules lack."""
    refuse_for_unilm(config, variant)
    return config


def refuse_for_unilm(config: DiffLlamaConfig, variant: Variant) -> None:
    """Raise `ValueError` for a feature that unilm's modules lack."""
    pairs = config.num_attention_heads // 2
    refuse(config, f"a model in unilm-{variant}'s layout", diff_variant=variant, num_noise_heads=pairs, **LACKING)


def new_weights(config: DiffLlamaConfig) -> dict[str, Callable[[], torch.Tensor]]:
    """Return ones as the weight of a head norm, which unilm's V1 must have and ours may lack."""
    if config.diff_variant == "v2" or config.head_norm_affine:
        return {}
    return {_SUBLN.format(i=i): lambda: torch.ones(2 * config.rotary_dim) for i in range(config.num_hidden_layers)}


def save_config(config: DiffLlamaConfig, folder: Path) -> None:
    """Write config.json of a whole model under unilm's names, with a `model_type` that transformers does not know."""
    fields = {name: value for name, value in config.to_dict().items() if name not in NOT_FIELDS}
    fields.pop("_name_or_path", None)  # a local path
    fields |= {"model_type": f"unilm-{config.diff_variant}", "head_norm_affine": True}  # see `new_weights`
    write_json(folder / "config.json", fields)
