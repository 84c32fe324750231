import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import SchedulerType, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from diffllama.hub_cards.training_record import training_record, training_rows
from support.tiny_models import tiny_model


class Hostile:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = call, arguments

    def __reduce__(self) -> Any:
        return self.call


def touch(path: str) -> None:
    Path(path).touch()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Trainer's output folder, with a checkpoint in it."""
    folder = tmp_path_factory.mktemp("trained")
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=3e-4,
        lr_scheduler_type="cosine", warmup_steps=1, weight_decay=0.1, logging_steps=1, save_steps=3, seed=7,
        report_to=[], use_cpu=True, eval_strategy="steps", eval_steps=3, hub_token="hf_" + "secret" * 5,
        include_num_input_tokens_seen="all",
    )  # fmt: skip
    ids = torch.arange(16).view(8, 2).repeat(1, 4)
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(tiny_model(), arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    trainer.save_model()
    return folder


def test_checkpoint_has_arguments_state_and_losses(trained: Path) -> None:
    record = training_record(trained / "checkpoint-3")
    assert record is not None
    arguments = {
        "learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "max_steps": 3,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 7, "bf16": False, "fp16": False,
    }  # fmt: skip
    assert record["arguments"].items() >= arguments.items()
    assert record["arguments"]["optim"].startswith("adamw")
    assert record["processes"] == 1
    assert record["state"].items() >= {"global_step": 3, "epoch": 1.5, "num_input_tokens_seen": 96}.items()
    log = json.loads((trained / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert record["losses"] == {"first": losses[0], "last": losses[-1], "evaluation": log[-1]["eval_loss"]}
    text = json.dumps(record)
    assert "secret" not in text
    assert str(trained) not in text
    rows = training_rows(record)
    assert rows["steps"] == "3"
    assert rows["sequences per step"] == "4 (2 per process × 2 accumulated × 1 processes)"
    assert rows["learning rate"] == "0.0003, cosine, warm-up 1"


def test_enumerations_are_read_from_pickles_of_every_python(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for pickled in (
        (SchedulerType, "reduce_lr_on_plateau"),
        (getattr, SchedulerType, "REDUCE_ON_PLATEAU"),  # Python 3.11.0 to 3.11.3
    ):
        arguments.lr_scheduler_type = Hostile(*pickled)
        arguments.optim = Hostile(getattr, OptimizerNames, "ADAMW_BNB")
        torch.save(arguments, tmp_path / "training_args.bin")
        record = training_record(tmp_path)
        assert record is not None
        assert record["arguments"]["lr_scheduler_type"] == "reduce_lr_on_plateau"
        assert record["arguments"]["optim"] == "adamw_bnb_8bit"


def test_weights_of_the_best_step_are_named(trained: Path, tmp_path: Path) -> None:
    output = shutil.copytree(trained / "checkpoint-3", tmp_path / "output")
    state = json.loads((output / "trainer_state.json").read_text())
    log = [{"step": 1, "eval_loss": 2.0}, {"step": 3, "eval_loss": 3.0}]
    (output / "trainer_state.json").write_text(json.dumps(state | {"best_global_step": 1, "log_history": log}))
    record = training_record(output)
    assert record is not None
    assert record["losses"] == {"evaluation": 3.0}, "unless the best was loaded, they are the last step's"
    arguments = torch.load(output / "training_args.bin", weights_only=False)
    arguments.load_best_model_at_end = True
    torch.save(arguments, output / "training_args.bin")
    record = training_record(output)
    assert record is not None
    assert record["losses"] == {"evaluation": 2.0}
    assert training_rows(record)["steps"] == "3; the weights are those of step 1"
    record = training_record(shutil.copytree(output, tmp_path / "checkpoint-3"))
    assert record is not None
    assert record["losses"] == {"evaluation": 3.0}, "a checkpoint has the weights of its own step"


def test_batch_is_of_all_processes_as_the_state_has_it() -> None:
    arguments = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    record = {"arguments": arguments | {"learning_rate": 1e-3, "warmup_ratio": 0.1}, "processes": 3}
    assert training_rows(record | {"state": {"train_batch_size": 4}}) == {
        "sequences per step": "24 (4 per process × 2 accumulated × 3 processes)",
        "learning rate": "0.001, warm-up 0.1",
    }


def test_betas_are_only_listed_for_adam() -> None:
    arguments = {"optim": "sgd", "adam_beta1": 0.9, "adam_beta2": 0.999}
    assert training_rows({"arguments": arguments}) == {"optimizer": "sgd"}


def test_older_record_is_read_unless_the_trainer_left_one(trained: Path, tmp_path: Path) -> None:
    assert training_record(tmp_path) is None
    (tmp_path / "training.json").write_text('{"state": {"global_step": 1}}')
    assert training_record(tmp_path) == {"state": {"global_step": 1}}
    shutil.copy(trained / "training_args.bin", tmp_path)
    record = training_record(tmp_path)
    assert record is not None
    assert set(record) == {"arguments", "processes"}
    assert training_rows({"state": {"global_step": 1}}) == {"steps": "1"}
    assert training_rows({}) == {}


@pytest.mark.parametrize("call", ["os.mkdir", "touch", "torch.hub"])
def test_hostile_pickle_runs_nothing(call: str, tmp_path: Path) -> None:
    target = str(tmp_path / "run")
    hostile = {
        "os.mkdir": Hostile(os.mkdir, target),
        "touch": Hostile(touch, target),
        "torch.hub": Hostile(torch.hub.download_url_to_file, "http://localhost", target),
    }[call]
    torch.save(hostile, tmp_path / "training_args.bin")
    with suppress(ValueError):  # or it is read as an object without attributes
        assert training_record(tmp_path) == {"arguments": {}}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("training_args.bin", b""),
        ("training_args.bin", b"PK\3\4 cut off"),
        ("training_args.bin", b"\x80\x02."),
        ("trainer_state.json", b"{"),
        ("trainer_state.json", b"[1]"),
    ],
)
def test_damaged_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} (cannot be read safely|is not valid JSON|must be a JSON object)"):
        training_record(tmp_path)
