"""What the benchmarks share: a process to measure in, modules to move, what verl brings."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

import torch
from rl_step import Moves
from torch import nn
from torch.distributed.fsdp import fully_shard

from placement.testing.ranks import join_group

MB = 2**20


@dataclass(frozen=True)
class Measured:
    """One figure of one process; None where there is nothing to measure."""

    ours: float | None
    verl: float | None = None
    limit: float | None = None
    """The bar, where it is only known with the measurement."""


def processes(module: str, device: str, count: int) -> list[dict[str, Measured]]:
    """What ``module`` measures in each of ``count`` processes, one after the other."""
    return [_in_a_process(module, device) for _ in range(count)]


_QUIET_MEMORY = {
    # The C library keeps what is freed, so that no copy is slowed down by page faults.
    "MALLOC_MMAP_THRESHOLD_": str(32 * MB),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**30),
    # It asks for huge pages, as pinned and device memory have: a link looks up no small ones.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "OMP_NUM_THREADS": "1",
}


def _in_a_process(module: str, device: str) -> dict[str, Measured]:
    command = [sys.executable, "-m", module, device]
    run = subprocess.run(command, env=os.environ | _QUIET_MEMORY, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{module} failed:\n{run.stderr}")
    figures = json.loads(run.stdout.splitlines()[-1])  # importing verl prints lines, too
    return {name: Measured(**figure) for name, figure in figures.items()}


def report(measure: Callable[[str], Mapping[str, Measured]]) -> None:
    """Measure in this process, the only rank of its group, and print what was found."""
    device = sys.argv[1]
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    if device == "sim":
        from placement import sim

        sim.enable()
    with tempfile.TemporaryDirectory() as scratch:
        join_group(device, 0, 1, os.path.join(scratch, "rendezvous"))
        found = measure(device)
        torch.distributed.destroy_process_group()
    print(json.dumps({name: asdict(figure) for name, figure in found.items()}))


def verls_moves(device: str) -> Moves | None:
    """verl's own functions that move FSDP modules; None if it is not installed.

    Raises:
        RuntimeError: verl would move to another device.
    """
    if importlib.util.find_spec("verl") is None:
        return None
    os.environ["VERL_LOGGING_LEVEL"] = "ERROR"
    from verl.utils import fsdp_utils
    from verl.utils.device import get_device_name

    if get_device_name() != device:
        raise RuntimeError(f"verl computes on {get_device_name()}, not on {device}")

    def offload_model(model: nn.Module) -> None:
        fsdp_utils.offload_fsdp_model_to_cpu(model, empty_cache=False)

    return Moves(
        fsdp_utils.load_fsdp_model_to_gpu,
        offload_model,
        fsdp_utils.load_fsdp_optimizer,
        fsdp_utils.offload_fsdp_optimizer,
    )


class Layer(nn.Module):
    """One weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def layers(count: int, nbytes: int, device: str) -> nn.Module:
    """``count`` layers with a float32 weight of ``nbytes`` each, sharded over this one rank. The
    values of a weight are its number."""
    return sharded(
        torch.full((nbytes // 4,), float(number), device=device) for number in range(count)
    )


def sharded(values: Iterable[torch.Tensor]) -> nn.Module:
    """A layer for each of ``values``, sharded over this one rank."""
    return fully_shard(nn.Sequential(*map(Layer, values)))


def median_seconds(work: Callable[[], object], runs: int, repeats: int = 1) -> float:
    """Median over runs of the seconds that one call of ``work`` takes."""
    return statistics.median(seconds(work, repeats) for _ in range(runs))


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """How long one of ``repeats`` calls takes."""
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - started) / repeats
