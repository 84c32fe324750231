# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a conversion: plans it, streams the tensors, verifies the result and writes the model card."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from diffllama.checkpoints.errors import VerificationError
from diffllama.checkpoints.files import AUXILIARY_FILES, NAMES, check_space, locate
from diffllama.checkpoints.folders import check_apart, check_free, new_folder
from diffllama.checkpoints.json_files import write_json
from diffllama.checkpoints.models import common_dtype, expected_tensors, has_chat_template, resolve_tied_lm_head
from diffllama.checkpoints.options import DTYPES, shard_size
from diffllama.checkpoints.reading import check_tensors
from diffllama.checkpoints.versions import VERSION
from diffllama.checkpoints.writing import Progress, Step, write_shards
from diffllama.conversion import unilm
from diffllama.conversion.converters import find_converter
from diffllama.conversion.transformers_models import TransformersModel
from diffllama.conversion.unilm import UnilmModel
from diffllama.conversion.verification import Verification, measure, tolerance_for
from diffllama.conversion.weight_map import find_rules, plan
from diffllama.hub_cards.cards import CARD, ModelFacts, inherited_metadata, updated_card
from diffllama.hub_cards.code import code_licence
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


Outputs = Callable[[torch.dtype, str], list[torch.Tensor]]
"""Computes a model's outputs without and with a KV cache, given the dtype and the attention function."""


def convert(
    src: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    source: str | None = None,
    target: str | None = None,
    variant: str | None = None,
    gqa_layout: str | None = None,
    noise_heads: int | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    verify: bool | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> Path:
    """Convert a checkpoint into a diffllama folder (`source`), or a diffllama folder into another format (`target`).

    The folder appears at `dest` complete or not at all. It contains safetensors weights, the configuration, the
    source's tokenizer, chat template and generation settings, a model card, and conversion.json, which records the
    source, options and verification. A diffllama folder also contains the model's code.

    Args:
        src: a folder, a file, or a repository `owner/name` of the Hub; see `SOURCES` and docs/convert.md.
        dest: the folder to create. If it is a link to a folder, that folder is replaced.
        source: format of `src`, one of `SOURCES`.
        target: format of `dest`, one of `TARGETS`; `src` is then a diffllama folder. Give either `source` or `target`.
        variant: for source="llama": `"v2"` (default), which is bit-equal, or `"v1"`, a warm start for training.
        gqa_layout: for source="unilm-v1" with grouped queries: `"grouped"` (default), or `"repeated"` if it was trained
            with `multihead_diffattn.py`.
        noise_heads: for source="llama": number of noise heads, by default one for each signal head; fewer give a warm
            start for training.
        revision: branch, tag or commit of a repository of the Hub.
        dtype: dtype of the result, one of `DTYPES`. `"auto"` keeps each tensor's dtype (float32 for a GGUF file).
        verify: whether to compare the outputs of both models before the folder appears; by default if both fit into
            the free memory.
        overwrite: whether to replace an existing `dest`, if it is a model folder.
        max_shard_size: bytes, or a text like "5GB". Peak memory is one shard and one tensor.
        progress: called with the number of bytes written and their total.

    Returns:
        `dest`, absolute.

    Raises:
        FileNotFoundError: `src` or its weights do not exist.
        FileExistsError: `dest` may not be replaced (see `new_folder`), or it overlaps with `src`.
        ValueError: an option is unknown, or the source has a feature that the result lacks.
        CheckpointError: tensors are missing, unknown, misshapen, unreadable or not finite (all are listed), or a
            tensor becomes infinite in the result's dtype.
        VerificationError: the result differs from its source by more than the tolerance.
        OSError: the disk has too little free space (checked before anything is written), or writing fails.
        ImportError: `src` is a GGUF file and the packages of the extra `gguf` are not installed.
    """
    converter = find_converter(source, target, variant, gqa_layout, noise_heads)
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    shard_size(max_shard_size)
    src, dest = source_files(src, revision), Path(os.path.abspath(dest))
    check_apart(src, dest)
    check_free(dest, overwrite)

    opened = converter.source(src)
    config = converter.convert_config(opened.config)  # refuses unsupported features before any weight is read
    checkpoint = opened.checkpoint
    resolve_tied_lm_head(checkpoint, opened.config, config)
    ours = opened.config if target else config
    weight_map, expected = converter.weight_map(ours), opened.expected()
    for name in checkpoint.tensors.keys() - expected.keys():
        match = find_rules(name, weight_map)
        if match is not None and not match[0]:
            checkpoint.drop(name)
    check_tensors(checkpoint.tensors, expected, str(src))
    config.dtype = getattr(torch, dtype) if dtype != "auto" else config.dtype or common_dtype(checkpoint)
    cast = None if dtype == "auto" else config.dtype
    steps = plan(checkpoint.tensors, weight_map, ours, cast)
    for name, make in converter.new_weights(config).items():
        steps[name] = new_step(make, config.dtype)
    loadable = target in (None, "transformers")  # transformers can load the result
    part = isinstance(opened, UnilmModel) and opened.attention_only
    if loadable and not part:
        results = {name: step.result for name, step in steps.items()}
        check_tensors(results, expected_tensors(config), f"What {src} becomes")
    nbytes = sum(step.result.nbytes for step in steps.values())
    check_space(nbytes, dest)

    with new_folder(dest, overwrite) as folder:
        stem = "attention" if part else "model"
        fingerprint = write_shards(folder, steps, checkpoint, max_shard_size, stem, progress)
        opened.save_auxiliary_files(folder)
        converter.save_config(config, folder)
        if isinstance(opened, TransformersModel) and loadable:
            opened.pin_tokenizer_class(folder)
        result = partial(unilm.attention_outputs, folder, config) if part else converter.result(folder).outputs
        compared = "attention outputs" if part else "logits"
        source_outputs = partial(opened.outputs, rounded=cast)
        promised = tolerance_for(config.dtype, converter.bit_equal, converter.exact(ours))
        needed = 1.5 * nbytes * promised[0].itemsize / config.dtype.itemsize
        verification = verified(verify, promised, needed, source_outputs, result, compared)
        record = {
            "tool": f"diffllama {VERSION}",
            "source": {"format": source or DiffLlamaConfig.model_type, "model_type": opened.model_type}
            | origin(src)
            | {"index_sha256": checkpoint.index_sha256},
            "result": {
                "format": target or DiffLlamaConfig.model_type,
                "variant": ours.diff_variant,
                "fingerprint": fingerprint,
            },
            "options": {"variant": variant, "gqa_layout": gqa_layout, "noise_heads": noise_heads, "dtype": dtype},
            "verification": verification,
        }
        write_json(folder / "conversion.json", record)
        facts = ModelFacts(
            config=ours,
            parameters=sum(step.result.numel() for step in steps.values()),
            dtype=str(config.dtype).removeprefix("torch."),
            chat=has_chat_template(folder),
            part=part,
            conversion=record,
            code_licence=code_licence(folder),
        )
        card, _ = updated_card("", facts, dest.name, inherited_metadata(src / CARD))
        (folder / CARD).write_text(card, encoding="utf-8")
    return dest


def source_files(src: str | os.PathLike[str], revision: str | None) -> Path:
    """Return the path of a source. Downloads the weights in one format only. Raises as `locate`."""
    safe, pickled = (name.partition(".")[0] for name in NAMES)
    path = locate(src, revision, ["config.json", CARD, f"{safe}*.safetensors", f"{safe}*.index.json", *AUXILIARY_FILES])
    if path.is_dir() and not list(path.glob("*.safetensors")):
        path = locate(src, revision, [f"{pickled}*"])
    return path


def origin(src: Path) -> dict[str, str]:
    """Return the name of a source and, for a repository's snapshot, its revision. Local paths are left out."""
    match = re.search(r"models--([^/]+?)--([^/]+)/snapshots/([^/]+)$", src.as_posix())
    return {"name": f"{match[1]}/{match[2]}", "revision": match[3]} if match else {"name": src.name}


def new_step(make: Callable[[], torch.Tensor], dtype: torch.dtype) -> Step:
    """Return the step that creates a new tensor."""
    with torch.device("meta"):
        shape = make().shape
    return Step((), lambda: make().to(dtype), torch.empty(shape, dtype=dtype, device="meta"))


def verified(
    wanted: bool | None,
    promised: tuple[torch.dtype, float | None],
    needed: float,
    source: Outputs,
    result: Outputs,
    compared: str,
) -> dict[str, Any]:
    """Compare the outputs of result and source, and return the record for conversion.json.

    Args:
        wanted: as `convert`'s `verify`.
        promised: dtype of the computation and tolerance, see `tolerance_for`.
        needed: bytes of memory that the comparison needs.
        source, result: functions that compute their outputs.
        compared: name of the outputs, such as "logits".
    """
    if wanted is False:
        return {"skipped": "not asked for"}
    (dtype, tolerance), free = promised, psutil.virtual_memory().available
    if wanted is None and needed > free:
        return {"skipped": f"needs {needed / 1e9:.3g} GB of memory, {free / 1e9:.3g} GB are free"}

    def compare(implementation: str) -> Verification:  # with one model in memory at a time
        return measure(
            source(dtype, implementation), result(dtype, implementation), tolerance, compared, implementation
        )

    verification = compare("sdpa")
    if not verification.passed and math.isfinite(verification.max_difference):
        # For another number of heads torch may choose another kernel, with other bits, under sdpa but not under eager.
        # Equal bits under eager alone prove less, and the record says so.
        eager = compare("eager")
        if eager.passed:
            verification = replace(eager, sdpa_difference=verification.max_difference)
    if not verification.passed:
        raise VerificationError(
            f"The converted model's outputs differ from its source's: {verification}. Nothing was written."
        )
    return verification.as_dict()
