# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama and its exact conversion on a task that both fail at, and compares what they learn.

The task is that of `diffllama probe needles`: a text gives six cities magic numbers, and the question asks for two of
them. Three arms read the same prompts in the same order: the Llama with LoRA; its conversion to V2 with LoRA; and the
conversion with LoRA and, with a learning rate of their own, the second queries and the projection of λ in full.

Repeat the command to continue an interrupted run: finished models are not trained again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments

from diffllama.checkpoints.files import replace_file
from diffllama.checkpoints.json_files import as_json, read_json
from diffllama.checkpoints.versions import versions
from diffllama.conversion.engine import convert
from diffllama.evaluation.datasets.haystack import Haystack
from diffllama.evaluation.figures import COLOURS, finish, panels
from diffllama.evaluation.models import LoadedModel, model_spec
from diffllama.evaluation.probes.needles import Needles
from diffllama.evaluation.runs import run as run_probe
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaAttention, DiffLlamaForCausalLM
from diffllama.training import DifferentialStatsCallback

from .demo import FOLDER, save_llama, smollm2_gguf
from .study.__main__ import messages
from .study.report import LINES, picture
from .study.text import split_documents, write_documents
from .study.values import over_seeds


LLAMA = FOLDER.with_name("SmolLM2-135M-Instruct")

LORA, SECOND_QUERIES = "LoRA", "LoRA + second queries"

ARMS = {
    "Llama + LoRA": (LLAMA, LORA),
    "conversion + LoRA": (FOLDER, LORA),
    "conversion + LoRA + second queries": (FOLDER, SECOND_QUERIES),
}
"""Arm -> its model's folder, and what is trained."""


@dataclass(frozen=True)
class Settings:
    """The settings of all arms.

    Args:
        length: of a prompt in tokens.
        needles: numbers in a prompt.
        queries: numbers that are asked for.
        steps: optimizer steps of a training.
        batch: prompts per step.
        rank: of LoRA's matrices.
        learning_rate: of LoRA.
        second_learning_rate: of the second queries and of the projection of λ.
        held_out: prompts whose loss is measured before, four times during, and after a training.
        samples: prompts at each of five depths on which a trained model is tested.
    """

    length: int = 1024
    needles: int = 6
    queries: int = 2
    steps: int = 40
    batch: int = 4
    rank: int = 16
    learning_rate: float = 1e-3
    second_learning_rate: float = 2e-3
    held_out: int = 16
    samples: int = 8


def prepare() -> None:
    """Create the demo's two folders, the Llama and its conversion, unless they exist."""
    if not (FOLDER / "model.safetensors").exists():
        convert(smollm2_gguf(), FOLDER, source="llama")
    if not (LLAMA / "model.safetensors").exists():
        save_llama(LLAMA)


Row = dict[str, list[int]]
"""`prompt` and `answer` as token ids."""


def rows(loaded: LoadedModel, texts: Sequence[str], settings: Settings, count: int, seed: str) -> list[Row]:
    """Make `count` prompts with their answers, each of one of the texts and with the first needle at any depth."""
    haystacks, random, made = [Haystack([text], loaded, settings.length) for text in texts], Random(seed), []
    for number in range(count):
        prompt = random.choice(haystacks).prompt(
            length=settings.length,
            depth=random.random(),
            needles=settings.needles,
            queries=settings.queries,
            seed=f"{seed} {number}",
        )
        answer = f" {', '.join(prompt.numbers[:-1])} and {prompt.numbers[-1]}.\n"
        made.append({"prompt": loaded.prefix + loaded.encode(prompt.text), "answer": loaded.encode(answer)})
    return made


def collate(batch: list[Row]) -> dict[str, Any]:
    """Make the inputs of one row. Only its answer gets logits, and counts in the loss."""
    (row,) = batch
    kept = len(row["answer"]) + 1  # the token before the answer predicts its first
    return {
        "input_ids": torch.tensor([row["prompt"] + row["answer"]]),
        "labels": torch.tensor([[-100] + row["answer"]]),
        "logits_to_keep": kept,
    }


def second_queries(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Make the query projections trainable, in the rows of noise heads alone, and return them."""
    parameters = []
    for layer in model.modules():
        if isinstance(layer, DiffLlamaAttention):
            weight = layer.q_proj.base_layer.weight
            weight.requires_grad_(True)
            heads = torch.arange(weight.shape[0], device=weight.device) // layer.head_dim
            noise = heads % (layer.signals_per_noise + 1) == layer.signals_per_noise
            weight.register_hook(lambda gradient, noise=noise: gradient * noise[:, None])
            parameters.append(weight)
    return parameters


def train(
    folder: Path, trained: str, texts: Sequence[Sequence[str]], settings: Settings, seed: int, output: Path
) -> None:
    """Train an arm with a seed on the first texts, and measure its loss on the second ones.

    The output is the model with the adapter merged, and what the Trainer logged.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    loaded = LoadedModel(name=str(folder), model=base, tokenizer=tokenizer)
    data = rows(loaded, texts[0], settings, settings.steps * settings.batch, f"training {seed}")
    held_out = rows(loaded, texts[1], settings, settings.held_out, "held out")
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        modules_to_save=["lambda_proj"] if trained == SECOND_QUERIES else None,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora)
    groups: list[dict[str, Any]] = []
    if trained == SECOND_QUERIES:
        own = [*second_queries(model), *(p for name, p in model.named_parameters() if "lambda_proj" in name)]
        own = [parameter for parameter in own if parameter.requires_grad]
        groups.append({"params": own, "lr": settings.second_learning_rate})
    known = {id(parameter) for group in groups for parameter in group["params"]}
    groups.append({"params": [p for p in model.parameters() if p.requires_grad and id(p) not in known]})
    arguments = TrainingArguments(
        str(output.with_name("checkpoints")),
        max_steps=settings.steps,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=settings.batch,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.steps // 10,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        logging_steps=max(1, settings.steps // 20),
        eval_strategy="steps",
        eval_steps=max(1, settings.steps // 4),
        eval_on_start=True,
        prediction_loss_only=True,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
    )
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=0.0)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=held_out,
        data_collator=collate,
        optimizers=(optimizer, None),
    )
    if isinstance(base, DiffLlamaForCausalLM):
        trainer.add_callback(DifferentialStatsCallback(trainer, torch.tensor([data[0]["prompt"][:256]])))
    trainer.train()
    model.merge_and_unload().save_pretrained(output)
    tokenizer.save_pretrained(output)
    replace_file(output / "log.json", as_json(trainer.state.log_history))  # last: marks a finished training


def accuracy(folder: Path, settings: Settings, held_out: Path, output: Path) -> float:
    """Return the accuracy of `diffllama probe needles` on held-out texts, the mean over depths, in bfloat16."""
    probe = Needles(
        length=[settings.length],
        needles=[f"{settings.queries}_of_{settings.needles}"],
        samples_per_condition=settings.samples,
    )
    report = run_probe(probe, [model_spec(str(folder), dtype="bfloat16")], output=output, data=held_out)
    return report.select(depth="all")[0]["models"][0]["accuracy"]["mean"]


def draw(results: Mapping[str, Any], figure: Figure) -> None:
    """Draw the held-out loss during training, a line for each seed, not smoothed."""
    (axes,) = panels(figure, 1)
    for at, (arm, logs) in enumerate(results["logs"].items()):
        for number, log in enumerate(logs):
            losses = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
            label = None if number else arm
            axes.plot(*zip(*losses.items(), strict=True), color=COLOURS[at], linestyle=LINES[at], label=label)
    axes.set_yscale("log")
    finish(axes, "optimizer steps", "loss on held-out answers (nats per token)")


def main(
    text: Annotated[Path, typer.Option(help="Folder with text files, ten or more, better books.")],
    folder: Annotated[Path, typer.Option(help="Folder for models and results.")] = Path("runs/heal"),
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each arm.")] = 2,
) -> None:
    """Train and test every arm, and write results.json and curves.png into the folder."""
    with messages():
        heal(text, folder, seeds, Settings())


def heal(text: Path, folder: Path, seeds: int, settings: Settings) -> dict[str, Any]:
    """Train and test every arm with seeds 0, 1, …, write the results into the folder, and return them.

    Raises:
        ValueError: the folder has a run with other settings, or there are fewer than ten texts.
    """
    started, data = folder / "heal.json", folder / "held_out.jsonl"
    fixed = asdict(settings)
    if started.is_file() and read_json(started) != fixed:
        raise ValueError(f"{folder} has a run with other settings. Name another --folder.")
    texts = split_documents(str(text))
    prepare()
    folder.mkdir(parents=True, exist_ok=True)
    write_documents(data, texts[1])
    replace_file(started, as_json(fixed))
    before = {
        model.name: accuracy(model, settings, data, folder / model.name)
        for model in dict.fromkeys(model for model, _ in ARMS.values())
    }
    numbers: dict[str, list[float]] = {arm: [] for arm in ARMS}
    logs: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm, (model, trained) in ARMS.items():
            place = folder / arm.replace(" ", "_") / str(seed)
            if not (place / "log.json").exists():
                train(model, trained, texts, settings, seed, place)
            numbers[arm].append(accuracy(place, settings, data, place.with_name(f"{seed}-needles")))
            logs[arm].append(json.loads((place / "log.json").read_text(encoding="utf-8")))
            print(f"{arm}, seed {seed}: accuracy {numbers[arm][-1]:.3f}", flush=True)
    results = {
        "settings": fixed,
        "versions": versions(),
        "accuracy before": before,
        "accuracy": {arm: over_seeds(values) for arm, values in numbers.items()},
        "logs": logs,
    }
    replace_file(folder / "results.json", as_json(results))
    replace_file(folder / "curves.png", picture(draw, results))
    return results


if __name__ == "__main__":
    typer.run(main)
