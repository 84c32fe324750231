"""transformers' Trainer trains the model like any other."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from support.tiny_models import GROUPED, VARIANTS, tiny_model, tokens


ROWS = [tokens(12, seed=i) for i in range(16)]
BY_LENGTH = (
    {"train_sampling_strategy": "group_by_length"}
    if "train_sampling_strategy" in inspect.signature(TrainingArguments).parameters
    else {"group_by_length": True}
)

FIELDS: dict[str, dict[str, Any]] = {"v1": GROUPED, "v2": {"gated_mlp": False}}
"""Variant -> what its model has."""

Make = Callable[..., Trainer]


@pytest.fixture(params=VARIANTS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make a Trainer of a tiny model; equal arguments give equal models."""

    def trainer(rows: list[torch.Tensor] = ROWS, padded: bool = False, layers: int = 2, **arguments: Any) -> Trainer:
        defaults = {
            "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1,
            "save_strategy": "no", "report_to": [], "use_cpu": True, "seed": 1, "lr_scheduler_type": "constant",
        }  # fmt: skip
        fields = FIELDS[request.param] | {"initializer_range": 0.05, "num_hidden_layers": layers}
        model = tiny_model(request.param, attn_implementation="sdpa", **fields)
        return Trainer(
            model,
            TrainingArguments(str(tmp_path), **(defaults | arguments)),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            data_collator=pad if padded else None,
        )

    return trainer


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate sequences of different lengths; padding has no label."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": ids.masked_fill(ids.eq(0), -100)}


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def test_training_lowers_the_loss_and_moves_every_weight(make: Make) -> None:
    trainer = make(max_steps=20)
    before = weights(trainer)
    trainer.train()
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]
    after = weights(trainer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_accumulated_gradients_are_those_of_the_larger_batch(make: Make) -> None:
    large, small = make(), make(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    for trainer in (large, small):
        trainer.train()
    assert losses(small) == pytest.approx(losses(large), rel=1e-5)


def test_checkpointed_gradients_are_the_same(make: Make) -> None:
    plain, checkpointed = make(), make(gradient_checkpointing=True)
    for trainer in (plain, checkpointed):
        trainer.train()
    assert losses(checkpointed) == pytest.approx(losses(plain), rel=1e-6)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(checkpointed)[name], tensor, rtol=0, atol=1e-5)


def test_mixed_precision_learns_with_weights_in_float32(make: Make) -> None:
    trainer = make(bf16=True, max_steps=20)
    trainer.train()
    assert {tensor.dtype for tensor in trainer.model.parameters()} == {torch.float32}
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]


def test_smoothed_labels_are_trained_on(make: Make) -> None:
    trainer = make(label_smoothing_factor=0.3, max_steps=1, per_device_train_batch_size=len(ROWS))
    with torch.no_grad():
        logits = trainer.model(torch.stack(ROWS)).logits[:, :-1].flatten(0, 1)
    labels = torch.stack(ROWS)[:, 1:].flatten()
    trainer.train()
    expected = functional.cross_entropy(logits, labels, label_smoothing=0.3)
    assert losses(trainer)[0] == pytest.approx(expected.item(), rel=1e-3)


def test_sequences_of_all_lengths_are_grouped_and_padded(make: Make) -> None:
    rows = [tokens(length, seed=length) for length in (2, 3, 5, 7, 11, 13, 17, 64)]
    trainer = make(rows=rows, padded=True, max_steps=8, **BY_LENGTH)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.slow
def test_compiled_model_computes_the_same_losses(make: Make) -> None:
    plain = make(layers=1, max_steps=2)
    compiled = make(layers=1, max_steps=2, torch_compile=True, torch_compile_backend="aot_eager")
    for trainer in (plain, compiled):
        trainer.train()
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
