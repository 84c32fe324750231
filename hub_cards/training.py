# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What a Trainer's files say of a training, without running code from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from diffllama.checkpoints.json_files import read_json


ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
    "optim",
    "optim_args",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "bf16",
    "fp16",
    "label_smoothing_factor",
    "load_best_model_at_end",
    "seed",
)
"""Training arguments that say what was computed. The others are about the machine, its paths, logs and tokens."""

STATE = ("global_step", "epoch", "train_batch_size", "num_input_tokens_seen", "total_flos")
"""What the Trainer counted."""

MEMBERS = {
    "ADAMW_BNB": "adamw_bnb_8bit",
    "LION": "lion_32bit",
    "PAGED_ADAMW": "paged_adamw_32bit",
    "PAGED_ADEMAMIX": "paged_ademamix_32bit",
    "PAGED_LION": "paged_lion_32bit",
    "REDUCE_ON_PLATEAU": "reduce_lr_on_plateau",
    "RMSPROP_8BIT": "rmsprop_bnb_8bit",
    "RMSPROP_32BIT": "rmsprop_bnb_32bit",
}
"""Members of transformers' `SchedulerType` and `OptimizerNames` whose values are not their names in lower case.

Importing these enumerations would import peft, bitsandbytes and accelerate, which takes seconds.
"""


class Inert:
    """Stands for any class or function that a pickle names, and does nothing.

    What it is called with is what it gives: enumerations are pickled as a call with their value or, in Python 3.11.0 to
    3.11.3, as `getattr` of a class and a member's name. Otherwise it takes the attributes of what it stands for.
    """

    def __new__(cls, *args: Any) -> Any:
        """The only argument, the value of the member that two arguments name, or a new object."""
        if len(args) == 2 and args[0] is cls:
            return MEMBERS.get(args[1], args[1].lower())
        return args[0] if len(args) == 1 else super().__new__(cls)


def training_record(folder: Path) -> dict[str, Any] | None:
    """What is known of the training that a folder comes from, for training.json, or `None`.

    Args:
        folder: a checkpoint or an output folder of the Trainer (training_args.bin, trainer_state.json), or a folder
            that has a training.json already.

    Returns:
        `arguments`, `state`, and `processes` and `losses` (`first`, `last`, `evaluation`), as far as they are known.

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
        # A checkpoint has its own step's weights, an output folder may have those of the best step
        best = record.get("arguments", {}).get("load_best_model_at_end") and not folder.name.startswith("checkpoint-")
        record |= counts(read_json(folder / "trainer_state.json"), bool(best))
    if not record and (folder / "training.json").is_file():
        return read_json(folder / "training.json")
    return record or None


def counts(state: Mapping[str, Any], best: bool) -> dict[str, Any]:
    """`state` and `losses` from a trainer_state.json.

    Args:
        state: its content.
        best: whether the weights are not of the last step but of the best one.
    """
    kept = {name: state[name] for name in STATE if state.get(name)}
    log = [entry for entry in state.get("log_history") or () if isinstance(entry, dict)]
    losses, evaluations = (
        [(entry.get("step"), entry[name]) for entry in log if isinstance(entry.get(name), (int, float))]
        for name in ("loss", "eval_loss")
    )
    if best and state.get("best_global_step"):
        kept["best_global_step"] = state["best_global_step"]
        evaluations = [pair for pair in evaluations if pair[0] == state["best_global_step"]]
    known = {"first": losses[:1], "last": losses[-1:], "evaluation": evaluations[-1:]}
    return {"state": kept, "losses": {name: pairs[0][1] for name, pairs in known.items() if pairs}}


def read_arguments(path: Path) -> Any:
    """The object in a training_args.bin, with its attributes and as nothing but data: no class of it is made."""
    try:
        names = get_unsafe_globals_in_checkpoint(path)
        with safe_globals([(Inert, name) for name in names]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged and hostile pickles fail anywhere in torch
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is no record of training arguments that can be read safely: {reason}") from error
    if not isinstance(content, Inert):
        raise ValueError(f"{path} must hold training arguments, got {type(content).__name__}.")
    return content


def training_rows(record: Mapping[str, Any]) -> dict[str, str]:
    """A training's table for the card: what -> value."""
    arguments, state, losses = (record.get(name) or {} for name in ("arguments", "state", "losses"))
    rows: dict[str, Any] = {}
    if "global_step" in state:
        best = f"; the weights are those of step {state['best_global_step']:,}" if "best_global_step" in state else ""
        rows["steps"] = f"{state['global_step']:,}{best}"
    if "epoch" in state:
        rows["epochs"] = f"{state['epoch']:.4g}"
    device = state.get("train_batch_size", arguments.get("per_device_train_batch_size"))
    accumulation = arguments.get("gradient_accumulation_steps")
    if device is not None and accumulation is not None and "processes" in record:
        rows["sequences per step"] = (
            f"{device * accumulation * record['processes']:,} ({device} per process × {accumulation} accumulated × "
            f"{record['processes']} processes)"
        )
    if "num_input_tokens_seen" in state:
        rows["tokens seen"] = f"{state['num_input_tokens_seen']:,}"
    if "learning_rate" in arguments:
        schedule = f", {arguments['lr_scheduler_type']}" if "lr_scheduler_type" in arguments else ""
        warmup = arguments.get("warmup_steps") or arguments.get("warmup_ratio")
        rows["learning rate"] = f"{arguments['learning_rate']:g}{schedule}" + (
            f", warm-up {warmup:g}" if warmup else ""
        )
    if "optim" in arguments:
        rows["optimizer"] = arguments["optim"]
    if {"adam_beta1", "adam_beta2"} <= arguments.keys() and "adam" in arguments.get("optim", ""):
        rows["β1, β2"] = f"{arguments['adam_beta1']:g}, {arguments['adam_beta2']:g}"
    for name, label in (
        ("weight_decay", "weight decay"),
        ("max_grad_norm", "gradients clipped at norm"),
        ("label_smoothing_factor", "label smoothing"),
    ):
        if arguments.get(name):
            rows[label] = f"{arguments[name]:g}"
    if {"bf16", "fp16"} <= arguments.keys():
        rows["mixed precision"] = next((name for name in ("bf16", "fp16") if arguments[name]), "no")
    if "seed" in arguments:
        rows["seed"] = arguments["seed"]
    if "first" in losses:
        rows["training loss, first and last logged"] = f"{losses['first']:.4g}, {losses['last']:.4g}"
    if "evaluation" in losses:
        rows["evaluation loss"] = f"{losses['evaluation']:.4g}"
    return {what: str(value) for what, value in rows.items()}
