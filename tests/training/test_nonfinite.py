"""A NaN stops training before it reaches the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diffllama.training import StopOnNonFiniteCallback
from support.tiny_models import tiny_model, tokens


POISON = 96  # a token with a NaN embedding
ROWS = tokens(16, 8, vocab_size=96)


def trainer(folder: Path, rows: torch.Tensor, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    """Return a Trainer that reads rows in order, two per step by accumulation; `POISON` gives NaN."""
    model = tiny_model("v2", attn_implementation="sdpa")
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    settings = {
        "max_steps": 6, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "logging_steps": 1,
        "learning_rate": 1e-3, "report_to": [], "use_cpu": True, "save_strategy": "no",
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    made = Trainer(
        model,
        TrainingArguments(str(folder), **(settings | arguments)),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=list(callbacks),
    )
    made._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    return made


def poisoned(row: int) -> torch.Tensor:
    rows = ROWS.clone()
    rows[row, 3] = POISON
    return rows


def good_weights(made: Trainer) -> dict[str, torch.Tensor]:
    """Return all weights, without the poison."""
    weights = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:POISON]
    return weights


@pytest.mark.parametrize("row", [4, 5])  # the first and the second batch of the third step
def test_nonfinite_gradient_is_reported_with_its_step_and_not_applied(row: int, tmp_path: Path) -> None:
    stopped = trainer(tmp_path, poisoned(row), StopOnNonFiniteCallback())
    with pytest.raises(FloatingPointError, match=r"^Step 3: .* the weights are those of step 2\."):
        stopped.train()
    until_then = trainer(tmp_path, ROWS, max_steps=2)
    until_then.train()
    expected = good_weights(until_then)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in good_weights(stopped).items())
    assert [entry["step"] for entry in stopped.state.log_history if "loss" in entry] == [1, 2]


def test_good_batches_are_learned_as_ever(tmp_path: Path) -> None:
    with_it, without = trainer(tmp_path, ROWS, StopOnNonFiniteCallback()), trainer(tmp_path, ROWS)
    for made in (with_it, without):
        made.train()
    expected = good_weights(without)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in good_weights(with_it).items())


def test_where_gradients_are_not_at_hand_what_is_logged_tells(tmp_path: Path) -> None:
    """DeepSpeed hides gradients."""

    class Hidden(StopOnNonFiniteCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            model = torch.nn.Linear(1, 1)  # without gradients
            super().on_pre_optimizer_step(*args, **(kwargs | {"model": model}))

    with pytest.raises(FloatingPointError, match=r"^Step 3: `loss` is nan"):
        trainer(tmp_path, poisoned(4), Hidden()).train()


@pytest.mark.parametrize(("field", "value", "off"), [("fp16", True, False), ("mixed_precision", "fp16", "no")])
def test_loss_scaler_may_overflow(field: str, value: Any, off: Any, tmp_path: Path) -> None:
    """fp16 needs a GPU. `accelerate launch` sets the second field."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    setattr(arguments, field, value)
    model = torch.nn.Linear(1, 1)
    model.weight.grad = torch.tensor([[torch.inf]])
    callback, state, control = StopOnNonFiniteCallback(), TrainerState(), TrainerControl()
    callback.on_pre_optimizer_step(arguments, state, control, model=model)
    callback.on_log(arguments, state, control, logs={"grad_norm": float("inf"), "loss": 1.0})
    setattr(arguments, field, off)
    with pytest.raises(FloatingPointError):
        callback.on_pre_optimizer_step(arguments, state, control, model=model)
