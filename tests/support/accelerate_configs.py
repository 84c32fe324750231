"""Accelerate's configuration files, as `accelerate launch` reads them."""

import argparse
import os
from importlib import resources
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env


FILES = sorted(Path(str(resources.files("diffllama.configuration"))).glob("accelerate/*.yaml"))

NO_DEEPSPEED = "deepspeed is in no extra: it compiles with gcc when it is first used, which takes half a minute"


def launch_arguments(file: str | Path, *options: str) -> argparse.Namespace:
    """Parse `accelerate launch --config_file FILE OPTIONS`; FILE may be the name of one of the package's files."""
    file = next((ours for ours in FILES if ours.stem == file), file)
    command = ["--config_file", str(file), "--main_process_port", "0", *options, "script.py"]  # 0: any free port
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return arguments


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that `accelerate launch` sets to configure its processes."""
    env = prepare_deepspeed_cmd_env(arguments)[1] if arguments.use_deepspeed else prepare_multi_gpu_env(arguments)
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return {name: value for name, value in env.items() if name.startswith(prefixes) and os.environ.get(name) != value}
