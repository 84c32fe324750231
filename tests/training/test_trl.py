"""trl's SFTTrainer trains the model on texts and conversations, packed or not."""

import os
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.nn import functional
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from diffllama import DiffLlamaForCausalLM
from diffllama.training.lambdas import train_lambdas
from support import subprocess_runner
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tiny_tokenizer, tokens


EOS = 2
LENGTHS = (3, 5, 8, 11, 4, 9, 14, 6)
ROWS = [[*tokens(length, seed=length, vocab_size=91).add(5).tolist(), EOS] for length in LENGTHS]
"""What the tokenizer makes of the texts: their words, and an end."""
TEXTS = {"text": [" ".join(f"w{i}" for i in row[:-1]) for row in ROWS]}
CHATS = [
    [{"role": "user", "content": "w7 w8 w9"}, {"role": "assistant", "content": f"w{i} w11"}] for i in range(12, 16)
]
CHAT_IDS = [[1, 4, 7, 8, 9, 5, i, 11] for i in range(12, 16)]
"""What the chat template makes of them: three words of the user's between 1, 4 and 5, then two of the assistant's."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} <|{{ message.role }}|> {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
"""The tokenizer's own, with what the assistant says between markers."""

FIELDS: dict[str, dict[str, Any]] = {"v1": EVERY_FEATURE, "v2": {"gated_mlp": False}}
"""Variant -> what its model has, where nothing else is said."""

Make = Callable[..., SFTTrainer]


@pytest.fixture(params=VARIANTS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make a Trainer of a tiny model in which every step reads all data."""

    def trainer(
        data: dict[str, list],
        model: Any = None,
        peft_config: LoraConfig | None = None,
        chat_template: str = "",
        **given: Any,
    ) -> SFTTrainer:
        defaults = {
            "max_steps": 8, "per_device_train_batch_size": 16, "learning_rate": 1e-2, "logging_steps": 1,
            "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "save_strategy": "no", "report_to": [],
            "use_cpu": True, "bf16": False, "seed": 1, "disable_tqdm": True,
        }  # fmt: skip
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = chat_template or tokenizer.chat_template
        return SFTTrainer(
            model
            or tiny_model(request.param, attn_implementation="sdpa", initializer_range=0.05, **FIELDS[request.param]),
            SFTConfig(str(tmp_path / "run"), **(defaults | given)),
            train_dataset=Dataset.from_dict(data),
            processing_class=tokenizer,
            peft_config=peft_config,
        )

    return trainer


def joined(rows: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(rows))


def alone(model: torch.nn.Module, rows: list[list[int]], counted: list[slice] | None = None) -> torch.Tensor:
    """Compute the mean cross-entropy of sequences, each in its own forward.

    Args:
        rows: token ids of the sequences.
        counted: whether each token has a label; by default all but the first.
    """
    losses = []
    for row, part in zip(rows, counted or [slice(1, None)] * len(rows), strict=True):
        ids = torch.tensor(row)
        logits = model(ids[None], use_cache=False).logits[0].roll(1, 0)  # a token's logits at its own index
        losses.append(functional.cross_entropy(logits[part], ids[part], reduction="none"))
    return torch.cat(losses).mean()


def gradient_norm(model: torch.nn.Module) -> float:
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.stack(norms).norm().item()


def assert_it_learns(trainer: SFTTrainer, rows: list[list[int]], counted: list[slice] | None = None) -> None:
    """Train. The first step's loss and gradient must be those of separate sequences, and later losses lower."""
    first = alone(trainer.model, rows, counted)
    if not hasattr(trainer, "_loss_shifts_labels"):  # older Trainers also count first tokens, which have no prediction
        labels = next(iter(trainer.get_train_dataloader()))["labels"]
        first = first * labels[:, 1:].ne(-100).sum() / labels.ne(-100).sum()
    first.backward()
    norm = gradient_norm(trainer.model)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log[0]["loss"] == pytest.approx(first.item(), rel=1e-5)
    assert log[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]


def test_texts_are_learnt(make: Make) -> None:
    assert_it_learns(make(TEXTS), ROWS)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_packed_texts_are_learnt_as_if_each_were_alone(make: Make, strategy: str) -> None:
    trainer = make(TEXTS, packing=True, packing_strategy=strategy, max_length=16)
    packed = trainer.train_dataset
    assert len(packed) < len(ROWS)
    sequences = [piece.tolist() for row in packed for piece in torch.tensor(row["input_ids"]).split(row["seq_lengths"])]
    assert sorted(sequences) == sorted(ROWS)
    assert_it_learns(trainer, ROWS)


def test_texts_without_padding_are_learnt_as_if_each_were_alone(make: Make) -> None:
    assert_it_learns(make(TEXTS, padding_free=True, max_length=None), ROWS)


def test_wrapped_texts_are_one_stream_of_which_no_token_is_lost(make: Make) -> None:
    trainer = make(TEXTS, packing=True, packing_strategy="wrapped", max_length=16)
    blocks = list(trainer.train_dataset["input_ids"])
    assert joined(blocks) == joined(ROWS)
    assert {len(block) for block in blocks[:-1]} == {16}
    assert_it_learns(trainer, blocks)


def test_conversations_are_learnt(make: Make) -> None:
    assert_it_learns(make({"messages": CHATS}), CHAT_IDS)


def test_only_what_the_assistant_says_is_learnt_where_the_template_marks_it(make: Make) -> None:
    trainer = make({"messages": CHATS}, assistant_only_loss=True, chat_template=TEMPLATE)
    assert_it_learns(trainer, CHAT_IDS, [slice(6, None)] * len(CHATS))


@pytest.mark.parametrize("packing", [False, True])
def test_only_completions_are_learnt(make: Make, packing: bool) -> None:
    chats = {"prompt": [chat[:1] for chat in CHATS], "completion": [chat[1:] for chat in CHATS]}
    assert_it_learns(make(chats, packing=packing, max_length=16), CHAT_IDS, [slice(6, None)] * len(CHATS))
    texts = {"prompt": ["w7 w8"] * 4, "completion": [f" w{i} w11 " for i in range(12, 16)]}
    rows = [[7, 8, i, 11, EOS] for i in range(12, 16)]
    assert_it_learns(make(texts, packing=packing, max_length=16), rows, [slice(2, None)] * len(rows))


def test_lora_is_learnt_without_named_layers_and_loads(make: Make, tmp_path: Path) -> None:
    trainer = make(TEXTS, peft_config=LoraConfig(), packing=True, max_length=16, learning_rate=0.1)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    assert_it_learns(trainer, ROWS)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert {name.split(".")[-4] for name in moved} == {"q_proj", "v_proj"}
    trainer.save_model(tmp_path / "adapter")
    variant = trainer.model.config.diff_variant
    base = tiny_model(variant, attn_implementation="sdpa", initializer_range=0.05, **FIELDS[variant])
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        expected = trainer.model.eval()(tokens(2, 9)).logits
        assert torch.equal(again.eval()(tokens(2, 9)).logits, expected)


def test_lora_and_lambda_are_learnt_on_a_model_in_4_bits(make: Make, tmp_path: Path) -> None:
    variant = make(TEXTS).model.config.diff_variant
    tiny_model(variant, initializer_range=0.05, intermediate_size=128).save_pretrained(tmp_path / "base")
    bits = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lambda_proj", "lm_head"])
    model = DiffLlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=bits)
    lora = LoraConfig(modules_to_save=["lambda_proj"])
    trainer = make(TEXTS, model, peft_config=lora, bf16=True, packing=True, max_length=16, learning_rate=0.1)
    if variant == "v1":  # has no such module
        train_lambdas(trainer.model)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert any("lambda_" in name for name in moved)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]


def test_model_is_loaded_from_its_folder_and_learns(make: Make, tmp_path: Path) -> None:
    model = make(TEXTS).model
    model.save_pretrained(tmp_path / "model")
    trainer = make(TEXTS, str(tmp_path / "model"))
    assert type(trainer.model) is DiffLlamaForCausalLM
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert_it_learns(trainer, ROWS)


REMOTE = """
import sys
sys.modules["diffllama"] = None  # from here on importing it fails
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

options = {"max_steps": 8, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False}
for model in sys.argv[1:]:
    trainer = SFTTrainer(
        model,
        SFTConfig("run", trust_remote_code=True, save_strategy="no", **options),
        train_dataset=Dataset.from_dict({"text": ["w7 w8 w9 w10"] * 8}),
    )
    assert type(trainer.model).__module__.startswith("transformers_modules."), type(trainer.model)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0], losses
"""


@pytest.mark.slow
def test_models_of_remote_code_are_loaded_from_their_folders_and_learn(tmp_path: Path) -> None:
    for variant in VARIANTS:
        tiny_model(variant, initializer_range=0.05).save_pretrained(tmp_path / variant)
        tiny_tokenizer().save_pretrained(tmp_path / variant)
    env = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess_runner.run(REMOTE, *VARIANTS, environment=env, cwd=tmp_path)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", [{}, EVERY_FEATURE], ids=["plain", "every feature"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_without_padding_has_logits_and_gradients_of_sequences_alone(
    variant: str, fields: dict[str, Any], implementation: str
) -> None:
    model = tiny_model(variant, torch.float64, implementation, **fields)
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([{"input_ids": row} for row in ROWS])
    assert "attention_mask" not in batch
    assert batch["input_ids"].shape == (1, sum(map(len, ROWS)))
    output = model(**batch, use_cache=False)  # as in both Trainers: a KV cache does not support packed sequences
    expected = torch.cat([model(torch.tensor([row]), use_cache=False).logits[0] for row in ROWS])
    torch.testing.assert_close(output.logits[0], expected, rtol=0, atol=1e-10)

    loss = functional.cross_entropy(output.logits[0, :-1], batch["labels"][0, 1:])  # the model's loss is float32
    torch.testing.assert_close(output.loss.double(), loss, rtol=1e-6, atol=0)
    names, parameters = zip(*model.named_parameters(), strict=True)
    packed = torch.autograd.grad(loss, parameters)
    separate = torch.autograd.grad(alone(model, ROWS), parameters)
    for name, one, other in zip(names, packed, separate, strict=True):
        assert other.abs().max() > 0, name
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10, msg=name)
