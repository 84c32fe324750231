# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Pre-training, by transformers' Trainer, as a YAML file says."""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from diffllama.configuration import YamlLoader, baseline, preset, recipe
from diffllama.hub_cards.texts import read_json, write_json
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
from diffllama.training.nonfinite import StopOnNonFiniteCallback
from diffllama.training.packing import packed
from diffllama.training.stats import DifferentialStatsCallback


RECORD = "pretraining.json"
"""File in the output folder with what must not change when a training goes on."""

PROBE_TOKENS = 256
"""So many tokens of the text are measured on, how far the two maps are apart."""

SECTIONS = ("recipe", "model", "tokenizer", "data", "sequence_length", "tokens_per_step", "training")
MODEL_SOURCES = ("preset", "from", "baseline_from", "attn_implementation")
DATA = ("files", "dataset", "name", "split", "revision", "column", "max_tokens", "evaluation_sequences", "cache_dir")


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raises `ValueError` for the first of the names that is not known."""
    known = sorted(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            few = f" Known: {', '.join(known)}." if len(known) < 20 else ""
            raise ValueError(
                f"{where}: there is no field `{name}`" + (f"; did you mean `{close[0]}`?" if close else "." + few)
            )


def read_settings(path: Path) -> dict[str, Any]:
    """The sections of a pre-training configuration over those of the recipe that it names.

    Raises:
        ValueError: the file is no YAML, or a field is unknown, missing or of the wrong kind.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), YamlLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must have the sections {', '.join(SECTIONS)}, got {type(content).__name__}.")
    check_names(content, SECTIONS, str(path))
    settings = recipe(content.pop("recipe")) if "recipe" in content else {}
    for name, value in content.items():
        sections = ("model", "data", "training")
        if name in sections and not isinstance(value, dict):
            raise ValueError(f"{path}: `{name}` must be a section with fields, got {value!r}.")
        settings[name] = {**settings.get(name, {}), **value} if name in sections else value
    for name in SECTIONS[1:]:
        if name not in settings:
            raise ValueError(f"{path}: `{name}` is missing" + "; a `recipe` has one." * (name.endswith(("step", "th"))))
    numbers = {name: settings[name] for name in ("sequence_length", "tokens_per_step")}
    numbers |= {f"data.{name}": settings["data"].get(name, 2) for name in ("max_tokens", "evaluation_sequences")}
    numbers["training.per_device_train_batch_size"] = settings["training"].get("per_device_train_batch_size", 8)
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: `{name}` must be a whole number above 0, got {value!r}.")
    fields = {field.name for field in dataclasses.fields(DiffLlamaConfig)}
    check_names(settings["model"], fields.union(MODEL_SOURCES), f"{path}: `model`")
    check_names(settings["data"], DATA, f"{path}: `data`")
    check_names(settings["training"], {f.name for f in dataclasses.fields(TrainingArguments)}, f"{path}: `training`")
    return settings


def accumulation(settings: Mapping[str, Any], processes: int) -> int:
    """How many batches every process adds up, so that a step sees `tokens_per_step`.

    Raises:
        ValueError: they do not divide it.
    """
    batch = settings["training"].get("per_device_train_batch_size", 8)
    tokens = batch * settings["sequence_length"] * processes
    if settings["tokens_per_step"] % tokens:
        raise ValueError(
            f"`tokens_per_step` must be a multiple of {tokens:,} (`per_device_train_batch_size` {batch} × "
            f"`sequence_length` {settings['sequence_length']} × {processes} processes), got "
            f"{settings['tokens_per_step']:,}."
        )
    return settings["tokens_per_step"] // tokens


def training_arguments(settings: Mapping[str, Any], of_baseline: bool) -> TrainingArguments:
    """The Trainer's arguments.

    Raises:
        ValueError: something that is computed here is set, or several GPUs are at hand but one process.
    """
    given = dict(settings["training"])
    if "gradient_accumulation_steps" in given:
        raise ValueError("`training.gradient_accumulation_steps` is computed: set `tokens_per_step`.")
    if not isinstance(given.get("output_dir"), str):
        raise ValueError(f"`training.output_dir` must be a folder, got {given.get('output_dir')!r}.")
    given["output_dir"] += "-baseline" * of_baseline
    processes = int(os.environ.get("WORLD_SIZE", 1))
    arguments = TrainingArguments(**given, gradient_accumulation_steps=accumulation(settings, processes))
    if arguments.n_gpu > 1:
        raise ValueError(f"{arguments.n_gpu} GPUs need a process each: accelerate launch -m diffllama pretrain …")
    return arguments


def build_model(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, of_baseline: bool) -> PreTrainedModel:
    """The model to train, in float32: a new one, or one to go on with.

    Args:
        fields: of `DiffLlamaConfig`; with `preset`, those that differ from it, with `from`, from the model there.
        tokenizer: has the ids of special tokens, and by default says how many there are.
        of_baseline: make the matched Transformer, or load it from `baseline_from`.

    Raises:
        ValueError: the sources of the model contradict each other, or the tokenizer has more tokens than the model.
    """
    own = {name: value for name, value in fields.items() if name not in MODEL_SOURCES}
    if "preset" in fields and "from" in fields:
        raise ValueError("`model` can have `preset` or `from`, not both.")
    options = {"attn_implementation": fields.get("attn_implementation", "sdpa"), "dtype": torch.float32}
    if "from" in fields:
        if of_baseline and "baseline_from" not in fields:
            raise ValueError("`model.baseline_from` must name the Transformer to compare `model.from` with.")
        source = fields["baseline_from" if of_baseline else "from"]
        config = AutoConfig.from_pretrained(source, **own)
        model = AutoModelForCausalLM.from_pretrained(source, config=config, **options)
    else:
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if "preset" in fields:
            config = preset(fields["preset"], **{**special, **own})
        else:
            config = DiffLlamaConfig(**{"vocab_size": len(tokenizer), **special, **own})
        model = AutoModelForCausalLM.from_config(baseline(config) if of_baseline else config, **options)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"`model.vocab_size` must be at least {len(tokenizer):,}, the tokens of {tokenizer.name_or_path}, got "
            f"{model.config.vocab_size:,}."
        )
    return model


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch of packed sequences [b, n], each token to be predicted from those before it."""
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": input_ids, "labels": input_ids}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a Trainer's output folder, or `None`: what `resume_from_checkpoint` should be.

    The Trainer writes its state last: a checkpoint without it was broken off, and resuming from there would fail.
    """
    complete = {}
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        try:
            complete[read_json(state)["global_step"]] = state.parent
        except (ValueError, KeyError, OSError):
            continue
    return complete[max(complete)] if complete else None


def check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuses to write over another model, and to go on with what was begun with other text or another model.

    Raises:
        ValueError: with the file that is there, or the section that differs.
    """
    record = folder / RECORD
    if not record.is_file():
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
            if (folder / name).exists():
                raise ValueError(f"{folder} has another model's {name}: set another `training.output_dir`.")
        return
    begun = read_json(record)
    for name in SECTIONS[1:-1]:  # those in `training` may change
        if begun.get(name) != settings[name]:
            raise ValueError(
                f"{folder} was begun with `{name}` {begun.get(name)!r}, now it is {settings[name]!r}. Set another "
                "`training.output_dir`, or set it back."
            )


def pretrain(path: str | Path, of_baseline: bool = False) -> Path:
    """Trains a language model from scratch, or goes on with one, on packed text.

    Started again with the same file it goes on from the last complete checkpoint, and ends at the same weights as if
    it had not been interrupted. Every process of `torchrun` or `accelerate launch` calls it.

    Args:
        path: a YAML file with the sections
            `recipe`: one of `diffllama.configuration.recipe_names()`, whose sections the others then override;
            `model`: fields of `DiffLlamaConfig`, with a `preset` or alone for a new model; or `from`, a folder or
            repository to go on with (`baseline_from`: the Transformer beside it); and `attn_implementation`;
            `tokenizer`: its folder or repository;
            `data`: what `read_documents` takes, `max_tokens`, `cache_dir`, and `evaluation_sequences`, how many
            sequences at the end are not trained but evaluated on;
            `sequence_length` and `tokens_per_step`, in tokens;
            `training`: fields of transformers' `TrainingArguments`.
        of_baseline: train the matched Transformer on the same tokens, into the same folder's name with `-baseline`.

    Returns:
        The output folder, with the model, its tokenizer, `trainer_state.json` (losses, and how far the two maps are
        apart) and checkpoints.

    Raises:
        ValueError: a field is wrong, or the folder was begun with others.
        FloatingPointError: gradients were not finite; the step is told and its batch is not learned.
    """
    settings = read_settings(Path(path))
    arguments = training_arguments(settings, of_baseline)
    folder = Path(arguments.output_dir)
    check_folder(folder, settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    set_seed(arguments.seed)
    model = build_model(settings["model"], tokenizer, of_baseline)

    data = dict(settings["data"])
    held_out = data.pop("evaluation_sequences", 0)
    with arguments.main_process_first(desc="tokenising"):
        rows = packed(tokenizer, settings["sequence_length"], **data)
    if len(rows) <= held_out:
        raise ValueError(f"`data.evaluation_sequences` must leave some to train on: {held_out} of {len(rows)}.")

    trainer = Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=rows.select(range(len(rows) - held_out)),
        eval_dataset=rows.select(range(len(rows) - held_out, len(rows))) if held_out else None,
        processing_class=tokenizer,
        callbacks=[StopOnNonFiniteCallback()],
    )
    if not of_baseline:
        probe = torch.tensor(rows[-1]["input_ids"][:PROBE_TOKENS]).unsqueeze(0)
        trainer.add_callback(DifferentialStatsCallback(trainer, probe))
    if arguments.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{RECORD}.part", settings)
        os.replace(folder / f"{RECORD}.part", folder / RECORD)
    checkpoint = last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model()
    trainer.save_state()
    return folder
