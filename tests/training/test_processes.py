"""Two processes compute what one computes: data in parallel, and heads in parallel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import VARIANTS, tiny_model, tokens


pytestmark = pytest.mark.slow

TRAIN = """
import json, os, sys
from tiny import VARIANTS, tiny_model, tokens
from transformers import Trainer, TrainingArguments

name, resumed = sys.argv[1:]
processes = int(os.environ.get("WORLD_SIZE", 1))
rows = [tokens(12, seed=i) for i in range(32)]
for variant in VARIANTS:
    arguments = TrainingArguments(
        f"{variant}/{name}", max_steps=20, per_device_train_batch_size=4 // processes, learning_rate=1e-3,
        logging_steps=1, save_steps=10, lr_scheduler_type="constant", report_to=[], use_cpu=True, seed=1,
        ddp_backend="gloo" if processes > 1 else None,
    )
    trainer = Trainer(
        tiny_model(variant, attn_implementation="sdpa", initializer_range=0.05),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train(resume_from_checkpoint=f"{variant}/{resumed}" if resumed else None)
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        with open(f"{variant}/{name}/losses.json", "w") as file:
            json.dump(losses, file)
"""

INFER = """
import os, sys
import diffllama, torch
from safetensors.torch import save_file
from tiny import tokens
from transformers import AutoModelForCausalLM

folder, answer = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
layer = model.model.layers[0].self_attn
mine, all_of_it = layer.q_proj.weight.to_local().numel(), layer.q_proj.weight.numel()
with torch.no_grad():
    logits = model(tokens(2, 9)).logits
    written = model.generate(tokens(2, 5), max_new_tokens=8, do_sample=False)
if os.environ["RANK"] == "0":
    assert 2 * mine == all_of_it, (mine, all_of_it)
    save_file({"logits": logits, "written": written}, answer)
torch.distributed.destroy_process_group()
"""


def run(code: str, *arguments: object, processes: int, work: Path) -> None:
    """Runs code in one or more processes, which find each other by gloo."""
    program = work / f"program{processes}.py"
    program.write_text(code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(program), *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]


RUNS = {"one": (1, ""), "two": (2, ""), "two, then one": (1, "two"), "one, then two": (2, "one")}
"""How many processes, and whose run they take up after ten of the twenty steps."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("trained")
    for name, (processes, begun) in RUNS.items():
        run(TRAIN, name, begun and f"{begun}/checkpoint-10", processes=processes, work=work)
    return work


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_data_in_parallel_trains_as_one_process_does_and_checkpoints_are_interchangeable(
    variant: str, name: str, trained: Path
) -> None:
    losses, alone = (json.loads((trained / variant / run / "losses.json").read_text()) for run in (name, "one"))
    assert len(losses) == 20
    assert losses == pytest.approx(alone, rel=1e-5)
    weights, expected = (load_file(trained / variant / run / "model.safetensors") for run in (name, "one"))
    assert weights.keys() == expected.keys()
    for tensor in weights:
        torch.testing.assert_close(weights[tensor], expected[tensor], rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_heads_in_parallel_compute_what_one_process_computes(variant: str, tmp_path: Path) -> None:
    model = tiny_model(variant, attn_implementation="sdpa")
    model.save_pretrained(tmp_path / "model")
    run(INFER, tmp_path / "model", tmp_path / "answer.safetensors", processes=2, work=tmp_path)
    answer = load_file(tmp_path / "answer.safetensors")
    torch.testing.assert_close(answer["logits"], model(tokens(2, 9)).logits, rtol=0, atol=2e-5)
    assert torch.equal(answer["written"], model.generate(tokens(2, 5), max_new_tokens=8, do_sample=False))
