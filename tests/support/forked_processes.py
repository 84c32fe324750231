"""Distributed training in processes forked from the test's own, which need not import anything again."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.state import AcceleratorState


def call_in_processes(function: Callable[[], None], processes: int, store: Path) -> None:
    """Call a function in one or more processes, as `torchrun` does.

    Args:
        function: function to call in each process.
        processes: number of processes, which form a gloo group if there are several.
        store: path of a new file for the group's rendezvous.
    """
    torch.multiprocessing.start_processes(_call, (function, processes, store), nprocs=processes, start_method="fork")


def _call(rank: int, function: Callable[[], None], processes: int, store: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # transformers 5.6 loads no checkpoint to cpu:0
    if processes == 1:
        function()
        return
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=processes)
    function()
    torch.distributed.barrier()  # no process may exit while another needs it
    torch.distributed.destroy_process_group()
