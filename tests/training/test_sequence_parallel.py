"""DeepSpeed's Ulysses: two processes train on halves of every sequence as one process does on whole sequences."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import Trainer, TrainingArguments

from support.accelerate_configs import NO_DEEPSPEED, environment, launch_arguments
from support.forked_processes import call_in_processes
from support.tiny_models import GROUPED, VARIANTS, tiny_model, tokens


pytestmark = pytest.mark.slow
pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "groups": GROUPED | {"num_attention_heads": 12, "num_noise_heads": 4}}
LENGTH = 16


def train(variant: str, kind: str, folder: str, **options: Any) -> None:
    """Train for a few steps, each on one sequence, and write the losses."""
    rows = [{"input_ids": row, "labels": row, "position_ids": torch.arange(LENGTH)} for row in tokens(16, LENGTH)]
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=1, learning_rate=1e-2, logging_steps=1, save_strategy="no",
        lr_scheduler_type="constant", report_to=[], seed=1, disable_tqdm=True, remove_unused_columns=False, **options,
    )  # fmt: skip
    model = tiny_model(variant, attn_implementation="sdpa", initializer_range=0.05, **KINDS[kind])
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "losses.json").write_text(json.dumps(losses))


def train_on_halves(variant: str, kind: str, folder: str) -> None:
    """Train in one of two processes, with DeepSpeed, which `use_cpu` would disable."""
    os.environ |= environment(launch_arguments("zero2_8gpus")) | {"ACCELERATE_MIXED_PRECISION": "no"}
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    halves = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallel = ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=halves)
    state = {"use_configured_state": True}
    train(variant, kind, folder, parallelism_config=parallel, accelerator_config=state, ddp_backend="gloo")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_those_of_one_process(variant: str, kind: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    call_in_processes(lambda: train(variant, kind, str(one), use_cpu=True), 1, tmp_path / "unused")
    call_in_processes(lambda: train_on_halves(variant, kind, str(two)), 2, tmp_path / "store")
    alone, halves = (json.loads((folder / "losses.json").read_text()) for folder in (one, two))
    assert len(alone) == 6
    assert halves == pytest.approx(alone, rel=1e-5)
