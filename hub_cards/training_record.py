# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of a training in the Trainer's files, read without running code from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from diffllama.checkpoints.json_files import read_json


ARGUMENTS = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *("bf16", "fp16", "label_smoothing_factor", "load_best_model_at_end", "seed"),
)
"""Training arguments that determine the result. The others concern the machine, paths, logs and tokens."""

STATE = ("global_step", "epoch", "train_batch_size", "num_input_tokens_seen", "total_flos")
"""Fields of trainer_state.json that are recorded."""


class UnpickledStub:
    """Replaces every class and function that a pickle names, and does nothing.

    A call with one argument returns that argument: enumerations are pickled as a call with their value. Python 3.11.0
    to 3.11.3 pickle them as `getattr` of the class and a member's name. An object keeps the attributes it was pickled
    with.
    """

    def __new__(cls, *args: Any) -> Any:
        """Return the only argument, the value of the member that two arguments name, or a new object."""
        if len(args) == 2 and args[0] is cls:
            return enum_value(args[1])
        return args[0] if len(args) == 1 else super().__new__(cls)


def enum_value(name: str) -> str:
    """Return the value of a member of the enumerations among `ARGUMENTS`."""
    from transformers.training_args import OptimizerNames, SchedulerType  # imports peft, which takes seconds

    return next((kind[name].value for kind in (OptimizerNames, SchedulerType) if name in kind.__members__), name)


def training_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a folder's training for training.json, `None` if there is none.

    Args:
        folder: a checkpoint or an output folder of the Trainer (training_args.bin, trainer_state.json), or a folder
            that has a training.json already.

    Returns:
        `arguments`, `state`, `processes` and `losses` (`first`, `last`, `evaluation`), as far as they are known.

    Raises:
        ValueError: a file cannot be read.
    """
    record: dict[str, Any] = {}
    if (folder / "training_args.bin").is_file():
        arguments = vars(read_arguments(folder / "training_args.bin"))
        record["arguments"] = {
            name: arguments[name]
            for name in ARGUMENTS
            if isinstance(arguments.get(name), (bool, int, float, str, dict)) and arguments[name] not in ("", {})
        }
        processes = getattr(arguments.get("distributed_state"), "num_processes", None)
        if isinstance(processes, int):
            record["processes"] = processes
    if (folder / "trainer_state.json").is_file():
        # A checkpoint has the weights of its step, an output folder may have those of the best step
        best = record.get("arguments", {}).get("load_best_model_at_end") and not folder.name.startswith("checkpoint-")
        record |= state_and_losses(read_json(folder / "trainer_state.json"), bool(best))
    if not record and (folder / "training.json").is_file():
        return read_json(folder / "training.json")
    return record or None


def state_and_losses(state: Mapping[str, Any], best: bool) -> dict[str, Any]:
    """Read `state` and `losses` from trainer_state.json, of the best step's weights or of the last step's."""
    recorded = {name: state[name] for name in STATE if state.get(name)}
    log = [entry for entry in state.get("log_history") or () if isinstance(entry, dict)]
    losses, evaluations = (
        [(entry.get("step"), entry[name]) for entry in log if isinstance(entry.get(name), (int, float))]
        for name in ("loss", "eval_loss")
    )
    if best and state.get("best_global_step"):
        recorded["best_global_step"] = state["best_global_step"]
        evaluations = [(step, loss) for step, loss in evaluations if step == state["best_global_step"]]
    selected = {"first": losses[:1], "last": losses[-1:], "evaluation": evaluations[-1:]}
    return {"state": recorded, "losses": {name: pairs[0][1] for name, pairs in selected.items() if pairs}}


def read_arguments(path: Path) -> UnpickledStub:
    """Read the object in training_args.bin and its attributes, without creating any class that it names."""
    try:
        names = get_unsafe_globals_in_checkpoint(path)
        with safe_globals([(UnpickledStub, name) for name in names]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises any class for a damaged or hostile pickle
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read safely as training arguments: {reason}") from error
    if not isinstance(content, UnpickledStub):
        raise ValueError(f"{path} must have training arguments, got {type(content).__name__}.")
    return content


def training_rows(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the table of a training for the card: label -> value."""
    arguments, state, losses = (record.get(name) or {} for name in ("arguments", "state", "losses"))

    def text(value: Any, spec: str = "", suffix: str = "") -> str:
        return "" if value is None else f"{value:{spec}}{suffix}"

    best = text(state.get("best_global_step"), ",")
    device = state.get("train_batch_size", arguments.get("per_device_train_batch_size"))
    accumulated, processes = arguments.get("gradient_accumulation_steps"), record.get("processes")
    batch = ""
    if device is not None and accumulated is not None and processes is not None:
        parts = f"{device} per process × {accumulated} accumulated × {processes} processes"
        batch = f"{device * accumulated * processes:,} ({parts})"
    schedule = f", {arguments['lr_scheduler_type']}" if "lr_scheduler_type" in arguments else ""
    warmup = arguments.get("warmup_steps") or arguments.get("warmup_ratio")
    schedule += f", warm-up {warmup:g}" if warmup else ""
    betas = {"adam_beta1", "adam_beta2"} <= arguments.keys() and "adam" in arguments.get("optim", "")
    mixed = next((name for name in ("bf16", "fp16") if arguments.get(name)), "no")
    first_last = f"{losses['first']:.4g}, {losses['last']:.4g}" if "first" in losses else ""
    rows = {
        "steps": text(state.get("global_step"), ",", f"; the weights are those of step {best}" if best else ""),
        "epochs": text(state.get("epoch"), ".4g"),
        "sequences per step": batch,
        "tokens seen": text(state.get("num_input_tokens_seen"), ","),
        "learning rate": text(arguments.get("learning_rate"), "g", schedule),
        "optimizer": text(arguments.get("optim")),
        "β1, β2": f"{arguments['adam_beta1']:g}, {arguments['adam_beta2']:g}" if betas else "",
        "weight decay": text(arguments.get("weight_decay") or None, "g"),
        "gradients clipped at norm": text(arguments.get("max_grad_norm") or None, "g"),
        "label smoothing": text(arguments.get("label_smoothing_factor") or None, "g"),
        "mixed precision": mixed if {"bf16", "fp16"} <= arguments.keys() else "",
        "seed": text(arguments.get("seed")),
        "training loss, first and last logged": first_last,
        "evaluation loss": text(losses.get("evaluation"), ".4g"),
    }
    return {label: value for label, value in rows.items() if value}
