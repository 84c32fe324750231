# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""microsoft/unilm's modules (Diff-Transformer and Diff-Transformer-V2) <-> ours.

Their heads are in our order. They rotate the pairs (2i, 2i + 1) of a vector where we rotate (i, i + w/2): rows of
queries and keys change places. V1's output projection and head norm have other names. Under grouped queries, the plain
module `multihead_diffattn.py` repeats keys before it pairs them, so its heads read other keys than the Flash modules';
that is kept by giving every head keys and a value of its own.
"""

import hashlib
import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from diffllama.checkpoints.errors import CheckpointError, lines
from diffllama.checkpoints.files import NAMES
from diffllama.checkpoints.json_files import read_json
from diffllama.checkpoints.models import check_layers, check_sizes, copy_auxiliary_files, expected_tensors
from diffllama.checkpoints.options import Variant
from diffllama.checkpoints.reading import SUFFIXES, Checkpoint, TensorFile, open_checkpoint
from diffllama.conversion import unilm_reference
from diffllama.conversion.llama import BODY
from diffllama.conversion.operations import half_from_interleaved, interleaved_from_half, repeat_keys, repeat_values
from diffllama.conversion.options import GqaLayout
from diffllama.conversion.transformers_diffllama import LAMBDAS, refuse
from diffllama.conversion.transformers_models import TransformersResult
from diffllama.conversion.verification import Outputs, token_ids
from diffllama.conversion.weight_map import Rule, WeightMap, plan
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding


_ATTENTION = "model.layers.{i}.self_attn."
_QUERY, _KEY, _VALUE = (f"{_ATTENTION}{name}_proj.weight" for name in "qkv")
_OUTPUT, _NORM, _LAMBDA = (f"{_ATTENTION}{name}.weight" for name in ("o_proj", "head_norm", "lambda_proj"))
_COPIED: WeightMap = {name: Rule(name) for name in (*BODY, _VALUE)}
_V1: WeightMap = {**_COPIED, **{name: Rule(name) for name in LAMBDAS}}
_V2: WeightMap = {**_COPIED, **{name: Rule(name) for name in (_OUTPUT, _LAMBDA)}}
_OUT_PROJ, _SUBLN = f"{_ATTENTION}out_proj.weight", f"{_ATTENTION}subln.weight"

_FROM: WeightMap = {name: Rule(name, (half_from_interleaved,)) for name in (_QUERY, _KEY)}
_TO: WeightMap = {name: Rule(name, (interleaved_from_half,)) for name in (_QUERY, _KEY)}
FROM_UNILM: dict[tuple[str, str], WeightMap] = {
    ("v1", "grouped"): {**_V1, **_FROM, _OUT_PROJ: Rule(_OUTPUT), _SUBLN: Rule(_NORM)},
    ("v2", "grouped"): {**_V2, **_FROM},
}
"""Variant and layout of grouped queries -> weight map."""
FROM_UNILM["v1", "repeated"] = {
    **FROM_UNILM["v1", "grouped"],
    _KEY: Rule(_KEY, (half_from_interleaved, repeat_keys)),
    _VALUE: Rule(_VALUE, (repeat_values,)),
}
TO_UNILM: dict[str, WeightMap] = {
    "v1": {**_V1, **_TO, _OUTPUT: Rule(_OUT_PROJ), _NORM: Rule(_SUBLN)},
    "v2": {**_V2, **_TO},
}
"""Variant -> weight map."""

LACKING: dict[str, object] = {
    "lambda_init": "exponential",
    "head_norm": True,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "use_qk_norm": False,
    "no_rope_layers": None,
    "sliding_window": None,
    "hidden_act": "silu",
}
"""Fields of ours -> the only value that unilm's modules know."""


NOT_FIELDS = ("model_type", "auto_map", "architectures", "transformers_version")
"""What config.json has besides fields of ours."""


def canonical(name: str, variant: Variant, layer: int) -> str:
    """The name in a whole model of a tensor of one attention module: `q_proj.weight` is in the layer that is given,
    `3.q_proj.weight`, `layers.3.q_proj.weight` or `layers.3.self_attn.q_proj.weight` in layer 3."""
    weights = "|".join(map(re.escape, unilm_reference.ATTENTION_WEIGHTS[variant]))
    match = re.fullmatch(rf"(?:(?:(?:model\.)?layers\.)?(\d+)\.(?:self_attn\.)?)?({weights})", name)
    return f"{_ATTENTION.format(i=match[1] or layer)}{match[2]}" if match else name


class UnilmSource:
    """Weights of unilm's modules: one or many state dicts of attention, or a whole model.

    Args:
        src: a file or a folder of files (.safetensors, .bin, .pt, .pth). A whole model has Llama's names and unilm's in
            `self_attn`, and lies in a folder with a config.json, whose fields are ours; sizes may be left out.
            Attention modules are named `{layer}.`, `layers.{layer}.` or as in a whole model, or have a file each, in
            the order of the numbers in the files' names.
        variant: `"v1"` or `"v2"`.
        gqa_layout: which keys the heads of V1 read under grouped queries, `"grouped"` or `"repeated"`.

    Raises:
        FileNotFoundError: there is no such file or folder.
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
            files = [file for file in self.src.iterdir() if file.suffix in SUFFIXES]
            if not files:
                raise FileNotFoundError(f"{self.src} has no files of weights ({', '.join(SUFFIXES)}).")
            numbers = {file: [int(number) for number in re.findall(r"\d+", file.stem)] for file in files}
            files.sort(key=lambda file: (numbers[file], file.name))
            if len(files) > 1 and [numbers[file][-1:] for file in files] != [
                [numbers[files[0]][-1] + i] for i in range(len(files)) if numbers[files[0]]
            ]:
                raise CheckpointError(
                    lines(f"Files of {self.src} must end in the numbers of their layers, without gaps",
                          [file.name for file in files])
                )  # fmt: skip
            parts = [open_checkpoint(file) for file in files]
        homes: dict[str, tuple[TensorFile, str]] = {}
        for layer, part in enumerate(parts):
            for name, home in part.homes.items():
                if (name := canonical(name, self.variant, layer)) in homes:
                    raise CheckpointError(f"Two files of {self.src} have a tensor {name}.")
                homes[name] = home
        digests = "".join(part.index_sha256 for part in parts)
        return Checkpoint(homes, digests if len(parts) == 1 else hashlib.sha256(digests.encode()).hexdigest())

    @property
    def attention_only(self) -> bool:
        """Whether there is nothing but attention modules."""
        return "model.embed_tokens.weight" not in self.checkpoint.tensors

    @cached_property
    def config(self) -> DiffLlamaConfig:
        """The source's sizes and settings as a configuration of ours, with the source's key/value heads.

        Raises:
            CheckpointError: sizes cannot be told from the tensors.
            ValueError: config.json is missing or of another model, or has what unilm's modules lack.
        """
        fields: dict[str, Any] = {}
        file = self.src / "config.json"
        if file.is_file():
            fields = read_json(file)
            if fields.get("model_type", self.model_type) != self.model_type:
                raise ValueError(
                    f"{file} must hold fields of DiffLlamaConfig, and `model_type` {self.model_type!r} or none, got "
                    f"{fields['model_type']!r}."
                )
        elif not self.attention_only:
            raise ValueError(
                f"{file} does not exist. A whole model needs it for what weights do not tell: `rms_norm_eps`, "
                "`rope_parameters`, `max_position_embeddings`, `bos_token_id`, `eos_token_id`."
            )
        fields = {name: value for name, value in fields.items() if name not in NOT_FIELDS}
        fields = self.sizes() | {"diff_variant": self.variant} | fields
        check_sizes(fields, file if file.is_file() else self.src)
        config = DiffLlamaConfig(**fields)
        config._attn_implementation = "eager"  # its own might have to be fetched, and is not the result's
        refuse(config, f"a model in {self.model_type}'s layout", diff_variant=self.variant, **LACKING)
        return config

    @property
    def model_type(self) -> str:
        """What config.json calls such a model."""
        return f"unilm-{self.variant}"

    def sizes(self) -> dict[str, Any]:
        """The fields of a configuration that the tensors' shapes tell."""
        tensors = self.checkpoint.tensors
        layers = [int(match[1]) for name in tensors if (match := re.match(r"model\.layers\.(\d+)\.", name))]
        first = f"model.layers.{min(layers, default=0)}."
        try:
            shapes = {name: tensors[f"{first}self_attn.{name}_proj.weight"].shape for name in "qk"}
            if self.variant == "v1":
                width = 2 * tensors[f"{first}self_attn.lambda_q1"].shape[0]
                heads = shapes["q"][0] // width
            else:
                heads = tensors[f"{first}self_attn.lambda_proj.weight"].shape[0]
                width = shapes["q"][0] // (2 * heads)
            sizes = {
                "hidden_size": shapes["q"][1],
                "num_attention_heads": 2 * heads,
                "num_key_value_heads": shapes["k"][0] // width,
                "head_dim": width,
                "num_hidden_layers": max(layers) + 1,
            }
            if not self.attention_only:
                sizes["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
                sizes["intermediate_size"] = tensors[f"{first}mlp.gate_proj.weight"].shape[0]
        except (KeyError, IndexError, ZeroDivisionError) as error:
            shapes_found = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()]
            names = ", ".join(unilm_reference.ATTENTION_WEIGHTS[self.variant])
            raise CheckpointError(
                lines(f"{self.src} is not {self.model_type}: sizes cannot be derived without {error}. Attention has "
                      f"{names}. The file has only", shapes_found[:20] + ["…"] * (len(shapes_found) > 20))
            ) from error  # fmt: skip
        return sizes | {"tie_word_embeddings": "lm_head.weight" not in tensors}

    def expected(self) -> dict[str, torch.Tensor]:
        """Names and shapes that the tensors must have: what our model with these sizes becomes on the way out."""
        check_layers(self.config.num_hidden_layers, len(self.checkpoint.tensors))
        ours = expected_tensors(self.config)
        names = {name: step.result for name, step in plan(ours, TO_UNILM[self.variant], self.config).items()}
        return {name: tensor for name, tensor in names.items() if not self.attention_only or ".self_attn." in name}

    def outputs(self, dtype: torch.dtype, implementation: str = "", rounded: torch.dtype | None = None) -> Outputs:
        """What unilm's formulas give: logits, or every attention module's output for random inputs."""
        weights = {name: self.checkpoint.read(name).to(rounded or dtype).to(dtype) for name in self.checkpoint.tensors}
        return reference_outputs(weights, self.config, self.gqa_layout, self.attention_only)

    def save_auxiliary_files(self, folder: Path) -> None:
        """Puts tokenizer and settings for generation into a folder, if the source is a folder that has them."""
        copy_auxiliary_files(self.src, folder)

    def pin_tokenizer_class(self, folder: Path) -> None:
        """Nothing to compare with: unilm's folders say no model type from which transformers knows a tokenizer."""


def reference_outputs(
    weights: dict[str, torch.Tensor],
    config: DiffLlamaConfig,
    gqa_layout: GqaLayout = "grouped",
    attention_only: bool = False,
) -> Outputs:
    """What unilm's formulas give for weights under unilm's names. They know no cache, which must not matter."""
    assert config.num_key_value_heads is not None  # set when the configuration is made
    rotary = DiffLlamaRotaryEmbedding(config)
    arguments: dict[str, Any] = {
        "variant": config.diff_variant,
        "heads": config.num_attention_heads // 2,
        "key_value_heads": config.num_key_value_heads,
        "inverse_frequencies": rotary.inv_freq,
        "attention_scaling": rotary.attention_scaling,
        "gqa_layout": gqa_layout,
    }

    @torch.inference_mode()
    def outputs(cached: bool) -> torch.Tensor:
        if attention_only:
            x = attention_inputs(config).to(next(iter(weights.values())).dtype)
            modules = [(i, under(weights, f"model.layers.{i}.self_attn.")) for i in range(config.num_hidden_layers)]
            return torch.cat([unilm_reference.attention(x, module, layer=i, **arguments) for i, module in modules])
        ids = token_ids(config.vocab_size, config.max_position_embeddings)
        layers, eps = config.num_hidden_layers, config.rms_norm_eps
        return unilm_reference.logits(ids, weights, layers=layers, rms_norm_eps=eps, **arguments)

    return outputs


def attention_inputs(config: DiffLlamaConfig) -> torch.Tensor:
    """Random inputs of attention modules, always the same: [3, 32, hidden_size]."""
    return torch.randn(3, 32, config.hidden_size, generator=torch.Generator().manual_seed(0))


def under(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The weights whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def convert_config(source: DiffLlamaConfig, gqa_layout: GqaLayout) -> DiffLlamaConfig:
    """Our configuration: the same, with keys and values for every head if the plain module repeated keys."""
    if gqa_layout == "grouped":
        return source
    return DiffLlamaConfig(**{**source.to_dict(), "num_key_value_heads": source.num_attention_heads // 2})


def convert_config_back(config: DiffLlamaConfig, variant: Variant) -> DiffLlamaConfig:
    """The same configuration. Raises `ValueError` if it has what unilm's modules lack."""
    refuse(config, f"a model in unilm-{variant}'s layout", diff_variant=variant, **LACKING)
    return config


def new_weights(config: DiffLlamaConfig) -> dict[str, Callable[[], torch.Tensor]]:
    """The weights of a head norm that has none in ours and must have some in unilm's V1: ones."""
    if config.diff_variant == "v2" or config.head_norm_affine:
        return {}
    return {_SUBLN.format(i=i): lambda: torch.ones(2 * config.rotary_dim) for i in range(config.num_hidden_layers)}


class AttentionResult(TransformersResult):
    """A folder with our configuration and code, and the weights of attention modules alone, named as in a model."""

    stem = "attention"

    def outputs(self, config: DiffLlamaConfig, folder: Path, dtype: torch.dtype, implementation: str) -> Outputs:
        """What our attention modules give for random inputs."""
        weights = {
            name: tensor for file in folder.glob("attention*.safetensors") for name, tensor in load_file(file).items()
        }
        x = attention_inputs(config).to(dtype)
        config = DiffLlamaConfig(**config.to_dict(), attn_implementation=implementation)
        cosines_and_sines = DiffLlamaRotaryEmbedding(config)(x, torch.arange(x.shape[1])[None])
        future = torch.full((x.shape[1],) * 2, -torch.inf, dtype=dtype).triu(1)

        @torch.inference_mode()
        def outputs(cached: bool) -> torch.Tensor:
            results = []
            for i in range(config.num_hidden_layers):
                module = DiffLlamaAttention(config, i).to(dtype).eval()
                module.load_state_dict(under(weights, f"model.layers.{i}.self_attn."))
                results.append(module(x, cosines_and_sines, future)[0])
            return torch.cat(results)

        return outputs


class UnilmResult:
    """A whole model under unilm's names, and a config.json that transformers does not take for its own."""

    stem = "model"

    def save_config(self, config: DiffLlamaConfig, folder: Path) -> None:
        """Writes config.json."""
        fields = {name: value for name, value in config.to_dict().items() if name not in NOT_FIELDS}
        fields.pop("_name_or_path", None)  # a place on this machine
        fields |= {"model_type": f"unilm-{config.diff_variant}", "head_norm_affine": True}  # see `new_weights`
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    def outputs(self, config: DiffLlamaConfig, folder: Path, dtype: torch.dtype, implementation: str) -> Outputs:
        """What unilm's formulas give."""
        return UnilmSource(folder, config.diff_variant).outputs(dtype)
