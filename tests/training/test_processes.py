"""Two processes compute the same as one: data parallel, sharded, and tensor parallel."""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import merge_fsdp_weights
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from diffllama import DiffLlamaForCausalLM
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaAttention
from diffllama.training import DifferentialStatsCallback, StopOnNonFiniteCallback
from support.accelerate_configs import NO_DEEPSPEED, environment, launch_arguments
from support.forked_processes import call_in_processes
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tokens


pytestmark = pytest.mark.slow

FIELDS: dict[str, dict[str, Any]] = {"v1": EVERY_FEATURE, "v2": {"gated_mlp": False, "tie_word_embeddings": True}}
"""Variant -> what its model has; tied embeddings, so that a shared weight is sharded as well."""
SPLITS_HEADS = Version(transformers.__version__) >= Version("5.23")
"""Before, each process has only its own heads' gradients, and an odd vocabulary is refused."""
STEPS = 4
ROWS = [{"input_ids": row, "labels": row} for row in tokens(32, 12)]


def kept(parameter: Any) -> float:
    """Return the fraction of a parameter that a process has."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.numel() / parameter.ds_numel
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.numel() / parameter.numel()


@contextmanager
def lambda_precisions() -> Iterator[set[tuple[str, str]]]:
    """Return the dtypes of λ's inputs and of its computation."""
    compute, precisions = DiffLlamaAttention.differential_lambda, set()

    def watched(layer: DiffLlamaAttention, hidden_states: torch.Tensor) -> torch.Tensor:
        value = compute(layer, hidden_states)
        precisions.add((str(hidden_states.dtype), str(value.dtype)))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiffLlamaAttention, "differential_lambda", watched)
        yield precisions


def train(variant: str, name: str, variables: dict[str, str], processes: int) -> None:
    """Train one of `RUNS` in each of its processes, with these environment variables."""
    zero = "ACCELERATE_USE_DEEPSPEED" in variables
    if zero:  # `use_cpu` would disable it
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(backend="gloo")
    folder = f"{variant}/{name}"
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4 // processes, learning_rate=1e-3, logging_steps=1,
        save_steps=STEPS // 2, lr_scheduler_type="constant", report_to=[], seed=1, use_cpu=not zero, disable_tqdm=True,
        accelerator_config={"use_configured_state": zero}, ddp_backend="gloo" if processes > 1 else None,
    )  # fmt: skip
    if "ACCELERATE_USE_FSDP" in variables:  # accelerate shards only on GPUs, or on CPUs if it takes them for GPUs
        arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    trainer = Trainer(DiffLlamaForCausalLM.from_pretrained(f"{variant}/begin"), arguments, train_dataset=ROWS)
    trainer.add_callback(DifferentialStatsCallback(trainer, tokens(1, 9)))
    trainer.add_callback(StopOnNonFiniteCallback())
    with lambda_precisions() as precisions:
        trainer.train(resume_from_checkpoint=f"{folder}/begun" if os.path.exists(f"{folder}/begun") else None)
    facts = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "cosines": [entry["diff_cosine"] for entry in trainer.state.log_history if "diff_cosine" in entry],
        "kept": [kept(parameter) for parameter in trainer.model.parameters() if parameter.numel() > 3],
        "recomputed": sum("CheckpointWrapper" in type(module).__name__ for module in trainer.model.modules()),
        "lambda": sorted(precisions),
        "weights": sorted({str(parameter.dtype) for parameter in trainer.model.parameters()}),
    }
    logits = trainer.model.eval()(tokens(2, 9)).logits.detach()
    trainer.save_model()
    if trainer.is_world_process_zero():
        save_file({"logits": logits}, f"{folder}/logits.safetensors")
        Path(folder, "facts.json").write_text(json.dumps(facts))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor of which each process has a part."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().contiguous()


def compute_heads_in_parallel(variant: str) -> None:
    """Compute with some of the heads in each process."""
    model = AutoModelForCausalLM.from_pretrained(f"{variant}/begin", tp_plan="auto").eval()
    layer = model.model.layers[0].self_attn
    mine = layer.q_proj.weight.to_local() if hasattr(layer.q_proj.weight, "to_local") else layer.q_proj.weight
    assert 2 * len(mine) == model.config.num_attention_heads * layer.map_dim
    outputs = model(tokens(2, 9), labels=tokens(2, 9))
    outputs.loss.backward()
    tensors = {f"gradient of {name}": whole(parameter.grad) for name, parameter in model.named_parameters()}
    tensors["logits"] = whole(outputs.logits)
    tensors["answer"] = model.generate(tokens(2, 5), max_new_tokens=8, do_sample=False)
    save_file(tensors, f"{variant}/parallel-{os.environ['RANK']}.safetensors")


def refuse_to_part_a_group() -> None:
    """Check that a single group of heads cannot be split between processes."""
    model = AutoModelForCausalLM.from_pretrained("group", tp_plan="auto")
    with pytest.raises(ValueError, match=r"`num_noise_heads` must be a multiple of the tensor-parallel .* got 1"):
        model(tokens(2, 9))


def run(environments: dict[str, dict[str, str]], processes: int, work: Path) -> None:
    """Train both variants with each environment; two processes compute with heads in parallel, too."""

    def each() -> None:
        os.chdir(work)
        if processes > 1 and SPLITS_HEADS:
            for variant in VARIANTS:
                compute_heads_in_parallel(variant)  # first: transformers refuses it after ZeRO-3
            refuse_to_part_a_group()
        for (name, variables), variant in itertools.product(environments.items(), VARIANTS):
            with pytest.MonkeyPatch.context() as patch:
                for variable, value in variables.items():
                    patch.setenv(variable, value)
                train(variant, name, variables, processes)

    call_in_processes(each, processes, work / f"store-of-{'-'.join(environments)}")


def environment_of(file: str, *options: str) -> dict[str, str]:
    """Return the environment variables of one of our files for `accelerate launch`, without bfloat16."""
    return environment(launch_arguments(file, *options)) | {"ACCELERATE_MIXED_PRECISION": "no"}


FSDP2 = environment_of("fsdp2_8gpus")
RECOMPUTED = environment_of(
    "fsdp2_8gpus", "--fsdp_activation_checkpointing", "true", "--fsdp_state_dict_type", "SHARDED_STATE_DICT"
)
RUNS: dict[str, tuple[int, str, dict[str, str]]] = {
    "one": (1, "", {}),
    "two": (2, "", {}),
    "one, then two": (2, "one", {}),
    "sharded": (2, "", FSDP2),
    "one, then sharded": (2, "one", FSDP2),
    "sharded, recomputed": (2, "", RECOMPUTED),
    "sharded, bfloat16": (2, "", FSDP2 | {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "ZeRO-2": (2, "", environment_of("zero2_8gpus")),
    "ZeRO-3": (2, "", environment_of("zero3_8gpus")),
    "two, then one": (1, "two", {}),
    "sharded, then one": (1, "sharded", {}),
}
"""How many processes, whose run they take up after half of the steps, and what accelerate tells them.

Neighbours of as many processes run in the same ones.
"""
EXACT = [name for name in RUNS if "bfloat16" not in name]
CUT = [name for name, (_, _, variables) in RUNS.items() if "FSDP_VERSION" in variables or name == "ZeRO-3"]


def translate(checkpoint: Path) -> None:
    """Convert a sharded checkpoint of the Trainer to a plain one, or a plain one to a sharded one.

    The Trainer takes up a checkpoint only as it wrote it: it calls what an optimizer keeps by numbers in one process,
    and by names where it shards. torch knows both. The weights are in model.safetensors either way.
    """
    model = DiffLlamaForCausalLM.from_pretrained(checkpoint)
    optimizer = Trainer(model, TrainingArguments(str(checkpoint.parent), report_to=[], use_cpu=True)).create_optimizer()
    plain, sharded = checkpoint / "optimizer.pt", checkpoint / "optimizer.bin"
    if sharded.exists():
        set_optimizer_state_dict(model, optimizer, torch.load(sharded))
        torch.save(optimizer.state_dict(), plain)
        (checkpoint / "pytorch_model_fsdp.bin").unlink()
    else:
        optimizer.load_state_dict(torch.load(plain))
        torch.save(get_optimizer_state_dict(model, optimizer), sharded)
        torch.save(model.state_dict(), checkpoint / "pytorch_model_fsdp.bin")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of every run of both variants."""
    work = tmp_path_factory.mktemp("trained")
    for variant in VARIANTS:
        tiny_model(variant, initializer_range=0.05, **FIELDS[variant]).save_pretrained(work / variant / "begin")
    tiny_model(num_attention_heads=4, num_noise_heads=1, num_key_value_heads=1).save_pretrained(work / "group")
    possible = [name for name in RUNS if find_spec("deepspeed") or "ZeRO" not in name]
    for processes, names in itertools.groupby(possible, lambda name: RUNS[name][0]):
        environments = {name: RUNS[name][2] for name in names}
        for variant, name in itertools.product(VARIANTS, environments):
            if begun := RUNS[name][1]:
                checkpoint = work / variant / name / "begun"
                shutil.copytree(work / variant / begun / f"checkpoint-{STEPS // 2}", checkpoint)
                if (name in CUT) != (begun in CUT):
                    translate(checkpoint)
        run(environments, processes, work)
    return work


def facts(trained: Path, variant: str, name: str) -> dict[str, Any]:
    if "ZeRO" in name:
        pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
    return json.loads((trained / variant / name / "facts.json").read_text())


def saved(trained: Path, variant: str, name: str) -> DiffLlamaForCausalLM:
    """Return the model that a run saved, in one process."""
    folder = trained / variant / name
    if not (folder / "model.safetensors").exists():  # each process has saved its shards
        merge_fsdp_weights(str(folder / f"checkpoint-{STEPS}" / "pytorch_model_fsdp_0"), str(folder))
        shutil.copy(trained / variant / "begin" / "config.json", folder)
    return DiffLlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_processes_train_and_measure_as_one_does_and_take_up_what_others_began(
    variant: str, name: str, trained: Path
) -> None:
    result, alone = (facts(trained, variant, each) for each in (name, "one"))
    assert (len(result["losses"]), len(result["cosines"])) == (STEPS, STEPS + 1)
    assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert result["cosines"] == pytest.approx(alone["cosines"], abs=1e-4)
    model, expected = saved(trained, variant, name), saved(trained, variant, "one").state_dict()
    assert model.state_dict().keys() == expected.keys()
    for tensor, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[tensor], rtol=0, atol=1e-4)
    logits = load_file(trained / variant / name / "logits.safetensors")["logits"]
    torch.testing.assert_close(model(tokens(2, 9)).logits, logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_of_two_keeps_half_of_every_weight(variant: str, name: str, trained: Path) -> None:
    kept = facts(trained, variant, name)["kept"]
    assert kept == [pytest.approx(0.5, abs=0.01)] * len(kept)  # an odd vocabulary cannot be halved exactly
    assert facts(trained, variant, name)["recomputed"] == (2 if "recomputed" in name else 0)  # layers


@pytest.mark.parametrize("name", ["two", "sharded", "ZeRO-2", "ZeRO-3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_saved_by_processes_has_its_code(variant: str, name: str, trained: Path) -> None:
    facts(trained, variant, name)
    one, other = trained / variant / "one", trained / variant / name
    assert sorted(file.name for file in other.glob("*.py")) == sorted(file.name for file in one.glob("*.py"))
    assert json.loads((other / "config.json").read_text()) == json.loads((one / "config.json").read_text())


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_deepspeed_puts_its_shards_together_to_the_same_weights(variant: str, name: str, trained: Path) -> None:
    zero_to_fp32 = pytest.importorskip("deepspeed.utils.zero_to_fp32", reason=NO_DEEPSPEED)
    checkpoint = trained / variant / name / f"checkpoint-{STEPS}"
    assert len(list(checkpoint.glob(f"global_step{STEPS}/*optim_states.pt"))) == 2
    together = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(checkpoint)
    for tensor, expected in saved(trained, variant, name).state_dict().items():
        assert torch.equal(together[tensor], expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sharded_in_bfloat16_weights_and_lambda_stay_in_float32(variant: str, trained: Path) -> None:
    mixed, exact = (facts(trained, variant, name) for name in ("sharded, bfloat16", "one"))
    assert mixed["weights"] == ["torch.float32"]
    assert mixed["lambda"] == [["torch.bfloat16", "torch.float32"]]
    assert mixed["losses"] == pytest.approx(exact["losses"], rel=1e-2)
    assert mixed["losses"] != pytest.approx(exact["losses"], rel=1e-5)


@pytest.mark.skipif(not SPLITS_HEADS, reason="needs transformers 5.23")
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_in_parallel_compute_what_one_process_computes(variant: str, process: int, trained: Path) -> None:
    model = DiffLlamaForCausalLM.from_pretrained(trained / variant / "begin", attn_implementation="sdpa")
    parallel = load_file(trained / variant / f"parallel-{process}.safetensors")
    outputs = model(tokens(2, 9), labels=tokens(2, 9))
    outputs.loss.backward()
    torch.testing.assert_close(parallel["logits"], outputs.logits.detach(), rtol=0, atol=2e-5)
    for name, parameter in model.named_parameters():
        error = (parallel[f"gradient of {name}"] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, name  # the terms of λ's gradient almost cancel
    assert torch.equal(parallel["answer"], model.generate(tokens(2, 5), max_new_tokens=8, do_sample=False))
