"""kill -9 at random moments of a save: ``make kill9``.

Each moment is a job of its own: one or two ranks load the latest checkpoint, train on, and save,
blocking or not. At a random time between the first and the last thing that the save does, all its
processes are killed. Then the directory must have a latest checkpoint that is whole: it loads, and
holds bit for bit the values of its step. And it must be the one of the last save that returned, or
of the one that was killed: nothing that was saved is lost.

A kill that came too late (the save had returned) or too early is tried again. The directory is the
same for all moments of a kind, so each save also clears what the kill before it left.

The last line is ``whole: N of N``; the exit status is 0 if all were.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import mmap
import os
import random
import shutil
import signal
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from placement import Checkpoints, PlacementManager, Trace, sim
from placement.checkpoint import files
from placement.testing.ranks import join_group

WIDTH = 512
"""The module has two layers of this width: a checkpoint is about 6 MB."""

KINDS = [(ranks, blocking) for ranks in (1, 2) for blocking in (True, False)]

_PATIENCE = 120.0
"""Seconds that a job may take to its end."""


# The job.


class Progress:
    """What a job tells of itself, in memory that outlives it: for each rank the operation of the
    file system that it is in, and on rank 0 when its save began and returned."""

    _RANKS = 2

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * (2 + self._RANKS))

    def began(self) -> None:
        self._set(0, 1)

    def returned(self) -> None:
        self._set(1, 1)

    def reach(self, rank: int) -> None:
        self._set(2 + rank, self.operation(rank) + 1)

    @property
    def has_begun(self) -> bool:
        return bool(self._get(0))

    @property
    def has_returned(self) -> bool:
        return bool(self._get(1))

    def operation(self, rank: int) -> int:
        return self._get(2 + rank)

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * place, value)

    def _get(self, place: int) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * place)[0])


class CountedOs:
    """The module ``os``, telling a rank's progress at each operation."""

    def __init__(self, progress: Progress, rank: int) -> None:
        self._progress, self._rank = progress, rank

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._progress.reach(self._rank)
            return found(*args, **options)

        return call


def new_manager(ranks: int) -> PlacementManager:
    module: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    if ranks > 1:
        module = fully_shard(module, mesh=init_device_mesh("sim", (ranks,)))
    else:
        module = module.to("sim")
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    return PlacementManager(module, optimizer, trace=Trace(), deadline=60.0)


def fill(manager: PlacementManager, step: int) -> None:
    """Give every tensor the values of ``step``: a different one in each place."""
    assert manager.optimizer is not None
    with torch.no_grad():
        for number, parameter in enumerate(manager.module.parameters()):
            parameter.fill_(step + number / 8)
            manager.optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, step + number / 4),
                "exp_avg_sq": torch.full_like(parameter, step + number / 2),
            }


def is_filled(manager: PlacementManager, step: int) -> bool:
    """Whether every value is that of ``step``."""
    assert manager.optimizer is not None
    for number, parameter in enumerate(manager.module.parameters()):
        state = manager.optimizer.state[parameter]
        expected = [
            (parameter, step + number / 8),
            (state["step"], float(step)),
            (state["exp_avg"], step + number / 4),
            (state["exp_avg_sq"], step + number / 2),
        ]
        if any(not bool((tensor == value).all()) for tensor, value in expected):
            return False
    return True


def job(directory: Path, rank: int, ranks: int, blocking: bool, step: int, told: Progress) -> None:
    """Save the checkpoint of ``step``, in a process of its own."""
    if ranks > 1:
        join_group("sim", rank, ranks, str(directory / f"rendezvous-{step}"))
    manager = new_manager(ranks)
    kept = Checkpoints(directory / "checkpoints", manager, max_to_keep=2)
    fill(manager, step)
    if ranks > 1:
        dist.barrier()
    files.os = CountedOs(told, rank)  # type: ignore[attr-defined]
    if rank == 0:
        told.began()
    kept.save(step, extras={"step": step}, blocking=blocking)
    fill(manager, -1)  # training goes on
    kept.finish()
    if rank == 0:
        told.returned()


def start(work: Any, *args: Any) -> int:
    """Run ``work`` in a fork of this process, which has torch loaded already; its number."""
    if number := os.fork():
        return number
    status = 1
    try:
        logging.disable(logging.CRITICAL)
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        work(*args)
        status = 0
    finally:
        os._exit(status)


def ended(process: int) -> int:
    """Wait for a process; its status."""
    return os.waitpid(process, 0)[1]


def wait_until(done: Callable[[], bool]) -> None:
    """Look often: what is waited for takes milliseconds."""
    ends = time.monotonic() + _PATIENCE
    while not done():
        if time.monotonic() > ends:
            raise TimeoutError("a job did not come to its save, or to its end")
        time.sleep(100e-6)


# The moments.


@dataclass
class Kind:
    """Saves of one number of ranks, blocking or not.

    Attributes:
        directory: where they go.
        seconds: how long a save takes that is not killed.
        saved: the step of the last save that is known to be whole.
        step: of the last save that was begun.
        operations: how often rank 0 was killed in its n-th operation of the file system.
    """

    ranks: int
    blocking: bool
    directory: Path
    seconds: float = 0.0
    saved: int = 0
    step: int = 0
    operations: Counter[int] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, " + (
            "blocking" if self.blocking else "not blocking"
        )

    def measure(self) -> None:
        """Take the time of saves that nobody kills."""
        self.seconds = statistics.median(self.save() for _ in range(3))

    def save(self) -> float:
        """Save the next step; the seconds that it took."""
        told, processes = self.begun()
        began = time.perf_counter()
        wait_until(lambda: told.has_returned)
        seconds = time.perf_counter() - began
        statuses = [ended(process) for process in processes]
        if any(statuses):
            raise RuntimeError(f"a save that nobody killed failed: {statuses}")
        self.saved = self.step
        return seconds

    def kill(self, generator: random.Random) -> str:
        """Kill a save at one moment inside it.

        Returns:
            What is wrong afterwards; empty if nothing is.
        """
        while True:
            told, processes = self.begun()
            time.sleep(generator.uniform(0.0, self.seconds))
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for process in processes:
                ended(process)
            if not told.has_returned:
                break
            self.saved = self.step  # too late: that one is whole, and must stay
        self.operations[told.operation(0)] += 1
        return self.wrong()

    def begun(self) -> tuple[Progress, list[int]]:
        """Begin to save the next step: the job's progress, and its processes."""
        self.step += 1
        told = Progress()
        processes = [
            start(job, self.directory, rank, self.ranks, self.blocking, self.step, told)
            for rank in range(self.ranks)
        ]
        wait_until(lambda: told.has_begun)
        return told, processes

    def wrong(self) -> str:
        manager = new_manager(1)
        try:
            step = Checkpoints(self.directory / "checkpoints", manager).load().step
        except Exception as error:
            return f"after the save of step {self.step}: {error}"
        if step not in (self.saved, self.step):
            return f"step {self.saved} was whole, and is lost: the latest is {step}"
        if not is_filled(manager, step):
            return f"step {step} has values of another one"
        self.saved = step
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"{options.moments} moments, seed {seed}")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sim.enable()
    root = Path(tempfile.mkdtemp(prefix="kill9-"))
    generator = random.Random(seed)
    kinds = []
    for ranks, blocking in KINDS:
        directory = root / f"{ranks}-{blocking}"
        directory.mkdir()
        kinds.append(Kind(ranks, blocking, directory))
        kinds[-1].measure()
        print(f"{kinds[-1]}: a save takes {kinds[-1].seconds * 1e3:.1f} ms")
    whole, lost = 0, 0
    for moment in range(options.moments):
        kind = kinds[moment % len(kinds)]
        wrong = kind.kill(generator)
        whole += not wrong
        lost += "lost" in wrong
        if wrong:
            print(f"moment {moment}, {kind}: {wrong}")
    for kind in kinds:
        reached = sorted(kind.operations.items())
        spread = " ".join(f"{operation}:{count}" for operation, count in reached)
        print(f"{kind}: killed in file operation of rank 0 (times): {spread}")
        kind.save()
        left = [p.name for p in (kind.directory / "checkpoints").iterdir() if p.name[0] == "."]
        if left:
            print(f"{kind}: left over after a save: {left}")
            whole = -1
    shutil.rmtree(root)
    print(f"lost: {lost}")
    print(f"whole: {whole} of {options.moments}")
    return 0 if whole == options.moments else 1


if __name__ == "__main__":
    sys.exit(main())
