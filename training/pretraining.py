# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Pre-training with transformers' Trainer, configured by a YAML file."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from huggingface_hub.file_download import REGEX_COMMIT_HASH
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState

from diffllama.checkpoints.files import locked, replace_file
from diffllama.checkpoints.json_files import as_json, read_json
from diffllama.configuration import baseline, preset
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
from diffllama.training.nonfinite import StopOnNonFiniteCallback
from diffllama.training.packing import (
    IGNORED,
    LABELS,
    TOKENS,
    PackedStream,
    fingerprint,
    load_packed_dataset,
    resolve_revision,
)
from diffllama.training.settings import MODEL_SOURCES, SOURCE, check_fields, read_sections
from diffllama.training.stats import DifferentialStatsCallback


RECORD = "pretraining.json"
"""File in the output folder with digests of the settings that must not change when a training is resumed. For text in a
repository, it also has the branch or tag and the commit."""

SHARES = "number of processes or `training.dataloader_num_workers`"
"""In the record of a training on a stream: both, because each process, and each of its workers, has a place in it."""

REVISION, COMMIT = "data.revision", "data.commit"

OTHERS = ("checkpoint-*", "config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json", "*.bin")
"""Files that another model or training leaves in a folder."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read a file with `read_sections`, and also check the fields of `model` and `training`. Raises likewise."""
    settings = read_sections(path)
    fields = dict.fromkeys([*MODEL_SOURCES, *(field.name for field in dataclasses.fields(DiffLlamaConfig))])
    settings["model"] = check_fields(settings["model"], fields, f"{path}: `model`")
    types = {field.name: field.type for field in dataclasses.fields(TrainingArguments)}
    settings["training"] = training = check_fields(settings["training"], types, f"{path}: `training`")
    if settings["data"].get("streaming") and training.get("max_steps", 0) < 1:
        raise ValueError(f"{path}: `data.streaming` needs `training.max_steps`, because a stream has no length.")
    return settings


def accumulation(settings: Mapping[str, Any], processes: int) -> int:
    """Compute the gradient accumulation steps. Raises `ValueError` if a batch does not divide `tokens_per_step`."""
    batch = settings["training"].get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size)
    tokens = batch * settings["sequence_length"] * processes
    if tokens < 1 or settings["tokens_per_step"] % tokens:
        raise ValueError(
            f"`tokens_per_step` must be a multiple of {tokens:,} (`per_device_train_batch_size` {batch} × "
            f"`sequence_length` {settings['sequence_length']} × {processes} processes), got "
            f"{settings['tokens_per_step']:,}."
        )
    return settings["tokens_per_step"] // tokens


def training_arguments(settings: Mapping[str, Any], of_baseline: bool) -> TrainingArguments:
    """Make the Trainer's arguments.

    Raises `ValueError` for arguments that are computed here, for checkpoints from which a training cannot resume, for
    evaluation without text (or text without evaluation), and for several GPUs in one process.
    """
    given = dict(settings["training"])
    if "gradient_accumulation_steps" in given:
        raise ValueError("`training.gradient_accumulation_steps` is computed: set `tokens_per_step`.")
    if not isinstance(given.get("output_dir"), str):
        raise ValueError(f"`training.output_dir` must be a folder, got {given.get('output_dir')!r}.")
    given["output_dir"] = str(Path(given["output_dir"]))  # without a slash at the end
    if of_baseline:
        given |= {
            name: f"{given[name]}-baseline" for name in ("output_dir", "hub_model_id", "run_name") if name in given
        }
    processes = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1  # accelerate's rule
    arguments = TrainingArguments(**given, gradient_accumulation_steps=accumulation(settings, processes))
    if arguments.n_gpu > 1:
        raise ValueError(f"Each of {arguments.n_gpu} GPUs needs a process: accelerate launch -m diffllama pretrain …")
    for name, value in {
        "auto_find_batch_size": arguments.auto_find_batch_size,
        "accelerator_config.split_batches": arguments.accelerator_config.split_batches,
    }.items():
        if value:
            raise ValueError(f"`training.{name}` must be false: steps would have fewer tokens than `tokens_per_step`.")
    if arguments.save_only_model:
        raise ValueError("`training.save_only_model` must be false: a training cannot resume from such checkpoints.")
    if arguments.load_best_model_at_end and arguments.save_total_limit == 1:
        raise ValueError("`training.save_total_limit` must be at least 2 (best and last checkpoint), got 1.")
    if bool(settings["data"].get("evaluation_sequences")) != (arguments.eval_strategy != "no"):
        raise ValueError("Set both or neither of `data.evaluation_sequences` and `training.eval_strategy`.")
    return arguments


def build_model(
    fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, length: int, of_baseline: bool
) -> PreTrainedModel:
    """Build or load the model to train, in float32: a new one or a checkpoint, or the matched Transformer of either.

    `fields` is the section `model`, and `length` the sequence length in tokens.

    Raises `ValueError` if the fields conflict, `from` is not a differential model, the tokenizer has more tokens than
    the model's vocabulary, or sequences are longer than its context.
    """
    own = {name: value for name, value in fields.items() if name not in MODEL_SOURCES}
    if "preset" in fields and "from" in fields:
        raise ValueError("`model` must have at most one of `preset` and `from`, got both.")
    options = {"attn_implementation": fields.get("attn_implementation", "sdpa"), "dtype": torch.float32}
    if "from" in fields:
        if of_baseline and "baseline_from" not in fields:
            raise ValueError("`model.baseline_from` must name the baseline of `model.from`.")
        source = fields["baseline_from" if of_baseline else "from"]
        local = {"trust_remote_code": False}  # `import diffllama` registers the model
        config = AutoConfig.from_pretrained(source, **own, **local)
        if not of_baseline and config.model_type != DiffLlamaConfig.model_type:
            raise ValueError(
                f"`model.from` must be a differential model, got {source}, a {config.model_type}. Convert a Llama with "
                "`diffllama convert`."
            )
        model = AutoModelForCausalLM.from_pretrained(source, config=config, **options, **local)
    else:
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if "preset" in fields:
            config = preset(fields["preset"], **{**special, **own})
        else:
            config = DiffLlamaConfig(**{"vocab_size": len(tokenizer), **special, **own})
        model = AutoModelForCausalLM.from_config(baseline(config) if of_baseline else config, **options)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"`model.vocab_size` must be at least {len(tokenizer):,}, the size of {tokenizer.name_or_path}, got "
            f"{model.config.vocab_size:,}."
        )
    if length > model.config.max_position_embeddings:
        raise ValueError(
            f"`sequence_length` must be at most {model.config.max_position_embeddings}, the "
            f"`model.max_position_embeddings`, got {length}."
        )
    return model


CHECKPOINT_FILES = {
    "model.safetensors": ("model.safetensors*", "pytorch_model*", "adapter_model.*", "global_step*"),
    "optimizer.pt": ("optimizer.pt", "optimizer.bin", "optimizer_*", "global_step*"),
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}
"""File of a checkpoint -> its names: of one process, of FSDP (full, sharded), of DeepSpeed (`global_step*`)."""


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Make a batch of packed sequences [b, n], with their labels, by default for next-token prediction."""
    input_ids = torch.tensor([row[TOKENS] for row in rows])
    labels = torch.tensor([row.get(LABELS, row[TOKENS]) for row in rows])
    labels[:, 0] = IGNORED  # the first token is not predicted; older Trainers would count it
    return {"input_ids": input_ids, "labels": labels}


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint in a Trainer's output folder, for `resume_from_checkpoint`; `None` if none.

    The Trainer writes its state last, so a checkpoint without it is incomplete and is skipped.

    Raises:
        ValueError: the newest one lacks another file. A Trainer would silently resume with different weights.
    """
    complete = {}
    for state in Path(folder).glob("checkpoint-*/trainer_state.json"):
        try:
            complete[read_json(state)["global_step"]] = state.parent
        except (ValueError, KeyError, OSError):
            continue
    if not complete:
        return None
    newest = complete[max(complete)]
    for file, names in CHECKPOINT_FILES.items():
        if not any(next(newest.glob(name), None) for name in names):
            raise ValueError(
                f"{newest} has no {file}: resuming would give different weights. Restore the file, or remove this "
                "checkpoint to resume from the previous one."
            )
    return newest


def check_folder(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the folder has another model, or a training with other settings."""
    if not (folder / RECORD).is_file():
        for other in OTHERS:
            if file := next(folder.glob(other), None):
                raise ValueError(f"{file} belongs to another model or training. Set another `training.output_dir`.")
        return
    begun = read_json(folder / RECORD)
    for name, value in record.items():
        if begun.get(name) != value:
            raise ValueError(
                f"The training in {folder} has a different {name}. Restore it, or set another `training.output_dir`."
            )


def from_main_process(make: Callable[[], Any]) -> Any:
    """Call `make` on the main process and return the result on every process."""
    values = [make() if PartialState().is_main_process else None]
    broadcast_object_list(values)
    return values[0]


def resolve_source(source: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the text's commit: that with which the training in the folder began, else the newest of its branch."""
    begun = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    if COMMIT in begun and begun.get(REVISION) == source.get("revision"):
        return source | {"revision": begun[COMMIT]}
    return resolve_revision(source)


def make_record(settings: Mapping[str, Any], source: Mapping[str, Any], sequences: str) -> dict[str, Any]:
    """Make the record of settings that must not change when a training is resumed. The attention function may.

    `source` has the commit of a repository, and `sequences` is the fingerprint of the packed sequences.
    """
    unchanged = {
        "`model`": {name: value for name, value in settings["model"].items() if name != "attn_implementation"},
        "`tokens_per_step`": settings["tokens_per_step"],
        "`data.evaluation_sequences`": settings["data"].get("evaluation_sequences", 0),
        "`training.seed`": settings["training"].get("seed", TrainingArguments.seed),
        "text, tokenizer or `sequence_length`": sequences,
    }
    texts = {name: json.dumps(value, sort_keys=True) for name, value in unchanged.items()}
    record: dict[str, Any] = {name: sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
    if REGEX_COMMIT_HASH.fullmatch(source.get("revision") or ""):
        record |= {REVISION: settings["data"].get("revision"), COMMIT: source["revision"]}
    return record


class StreamCallback(TrainerCallback, ExportableState):
    """Saves each process's place in its share in a Trainer's trainer_state.json, and restores random states.

    `checkpoint` is the folder from which the Trainer resumes.
    """

    def __init__(self, trainer: "StreamTrainer", checkpoint: Path | None) -> None:
        self.trainer, self.checkpoint = trainer, checkpoint

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the random states. With `ignore_data_skip` the Trainer does so before its data loader draws."""
        if self.checkpoint:
            self.trainer._load_rng_state(str(self.checkpoint))
            self.checkpoint = None

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch, which a resumed Trainer counts from 0."""
        state.epoch = state.global_step / state.max_steps

    def state(self) -> dict[str, Any]:
        """Return the state that the Trainer saves."""
        return {"args": {}, "attributes": {"places": self.trainer.places}}


class StreamTrainer(Trainer):
    """A Trainer whose processes read their own shares of a stream, from `places` on, one for each process."""

    places: list[dict[str, Any]] | None = None

    def get_train_dataloader(self) -> StatefulDataLoader:
        """Load the batches of this process, in order."""
        workers = self.args.dataloader_num_workers
        self.loader = StatefulDataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
        )
        if self.places:
            self.loader.load_state_dict(self.places[self.args.process_index])
        return self.loader

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.places = gather_object([self.loader.state_dict()])  # that of a process after its last batch
        super()._save_checkpoint(*args, **kwargs)


def train(
    settings: Mapping[str, Any],
    arguments: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    source: dict[str, Any],
    record: Mapping[str, Any],
    of_baseline: bool,
    callbacks: Sequence[TrainerCallback],
) -> None:
    """Train, or resume, in a folder that no other run uses. `pretrain` makes the arguments from its file."""
    folder, length, data = Path(arguments.output_dir), settings["sequence_length"], settings["data"]
    held_out = data.get("evaluation_sequences", 0)
    checkpoint = last_checkpoint(folder)
    set_seed(arguments.seed)
    model = build_model(settings["model"], tokenizer, length, of_baseline)

    rows: Any
    evaluated: Any
    if streaming := bool(data.get("streaming")):
        share = {"processes": arguments.world_size, "workers": arguments.dataloader_num_workers, **source}
        rows = PackedStream(tokenizer, length, held_out, arguments.process_index, **share)
        evaluated = from_main_process(lambda: list(islice(PackedStream(tokenizer, length, **share), max(1, held_out))))
        probe = evaluated[0]
        arguments.ignore_data_skip = True  # the stream goes on at its place
    else:
        with arguments.main_process_first(desc="tokenizing"):
            sequences = load_packed_dataset(tokenizer, length, cache_dir=data.get("cache_dir"), **source)
        trained = len(sequences) - held_out
        if trained < 1:
            raise ValueError(
                f"`data.evaluation_sequences` must be less than the {len(sequences)} sequences of the text, got "
                f"{held_out}."
            )
        rows, probe = sequences.select(range(trained)), sequences[-1]
        evaluated = sequences.select(range(trained, len(sequences))) if held_out else None

    trainer = (StreamTrainer if streaming else Trainer)(
        model,
        arguments,
        data_collator=collate,
        train_dataset=rows,
        eval_dataset=evaluated if held_out else None,
        processing_class=tokenizer,
        callbacks=[StopOnNonFiniteCallback(), *callbacks],
    )
    if isinstance(trainer, StreamTrainer):
        if checkpoint:
            state = read_json(checkpoint / "trainer_state.json")["stateful_callbacks"]
            trainer.places = state[StreamCallback.__name__]["attributes"]["places"]
        trainer.add_callback(StreamCallback(trainer, checkpoint))
    if not of_baseline:  # a few hundred tokens suffice
        trainer.add_callback(DifferentialStatsCallback(trainer, torch.tensor([probe["input_ids"][:256]])))
    if arguments.should_save:
        replace_file(folder / RECORD, as_json(record))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model()
    trainer.save_state()


def pretrain(path: str | Path, of_baseline: bool = False, callbacks: Sequence[TrainerCallback] = ()) -> Path:
    """Train a language model on packed text, from scratch or from a checkpoint.

    Called again with the same file, it resumes from the last complete checkpoint. If kernels are deterministic (on the
    CPU; on GPUs with `full_determinism`), the weights are the same as without interruption. The last step of an epoch
    may have fewer tokens. Call it on every process of `torchrun` or `accelerate launch`.

    Args:
        path: a YAML file with the sections
            `recipe`: one of `diffllama.configuration.recipe_names()`; the other sections override its fields;
            `model`: for a new model, fields of `DiffLlamaConfig`, with or without a `preset`; to continue training,
            `from`, a folder or repository (and `baseline_from`, its baseline); also `attn_implementation`;
            `tokenizer`: its folder or repository;
            `data`: the arguments of `read_documents` (`column: input_ids` for rows that are tokenized already, see
            `load_packed_dataset`), `max_tokens`, `cache_dir`, and `evaluation_sequences`, the number
            of sequences at the end that are held out for evaluation. With `streaming: true`, a `dataset` is packed
            while it is read, see `PackedStream`, and the first sequences are held out. Such a training resumes with as
            many processes and `dataloader_num_workers` as it began;
            `sequence_length` and `tokens_per_step`, in tokens;
            `training`: fields of transformers' `TrainingArguments`.
        of_baseline: train the matched Transformer on the same tokens instead, in a folder with the suffix `-baseline`.
        callbacks: called by the Trainer, besides ours.

    Returns:
        The output folder, with the model, its tokenizer, `trainer_state.json` (losses and `differential_stats`) and
        checkpoints.

    Raises:
        ValueError: a field is invalid, the folder's training has other settings, or another run is writing into it.
        FloatingPointError: gradients were not finite. The message names the step, whose update was not applied.
    """
    settings = read_settings(Path(path))
    arguments = training_arguments(settings, of_baseline)
    folder = Path(arguments.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`training.output_dir` must be a folder, got the file {folder}.")
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"], trust_remote_code=False)
    fields = {name: settings["data"][name] for name in SOURCE if name in settings["data"]}
    source = from_main_process(lambda: resolve_source(fields, folder))
    stream = {"streaming": True} if settings["data"].get("streaming") else {}
    record = make_record(settings, source, fingerprint(tokenizer, settings["sequence_length"], **source, **stream))
    if stream:
        record[SHARES] = [arguments.world_size, arguments.dataloader_num_workers]
    check_folder(folder, record)
    with locked(folder, "set another `training.output_dir`") if arguments.should_save else nullcontext():
        train(settings, arguments, tokenizer, source, record, of_baseline, callbacks)
    return folder
