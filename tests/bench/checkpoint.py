"""What saving and loading costs, beside torch's own checkpoints: ``make bench``.

Both save model and AdamW state of the same module from the same process, in turns, into new
directories on the same file system, and wait until files are on the disk (torch's
``FileSystemWriter`` with ``sync_files``, its default; it does not wait for directories). Both load
into the same module, which has its state already, from the page cache. Ours also computes
checksums, verifies them, and reads into private memory before it changes anything. Medians.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from placement import Checkpoints, PlacementManager, Trace

RUNS = 7
_TABLE_WIDTH = 100
"""Columns that the table needs, so that it is whole in a log, too."""

SIZES = {
    "24 tensors of 4 MiB": (24, 1 << 20),
    "1,000 tensors of 16 KiB": (1_000, 1 << 12),
}
"""How many parameters, of how many elements. AdamW has two more tensors and a counter for each."""


def managed(count: int, numel: int) -> PlacementManager:
    device = torch.accelerator.current_accelerator()
    module = nn.ParameterList(nn.Parameter(torch.randn(numel, device=device)) for _ in range(count))
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return PlacementManager(module, optimizer, trace=Trace())


class Ours:
    name = "Checkpoints"

    def __init__(self, manager: PlacementManager) -> None:
        self._manager = manager

    def save(self, directory: Path) -> None:
        Checkpoints(directory, self._manager).save(1)

    def load(self, directory: Path) -> None:
        Checkpoints(directory, self._manager).load()


class Torchs:
    name = "torch.distributed.checkpoint"

    def __init__(self, manager: PlacementManager) -> None:
        self._module = manager.module
        assert manager.optimizer is not None
        self._optimizer = manager.optimizer

    def save(self, directory: Path) -> None:
        dcp.save(self._state(), storage_writer=FileSystemWriter(directory, sync_files=True))

    def load(self, directory: Path) -> None:
        state = self._state()
        dcp.load(state, storage_reader=FileSystemReader(directory))
        set_state_dict(
            self._module,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, dict[str, object]]:
        model, optimizer = get_state_dict(self._module, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - started


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of a single process."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def measured(manager: PlacementManager) -> dict[str, tuple[int, float, float]]:
    """Bytes on disk, and seconds of a save and of a load, of each of the two."""
    both = (Ours(manager), Torchs(manager))
    times: dict[str, tuple[list[float], list[float]]] = {one.name: ([], []) for one in both}
    size: dict[str, int] = {}
    for run in range(RUNS + 1):
        for one in both:
            directory = Path(tempfile.mkdtemp(prefix="bench-"))
            saving = seconds(lambda one=one, to=directory / "saved": one.save(to))
            loading = seconds(lambda one=one, to=directory / "saved": one.load(to))
            files = [path for path in directory.rglob("*") if path.is_file()]
            size[one.name] = sum(path.stat().st_size for path in files)
            shutil.rmtree(directory)
            if run:  # the first is to warm up
                times[one.name][0].append(saving)
                times[one.name][1].append(loading)
    return {
        name: (size[name], statistics.median(saving), statistics.median(loading))
        for name, (saving, loading) in times.items()
    }


def main() -> None:
    if torch.accelerator.current_accelerator(check_available=True) is None:
        from placement import sim

        sim.enable()
    table = Table("", "", "MB", "save, s", "x", "load, s", "x", box=box.SIMPLE_HEAD)
    for column in table.columns[2:]:
        column.justify = "right"
    for size, (count, numel) in SIZES.items():
        with quiet():
            found = measured(managed(count, numel))
        _, saving, loading = found[Torchs.name]
        for name, (nbytes, own_saving, own_loading) in found.items():
            table.add_row(
                size,
                name,
                f"{nbytes / 1e6:.1f}",
                f"{own_saving:.3f}",
                f"{own_saving / saving:.2f}",
                f"{own_loading:.3f}",
                f"{own_loading / loading:.2f}",
            )
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(table)


if __name__ == "__main__":
    main()
