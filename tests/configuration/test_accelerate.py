"""accelerate reads the intended settings from the files for `accelerate launch`."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from transformers import AutoModelForCausalLM

from diffllama.configuration import baseline
from support.accelerate_configs import FILES, NO_DEEPSPEED, environment, launch_arguments
from support.tiny_models import VARIANTS, tiny_config


BY_NAME = {file.stem: file for file in FILES}
Tell = Callable[..., None]
FSDP2, ZERO = (sorted(name for name in BY_NAME if kind in name) for kind in ("fsdp2", "zero"))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Set the environment variables that `accelerate launch` sets."""

    def tell(file: str, *options: str) -> None:
        for name, value in environment(launch_arguments(file, *options)).items():
            monkeypatch.setenv(name, value)

    return tell


@pytest.mark.parametrize(
    ("name", "processes", "machines"),
    [("fsdp2_8gpus", 8, 1), ("fsdp2_2x8gpus", 16, 2), ("zero2_8gpus", 8, 1), ("zero3_8gpus", 8, 1)],
)
def test_each_file_starts_eight_processes_on_every_machine(name: str, processes: int, machines: int) -> None:
    config = load_config_from_file(str(BY_NAME[name]))
    assert (config.num_processes, config.num_machines) == (processes, machines)
    arguments = launch_arguments(name, "--machine_rank", str(machines - 1))
    variables = environment(arguments)
    assert arguments.nproc_per_node == "8"
    assert machines == 1 or (arguments.nnodes, arguments.node_rank) == ("2", 1)
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (variables.get("ACCELERATE_USE_FSDP"), variables.get("ACCELERATE_USE_DEEPSPEED")) == (
        ("true", None) if name in FSDP2 else (None, "true")
    )


def test_every_file_is_tested_here() -> None:
    assert sorted(BY_NAME) == sorted([*FSDP2, *ZERO]) == ["fsdp2_2x8gpus", "fsdp2_8gpus", "zero2_8gpus", "zero3_8gpus"]


@functools.cache
def options() -> set[str]:
    return set(vars(launch_command_parser().parse_args(["script.py"])))


@pytest.mark.parametrize("name", BY_NAME)
def test_every_key_is_an_option_of_accelerate(name: str, tmp_path: Path) -> None:
    fields = yaml.safe_load(BY_NAME[name].read_text())
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):  # accelerate does not check their keys
        assert fields.get(section, {}).keys() <= options()
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(BY_NAME[name].read_text().replace("num_processes", "number_of_processes"))
    with pytest.raises(ValueError, match=r"unknown keys \(\['number_of_processes'\]\)"):
        load_config_from_file(str(misspelt))


@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_shards_all_and_saves_what_from_pretrained_reads(name: str, launched: Tell) -> None:
    launched(name)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert plugin.cpu_ram_efficient_loading
    assert not plugin.activation_checkpointing
    launched(name, "--fsdp_activation_checkpointing", "true", "--fsdp_state_dict_type", "SHARDED_STATE_DICT")
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.activation_checkpointing
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"


@pytest.mark.parametrize("name", FSDP2)
@pytest.mark.parametrize("of_baseline", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_decoder_layer_is_sharded_as_one(name: str, of_baseline: bool, variant: str, launched: Tell) -> None:
    launched(name)
    config = tiny_config(variant)
    model = AutoModelForCausalLM.from_config(baseline(config) if of_baseline else config)
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_auto_wrap_policy(model)
    together = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert {name for name, module in model.named_modules() if together(module)} == {"model.layers.0", "model.layers.1"}


def test_on_two_machines_each_has_the_whole_model(launched: Tell) -> None:
    launched("fsdp2_2x8gpus")
    parallel = ParallelismConfig()
    assert (parallel.dp_replicate_size, parallel.dp_shard_size, parallel.total_size) == (2, 8, 16)
    files = [yaml.safe_load(BY_NAME[name].read_text()) for name in FSDP2]
    assert files[0]["fsdp_config"] == files[1]["fsdp_config"]


@pytest.mark.parametrize("name", ZERO)
def test_zero_has_its_stage(name: str, launched: Tell) -> None:
    variables = environment(launch_arguments(name))
    assert variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == name[len("zero")]
    assert variables.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL") == ("true" if "3" in name else None)
    pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
    from accelerate.utils import DeepSpeedPlugin

    launched(name)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == int(name[len("zero")])
    assert plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] == ("3" in name)
