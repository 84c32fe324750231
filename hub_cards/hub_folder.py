# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Complete Hub folders of diffllama models, and their cards."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from diffllama.checkpoints.errors import lines
from diffllama.checkpoints.files import check_space, replace_file
from diffllama.checkpoints.folders import check_apart, check_free, new_folder
from diffllama.checkpoints.json_files import as_json, read_json, write_json
from diffllama.checkpoints.models import (
    TransformersSource,
    common_dtype,
    expected_tensors,
    has_chat_template,
    resolve_tied_lm_head,
)
from diffllama.checkpoints.reading import Checkpoint, check_tensors, fingerprint, open_checkpoint
from diffllama.checkpoints.writing import Progress, Step, write_shards
from diffllama.hub_cards.cards import CARD, TASKS, ModelFacts, handwritten_text, merge_cards, read_card, updated_card
from diffllama.hub_cards.checks import check
from diffllama.hub_cards.code import code_licence, write_code
from diffllama.hub_cards.findings import Finding, FolderError, check_arguments, error_lines
from diffllama.hub_cards.folder_checks import CODE_FIELDS, architecture_of
from diffllama.hub_cards.lm_eval_results import evaluation_rows
from diffllama.hub_cards.sanitize import strip_local_paths
from diffllama.hub_cards.training_record import training_record
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


def export(
    src: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    results: Iterable[str | os.PathLike[str]] = (),
    allow: Sequence[str] = (),
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
    show: Callable[[list[Finding]], None] | None = None,
) -> Path:
    """Write a complete Hub folder of a diffllama model.

    The folder appears at `dest` complete and without errors of `check`, or not at all. It has the weights as
    safetensors, the configuration with an `auto_map` for every Auto class, this package's code, tokenizer, chat
    template and generation settings, licences, and a card, which keeps what people wrote into the card of `src`.

    Args:
        src: a folder written by `save_pretrained`, a Trainer (also a checkpoint), a merged PEFT model or `convert`.
        dest: the folder to write.
        metadata: for the card, see `write_card`.
        results: for the card, see `write_card`.
        allow: see `check`.
        overwrite: whether to replace an existing `dest`, if it is a model folder.
        max_shard_size: bytes, or a text like "5GB".
        progress: called with the number of bytes written and their total.
        show: called with the notes about the folder, see `check`.

    Returns:
        `dest`, absolute.

    Raises:
        FileNotFoundError: `src`, its configuration or its weights do not exist.
        FileExistsError: `dest` may not be replaced (see `new_folder`), or it overlaps with `src`.
        ValueError: `src` is not a diffllama model, or one of its files cannot be read.
        CheckpointError: the weights do not match the configuration; all faults are listed.
        FolderError: the folder would have errors, see `check`; all are listed.
        OSError: the disk is too small.
    """
    src, dest = Path(os.path.abspath(src)), Path(os.path.abspath(dest))
    check_arguments(src, allow)
    check_apart(src, dest)
    check_free(dest, overwrite)
    opened = TransformersSource(src, (DiffLlamaConfig.model_type,))
    config, checkpoint = opened.config, opened.checkpoint
    config.architectures = [architecture_of(config)]
    resolve_tied_lm_head(checkpoint, config)
    check_tensors(checkpoint.tensors, expected_tensors(config), str(src))
    config.auto_map = dict(AUTO_MAP)  # a model loaded from the Hub has that of its repository
    config.dtype = common_dtype(checkpoint)
    config.use_cache = True  # a Trainer turns it off for training
    tokenizer = opened.tokenizer
    records = read_records(src, results)
    old, replaced = read_card(src / CARD), read_card(dest / CARD)
    if handwritten_text(replaced):
        old, merged = merge_cards(old, replaced, str(src), str(dest), f"remove {dest / CARD}")
        metadata = merged | dict(metadata or {})
    facts = collect_facts(config, checkpoint, records, src)
    card, _ = updated_card(old, facts, dest.name, metadata, where=str(src / CARD))

    steps = {name: Step((name,), lambda same: same, tensor) for name, tensor in checkpoint.tensors.items()}
    check_space(sum(tensor.nbytes for tensor in checkpoint.tensors.values()), dest)
    with new_folder(dest, overwrite) as folder:
        write_shards(folder, steps, checkpoint, max_shard_size, progress=progress)
        opened.save_auxiliary_files(folder)
        if tokenizer is not None:
            opened.pin_tokenizer_class(folder)
        for name, record in records.items():
            write_json(folder / f"{name}.json", record)
        config.save_pretrained(folder)
        remove_fields(folder / "config.json", CODE_FIELDS)
        remove_fields(folder / "tokenizer_config.json")
        is_generative = TASKS[facts.architecture].pipeline_tag == "text-generation"
        if is_generative and not (folder / GENERATION_CONFIG_NAME).exists():
            GenerationConfig.from_model_config(config).save_pretrained(folder)
        write_code(folder)
        (folder / CARD).write_text(card, encoding="utf-8", newline="\n")
        findings = check(folder, allow=allow)
        if errors := error_lines(findings):
            raise FolderError(lines(f"{src} cannot be exported", errors))
    if show is not None:
        show(findings)
    return dest


def remove_fields(file: Path, fields: Iterable[str] = ()) -> None:
    """Remove fields, and all local paths, from a JSON file if it exists."""
    if file.is_file():
        content = read_json(file)
        kept = {name: value for name, value in strip_local_paths(content).items() if name not in fields}
        if kept != content:
            write_json(file, kept)


def read_records(folder: Path, results: Iterable[str | os.PathLike[str]] = ()) -> dict[str, Any]:
    """Return the records of a model's conversion, training and evaluation: stem of the JSON file -> record."""
    records: dict[str, Any] = {"training": training_record(folder)}
    for name in ("conversion", "evaluation"):
        file = folder / f"{name}.json"
        records[name] = read_json(file) if file.is_file() else None
    if paths := [Path(path) for path in results]:
        known = (records["evaluation"] or {}).get("results", [])
        records["evaluation"] = {"results": evaluation_rows(paths, known)}
    return {name: record for name, record in records.items() if record is not None}


def collect_facts(
    config: DiffLlamaConfig, checkpoint: Checkpoint, records: Mapping[str, Any], folder: Path
) -> ModelFacts:
    """Return the facts for a card."""
    conversion = records.get("conversion")
    converted = conversion and conversion.get("result", {}).get("fingerprint")
    return ModelFacts(
        config=config,
        parameters=sum(tensor.numel() for tensor in checkpoint.tensors.values()),
        dtype=str(common_dtype(checkpoint)).removeprefix("torch."),
        architecture=architecture_of(config),
        chat=has_chat_template(folder),
        conversion=conversion,
        trained=converted is not None and converted != fingerprint(checkpoint),
        training=records.get("training"),
        evaluation=(records.get("evaluation") or {}).get("results", ()),
        code_licence=code_licence(folder),
    )


def folder_facts(folder: Path, results: Iterable[str | os.PathLike[str]] = ()) -> ModelFacts:
    """Return the facts about a folder's model, including those in result files. Raises as `write_card`."""
    config = TransformersSource(folder, (DiffLlamaConfig.model_type,)).config
    return collect_facts(config, open_checkpoint(folder), read_records(folder, results), folder)


def write_card(
    folder: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    results: Iterable[str | os.PathLike[str]] = (),
) -> list[str]:
    """Write or updates the card of a folder with a diffllama model. What people wrote into it stays.

    Args:
        folder: the folder.
        metadata: card metadata that its files do not imply: `license`, `base_model`, `datasets`, `language`, …
        results: result files of lm-eval, or folders with them. Their numbers are stored in evaluation.json.

    Returns:
        The names of the sections that were kept because they had been edited.

    Raises:
        FileNotFoundError: the folder has no configuration or no weights, or there are no results.
        ValueError: the folder is not a diffllama model, or a file cannot be read.
    """
    check_arguments(folder)
    folder, results = Path(os.path.abspath(folder)), list(results)
    facts = folder_facts(folder, results)
    card = folder / CARD
    text, edited = updated_card(read_card(card), facts, folder.name, metadata, where=str(card))
    if results:
        replace_file(folder / "evaluation.json", as_json({"results": facts.evaluation}))
    replace_file(card, text)
    return edited
