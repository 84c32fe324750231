# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Complete Hub folders, made of any model of ours, and their cards."""

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
    separate_head,
)
from diffllama.checkpoints.reading import Checkpoint, check_tensors, fingerprint, open_checkpoint
from diffllama.checkpoints.writing import Progress, Step, write_shards
from diffllama.hub_cards.cards import CARD, TASKS, Facts, read_card, settled_card, updated_card, written_by_hand
from diffllama.hub_cards.checks import check
from diffllama.hub_cards.code import code_licence, write_code
from diffllama.hub_cards.evaluation import evaluation_rows
from diffllama.hub_cards.findings import Finding, FolderError, check_arguments, errors
from diffllama.hub_cards.inspection import HIDDEN_CODE, architecture_of
from diffllama.hub_cards.texts import forget_places
from diffllama.hub_cards.training import training_record
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
        allow: see `check`.
        overwrite: whether a `dest` that exists is replaced, if it is a model folder.
        max_shard_size: bytes, or a text like "5GB".
        progress: called with the number of bytes written and their total.
        show: called with what is good to know about the folder, see `check`.

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
    check_arguments(src, allow)
    check_apart(src, dest)
    check_free(dest, overwrite)
    opened = TransformersSource(src, (DiffLlamaConfig.model_type,))
    config, checkpoint = opened.config, opened.checkpoint
    config.architectures = [architecture_of(config)]
    separate_head(checkpoint, config)
    check_tensors(checkpoint.tensors, expected_tensors(config), str(src))
    config.auto_map = dict(AUTO_MAP)  # of a model that was loaded from the Hub, it names the repository
    config.dtype = common_dtype(checkpoint)
    config.use_cache = True  # a Trainer turns it off, for itself
    tokenizer = opened.tokenizer
    records = known_records(src, results)
    old = read_card(src / CARD)
    if written_by_hand(read_card(dest / CARD)):  # it is to be overwritten
        otherwise = f"remove {dest / CARD}"
        old, inherited = settled_card(old, read_card(dest / CARD), str(src), str(dest), otherwise)
        metadata = inherited | dict(metadata or {})
    facts = facts_of(config, checkpoint, records, src)
    card, _ = updated_card(old, facts, dest.name, metadata, where=str(src / CARD))

    steps = {name: Step((name,), lambda same: same, tensor, copied=True) for name, tensor in checkpoint.tensors.items()}
    check_space(sum(tensor.nbytes for tensor in checkpoint.tensors.values()), dest)
    with new_folder(dest, overwrite) as folder:
        write_shards(folder, steps, checkpoint, max_shard_size, progress=progress)
        opened.save_companions(folder)
        if tokenizer is not None:
            opened.settle_tokenizer(folder)
        for name, record in records.items():
            write_json(folder / f"{name}.json", record)
        config.save_pretrained(folder)
        tidy(folder / "config.json", tuple(HIDDEN_CODE))
        tidy(folder / "tokenizer_config.json")
        generates = TASKS[facts.architecture].pipeline_tag == "text-generation"
        if generates and not (folder / GENERATION_CONFIG_NAME).exists():
            GenerationConfig.from_model_config(config).save_pretrained(folder)
        write_code(folder)
        (folder / CARD).write_text(card, encoding="utf-8", newline="\n")
        findings = check(folder, allow=allow)
        if wrong := errors(findings):
            raise FolderError(lines(f"{src} cannot become a Hub folder", wrong))
    if show is not None:
        show(findings)
    return dest


def tidy(file: Path, fields: Sequence[str] = ()) -> None:
    """Drops fields from a JSON file, and those that hold a path of this machine."""
    if file.is_file():
        content = read_json(file)
        known = {name: value for name, value in forget_places(content).items() if name not in fields}
        if known != content:
            write_json(file, known)


def known_records(folder: Path, results: Iterable[str | os.PathLike[str]] = ()) -> dict[str, Any]:
    """What is known of a model's conversion, training and evaluation, by the name of the JSON file for it.

    Raises:
        FileNotFoundError, ValueError: a file is not there or cannot be read.
    """
    records: dict[str, Any] = {"training": training_record(folder)}
    for name in ("conversion", "evaluation"):
        file = folder / f"{name}.json"
        records[name] = read_json(file) if file.is_file() else None
    if paths := [Path(path) for path in results]:
        before = (records["evaluation"] or {}).get("results", [])
        records["evaluation"] = {"results": evaluation_rows(paths, before)}
    return {name: record for name, record in records.items() if record is not None}


def facts_of(config: DiffLlamaConfig, checkpoint: Checkpoint, records: Mapping[str, Any], folder: Path) -> Facts:
    """What a card is to tell. A conversion counts as one only of these weights: they may have been trained since."""
    conversion = records.get("conversion")
    made = conversion and conversion.get("result", {}).get("fingerprint")
    return Facts(
        config=config,
        parameters=sum(tensor.numel() for tensor in checkpoint.tensors.values()),
        dtype=str(common_dtype(checkpoint)).removeprefix("torch."),
        architecture=architecture_of(config),
        chat=has_chat_template(folder),
        conversion=conversion,
        trained=made is not None and made != fingerprint(checkpoint),
        training=records.get("training"),
        evaluation=(records.get("evaluation") or {}).get("results", ()),
        code_licence=code_licence(folder),
    )


def folder_facts(folder: Path, results: Iterable[str | os.PathLike[str]] = ()) -> Facts:
    """What a folder tells of its model, and result files besides.

    Raises:
        FileNotFoundError: it has no configuration or no weights.
        ValueError: it is no model of ours, or a file cannot be read.
    """
    config = TransformersSource(folder, (DiffLlamaConfig.model_type,)).config
    return facts_of(config, open_checkpoint(folder), known_records(folder, results), folder)


def write_card(
    folder: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    results: Iterable[str | os.PathLike[str]] = (),
) -> list[str]:
    """Writes or updates the card of a folder with a model of ours. What somebody wrote into it stays.

    Args:
        folder: the folder; its files say the rest.
        metadata: what only people know, for the card's metadata: `license`, `base_model`, `datasets`, `language`, …
        results: result files of lm-eval, or folders with them. Their numbers are kept in evaluation.json.

    Returns:
        The sections that were left as they are because somebody had edited them.

    Raises:
        FileNotFoundError: the folder has no configuration or no weights, or there are no results.
        ValueError: the folder is no model of ours, or a file cannot be read.
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
