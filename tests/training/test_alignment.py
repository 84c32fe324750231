"""trl's DPOTrainer and GRPOTrainer teach the model what is preferred."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from diffllama import DiffLlamaForCausalLM
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tiny_tokenizer


FIELDS: dict[str, dict[str, Any]] = {"v1": {}, "v2": EVERY_FEATURE}
LORA = {"full": None, "LoRA": LoraConfig(r=8, target_modules="all-linear")}
PROMPTS = [f"w{i} w{i + 1}" for i in range(10, 26)]
LIKED, DISLIKED = "w7", "w8"
TRAINING: dict[str, Any] = {
    "learning_rate": 1e-2, "logging_steps": 1, "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": [],
    "use_cpu": True, "bf16": False, "seed": 1, "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture(params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a model with its tokenizer."""
    tiny_model(request.param, initializer_range=0.1, **FIELDS[request.param]).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logprob(model: DiffLlamaForCausalLM, prompt: str, answer: str) -> float:
    """Compute the log-probability of an answer of one word and of the end after it."""
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([tokenizer(f"{prompt} {answer} </s>")["input_ids"]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, -3:-1]
    return logprobs.gather(1, ids[0, -2:, None]).sum().item()


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("precomputed", [False, True], ids=["", "precomputed"])
@pytest.mark.parametrize("how", LORA)
def test_dpo_begins_at_the_reference_and_learns_what_is_preferred(folder: Path, how: str, precomputed: bool) -> None:
    model = DiffLlamaForCausalLM.from_pretrained(folder)
    before = [[logprob(model, prompt, answer) for prompt in PROMPTS] for answer in (LIKED, DISLIKED)]
    options = {"max_steps": 8, "per_device_train_batch_size": len(PROMPTS), "precompute_ref_log_probs": precomputed}
    trainer = DPOTrainer(
        model,
        args=DPOConfig(str(folder.parent / "run"), **TRAINING | options),
        train_dataset=Dataset.from_dict(
            {"prompt": PROMPTS, "chosen": [f" {LIKED}"] * len(PROMPTS), "rejected": [f" {DISLIKED}"] * len(PROMPTS)}
        ),
        processing_class=tiny_tokenizer(),
        peft_config=LORA[how],
    )
    if precomputed:
        for column, expected in zip(("ref_chosen_logps", "ref_rejected_logps"), before, strict=True):
            assert list(trainer.train_dataset[column]) == pytest.approx(expected, abs=1e-4)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-5)
    for answer, expected in zip(("chosen", "rejected"), before, strict=True):
        assert logged(trainer, f"rewards/{answer}")[0] == pytest.approx(0, abs=1e-6)
        assert logged(trainer, f"logps/{answer}")[0] == pytest.approx(sum(expected) / len(expected), abs=1e-4)
    assert logged(trainer, "rewards/accuracies")[-1] == 1
    assert logged(trainer, "rewards/margins")[-1] > 0.3
    after = [[logprob(trainer.model, prompt, answer) for prompt in PROMPTS] for answer in (LIKED, DISLIKED)]
    for i in range(len(PROMPTS)):
        assert after[0][i] - before[0][i] > after[1][i] - before[1][i]


def share_of_liked(completions: list[str], **_: Any) -> list[float]:
    """Reward completions with the share of the word that is liked."""
    words = [completion.split() for completion in completions]
    return [sum(word == LIKED for word in said) / max(1, len(said)) for said in words]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "batching"), [("full", False), ("LoRA", False), ("full", True)], ids=["full", "LoRA", "continuous batching"]
)
def test_grpo_begins_at_the_reference_and_rewards_rise(folder: Path, how: str, batching: bool) -> None:
    options = {
        "max_steps": 24, "per_device_train_batch_size": 64, "num_generations": 16, "max_completion_length": 6,
        "beta": 0.01, "use_transformers_continuous_batching": batching,
        "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 256, "use_cuda_graph": False},
    }  # fmt: skip
    trainer = GRPOTrainer(
        str(folder),
        reward_funcs=share_of_liked,
        args=GRPOConfig(str(folder.parent / "run"), **TRAINING | options),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
        peft_config=LORA[how],
    )
    trainer.train()
    rewards = logged(trainer, "reward")
    assert logged(trainer, "kl")[0] == pytest.approx(0, abs=1e-6)
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-3:]) / 3 > 0.3
