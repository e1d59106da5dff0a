"""Bytes that verl's stock engine and a managed one copy between host and device, side by side."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

pytest.importorskip("verl", reason="verl is not installed; make test-clients runs this")

from verl_engines import POLICIES, built, infer, train

from placement import sim
from placement.testing import Ranks

Bytes = tuple[int, int]
"""To the device, and to the host."""


class Copies:
    """What a phase copied; read when it is over."""

    def __init__(self) -> None:
        self.seen: dict[str, Bytes] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        gc.collect()
        before = sim.counters()
        yield
        copied = sim.counters() - before
        self.seen[phase] = copied.host_to_device_bytes, copied.device_to_host_bytes


def step(engine: Any, checkpoint: str) -> dict[str, Bytes]:
    copies = Copies()
    train(engine, 0)  # makes the optimizer's state
    with copies.of("train"):
        train(engine, 1)
    with copies.of("evaluate"):
        infer(engine, 2)
    with copies.of("save"), without_files():
        engine.save_checkpoint(checkpoint)
    with copies.of("export"):
        for _ in engine.get_per_tensor_param()[0]:
            pass  # a rollout on the same device
    return copies.seen


@contextmanager
def without_files() -> Iterator[None]:
    """Serialising copies what is on the device to the host, which is no move; it is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", lambda *args, **kwargs: None)
        yield


def in_kilobytes(copied: Bytes) -> str:
    return " / ".join(f"{count / 1e3:,.1f}" for count in copied)


def both(model: Path, name: str, checkpoint: str) -> tuple[dict[str, Bytes], dict[str, Bytes]]:
    config = POLICIES[name]
    return (
        step(built(model, stock=True, **config), checkpoint),
        step(built(model, **config), checkpoint),
    )


def test_a_managed_engine_copies_no_more_than_the_stock_one(
    ranks: Callable[[int], Ranks],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    title = "kB (1e3 bytes) that one rank of 2 copies: to the device / to the host"
    table = Table(title=title, title_justify="left")
    for column in ("policy", "phase", "stock verl 0.9.1", "managed"):
        table.add_column(column, justify="right" if "v" in column else "left")
    fewer = set()
    for name in POLICIES:
        stock, managed = ranks(2).run(both, tiny_model, name, str(tmp_path / name))[0]
        for phase, theirs in stock.items():
            ours = managed[phase]
            assert ours[0] <= theirs[0], (name, phase)
            assert ours[1] <= theirs[1], (name, phase)
            if ours < theirs:
                fewer.add((name, phase))
            table.add_row(
                name,
                phase,
                *(f"{to / 1e3:,.1f} / {back / 1e3:,.1f}" for to, back in (theirs, ours)),
            )
    with capsys.disabled():
        Console(width=100).print("\n", table)
    assert ("manual", "save") in fewer
