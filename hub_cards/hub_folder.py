# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Complete Hub folders, made of any model of ours, and their cards."""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from diffllama.conversion import check_space, common_dtype, separate_head
from diffllama.conversion.checkpoints import Progress, open_checkpoint, write_shards
from diffllama.conversion.output_folder import check_apart, check_free, new_folder
from diffllama.conversion.transformers_models import TransformersSource, expected_tensors, has_chat_template
from diffllama.conversion.weight_map import Step, check_tensors, lines
from diffllama.hub_cards.cards import TASKS, Facts, updated_card
from diffllama.hub_cards.checks import FolderError, architecture_of, check
from diffllama.hub_cards.code import code_licence, write_code
from diffllama.hub_cards.evaluation import evaluation_rows
from diffllama.hub_cards.texts import is_absolute_path, read_json
from diffllama.hub_cards.training import training_record
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


def export(
    src: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    results: Iterable[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> Path:
    """Makes a complete Hub folder of a model of ours.

    The folder appears at `dest` complete, and free of what `check` finds wrong, or not at all. It has the weights as
    safetensors, the configuration with an `auto_map` for every Auto class, the code of this package, tokenizer, chat
    template and settings for generation, licences, and a card, which keeps what somebody wrote into that of `src`.

    Args:
        src: a folder that `save_pretrained`, a Trainer (also one of its checkpoints), a merged PEFT model or `convert`
            made.
        dest: the folder to make.
        metadata: for the card, see `write_card`.
        results: for the card, see `write_card`.
        overwrite: whether a `dest` that exists is replaced, if it is a model folder.
        max_shard_size: bytes, or a text like "5GB".
        progress: called with the number of bytes written and their total.

    Returns:
        `dest`, absolute.

    Raises:
        FileNotFoundError: `src`, its configuration or its weights do not exist.
        FileExistsError: `dest` may not be replaced (see `new_folder`), or it overlaps with `src`.
        ValueError: `src` is no model of ours, or one of its files cannot be read.
        CheckpointError: the weights are not those that the configuration asks for; all faults are listed.
        FolderError: the folder would have something wrong, see `check`; all of it is listed.
        OSError: the disk is too small.
    """
    src, dest = Path(os.path.abspath(src)), Path(os.path.abspath(dest))
    check_apart(src, dest)
    check_free(dest, overwrite)
    if (src / "adapter_config.json").is_file() and not (src / "config.json").is_file():
        raise ValueError(
            f"{src} has an adapter and no model. Load it with peft, call merge_and_unload() and save what that returns."
        )
    opened = TransformersSource(src, (DiffLlamaConfig.model_type,))
    config, checkpoint = opened.config, opened.checkpoint
    task = TASKS[architecture_of(config)]
    separate_head(checkpoint, config)
    check_tensors(checkpoint.tensors, expected_tensors(config), str(src))
    config.auto_map = dict(AUTO_MAP)  # of a model that was loaded from the Hub, it names the repository
    config.dtype = common_dtype(checkpoint)
    config.use_cache = True  # a Trainer turns it off, for itself
    steps = {name: Step((name,), lambda same: same, tensor, copied=True) for name, tensor in checkpoint.tensors.items()}
    check_space(sum(tensor.nbytes for tensor in checkpoint.tensors.values()), dest)
    training = training_record(src)
    with new_folder(dest, overwrite) as folder:
        write_shards(folder, steps, checkpoint, max_shard_size, progress=progress)
        opened.save_companions(folder)
        opened.settle_tokenizer(folder)
        for name in ("README.md", "conversion.json", "evaluation.json"):
            if (src / name).is_file():
                shutil.copyfile(src / name, folder / name)
        if training is not None:
            (folder / "training.json").write_text(json.dumps(training, indent=2) + "\n", encoding="utf-8")
        config.save_pretrained(folder)
        if task.pipeline_tag == "text-generation" and not (folder / "generation_config.json").exists():
            GenerationConfig.from_model_config(config).save_pretrained(folder)
        write_code(folder)
        forget_paths(folder / "tokenizer_config.json")
        write_card(folder, metadata=metadata, results=results, name=dest.name)
        if wrong := [str(finding) for finding in check(folder) if finding.wrong]:
            raise FolderError(lines(f"{src} cannot become a Hub folder", wrong))
    return dest


def forget_paths(file: Path) -> None:
    """Drops from a JSON file what transformers noted about places on this machine."""
    if file.is_file():
        settings = read_json(file)
        known = {name: value for name, value in settings.items() if not is_absolute_path(value)}
        if known != settings:
            file.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def folder_facts(folder: Path) -> Facts:
    """What a folder tells of its model.

    Raises:
        FileNotFoundError: it has no configuration or no weights.
        ValueError: it is no model of ours, or a file cannot be read.
    """
    config = TransformersSource(folder, (DiffLlamaConfig.model_type,)).config
    checkpoint = open_checkpoint(folder)
    records = {
        name: read_json(folder / f"{name}.json") if (folder / f"{name}.json").is_file() else None
        for name in ("conversion", "training", "evaluation")
    }
    return Facts(
        config=config,
        parameters=sum(tensor.numel() for tensor in checkpoint.tensors.values()),
        dtype=str(common_dtype(checkpoint)).removeprefix("torch."),
        architecture=architecture_of(config),
        chat=has_chat_template(folder),
        conversion=records["conversion"],
        training=records["training"],
        evaluation=(records["evaluation"] or {}).get("results", ()),
        code_licence=code_licence(folder),
    )


def write_card(
    folder: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    results: Iterable[str | os.PathLike[str]] = (),
    name: str | None = None,
) -> list[str]:
    """Writes or updates the card of a folder with a model of ours. What somebody wrote into it stays.

    Args:
        folder: the folder; its files say the rest.
        metadata: what only people know, for the card's metadata: `license`, `base_model`, `datasets`, `language`, …
        results: result files of lm-eval, or folders with them. Their numbers are kept in evaluation.json.
        name: what the card calls the model; the folder's name by default.

    Returns:
        The sections that were left as they are because somebody had edited them.

    Raises:
        FileNotFoundError: the folder has no configuration or no weights, or there are no results.
        ValueError: the folder is no model of ours, or a file cannot be read.
    """
    folder = Path(os.path.abspath(folder))
    evaluation = folder / "evaluation.json"
    rows = None
    if paths := [Path(path) for path in results]:
        before = read_json(evaluation).get("results", []) if evaluation.is_file() else []
        rows = evaluation_rows(paths, before)
    facts = folder_facts(folder)
    if rows is not None:
        facts = dataclasses.replace(facts, evaluation=rows)
    card = folder / "README.md"
    old = card.read_text(encoding="utf-8") if card.is_file() else ""
    text, edited = updated_card(old, facts, name or folder.name, metadata)
    if rows is not None:
        replace_file(evaluation, json.dumps({"results": rows}, indent=2) + "\n")
    replace_file(card, text)
    return edited


def replace_file(path: Path, text: str) -> None:
    """Writes a file that is complete or as it was."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", newline="\n", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, path.stat().st_mode if path.exists() else 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
