"""Local processes that run a test's body together, each as one rank.

Processes are started once and used for many bodies, because importing torch takes seconds and
forming a process group takes milliseconds. A body is a function that can be imported; it runs with
the default process group initialised, and its result comes back. When a rank fails or the deadline
passes, all processes are ended: the others may wait in a collective for ever.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_ALL_ARE_DONE = "all ranks are done"

DEADLINE = 120.0
"""Seconds that a body may take unless it is given another deadline."""


class RankFailed(AssertionError):
    """A body raised on a rank, or the rank's process died; the message has its traceback."""


class RanksTimedOut(AssertionError):
    """The deadline passed. The message says which ranks had not finished."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection


class Ranks:
    """A group of local ranks.

    Args:
        size: how many.
        device: type of the compute device; ``sim`` enables the simulated accelerator in each.
        delayed_copies: on the simulated accelerator, let copies land as late as they may.
    """

    def __init__(self, size: int, device: str, *, delayed_copies: bool = False) -> None:
        self.size = size
        self._device = device
        self._delayed_copies = delayed_copies
        self._workers: list[_Worker] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        deadline: float = DEADLINE,
        dies: Collection[int] = (),
    ) -> list[Any]:
        """Run ``body(*args)`` on every rank.

        Args:
            body: an importable function. It finds its rank with ``torch.distributed``.
            args: passed to it; picklable.
            deadline: seconds that it may take.
            dies: ranks whose process the body ends. They get new ones.

        Returns:
            What it returned on each rank, in order of the ranks; None for those that died.

        Raises:
            RankFailed: it raised on a rank.
            RanksTimedOut: it did not end in time.
        """
        if not self._workers:
            self._workers = [self._started(rank) for rank in range(self.size)]
        self._runs += 1
        rendezvous = Path(self._scratch.name) / f"run{self._runs}"
        for worker in self._workers:
            worker.pipe.send((body, args, str(rendezvous)))
        try:
            results = self._results(time.monotonic() + deadline, dies)
            for rank, worker in enumerate(self._workers):
                if rank not in dies:
                    worker.pipe.send(_ALL_ARE_DONE)
            for rank in dies:
                _end(self._workers[rank])
                self._workers[rank] = self._started(rank)
            return results
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes; the next run starts new ones."""
        for worker in self._workers:
            _end(worker)
        self._workers = []

    def _started(self, rank: int) -> _Worker:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(theirs, rank, self.size, self._device, self._delayed_copies),
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _results(self, ends: float, dies: Collection[int]) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, ends - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise RanksTimedOut(f"ranks {late} of {self.size} had not finished in time")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    if rank in dies:
                        results[rank] = None
                        continue
                    raise RankFailed(f"the process of rank {rank} died") from None
                if not succeeded:
                    raise RankFailed(f"rank {rank} of {self.size} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.size)]


def _end(worker: _Worker) -> None:
    if worker.process.pid is not None and worker.process.is_alive():
        os.kill(worker.process.pid, signal.SIGKILL)  # also ends a stopped process
    worker.process.join()
    worker.pipe.close()


def _serve(pipe: Connection, rank: int, size: int, device: str, delayed_copies: bool) -> None:
    """A rank's process: run one body after the other, each in a process group of its own."""
    torch.set_num_threads(1)
    if device == "sim":
        from placement import sim

        sim.enable()
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            body, args, rendezvous = pipe.recv()
            gc.collect()  # what the last body left in cycles would go in the middle of this one
            try:
                join_group(device, rank, size, rendezvous)
                if device == "sim":
                    sim.set_delayed_copies(delayed_copies)
                pipe.send((True, body(*args)))
                # A rank that left at once would break the connections of one that still joins.
                pipe.recv()
            except BaseException:
                # Before the group goes, which makes the other ranks fail, too.
                pipe.send((False, traceback.format_exc()))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()


def join_group(device: str, rank: int, size: int, rendezvous: str) -> None:
    """Make this process ``rank`` of ``size`` in a default group for CPU and device tensors.

    Args:
        device: type of the compute device.
        rank, size: as in ``torch.distributed``.
        rendezvous: path of a file that does not exist yet, the same on all ranks.
    """
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        f"cpu:gloo,{device}:{backend}",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
    )
