"""How fast tensors travel: the rate of round trips, as a fraction of the flat copy rate."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from bench.common import MB, Measured, layers, seconds, verls_moves
from models import local
from rl_step import Moves

from placement import PlacementManager, Trace, find_compute_device

WARM_UPS = 2
REPETITIONS = 5

PARAMETERS = {
    "params_16x16MB_of_copy": (16, 16 * MB),
    "params_128x2MB_of_copy": (128, 2 * MB),
    "params_1000x64KB_of_copy": (1000, MB // 16),
}
"""How many parameters travel, and the bytes of each."""

OPTIMIZERS = {
    "optimizer_of_copy": (128, 2 * MB),
    "optimizer_2000x64KB_of_copy": (2000, MB // 16),
}
"""The parameters whose Adam state travels, which is twice their bytes."""


@dataclass(frozen=True)
class Traveller:
    """Tensors that are at home on the host, and travel to the device and back."""

    round_trip: Callable[[], None]
    tensors: Callable[[], Iterable[torch.Tensor]]

    def fingerprint(self) -> list[float]:
        return [local(tensor).double().sum().item() for tensor in self.tensors()]


def measure(device: str) -> dict[str, Measured]:
    moves = verls_moves(device)
    found = {}
    for name, (count, nbytes) in PARAMETERS.items():
        found[name] = of_copy(
            managed_parameters(count, nbytes, device),
            moves and parameters_by(moves, count, nbytes, device),
        )
    for name, (count, nbytes) in OPTIMIZERS.items():
        found[name] = of_copy(
            managed_optimizer(count, nbytes, device),
            moves and optimizer_by(moves, count, nbytes, device),
        )
    return found


def managed_parameters(count: int, nbytes: int, device: str) -> Traveller:
    module = layers(count, nbytes, device)
    return managed(PlacementManager(module, trace=Trace()), "params", module.parameters)


def managed_optimizer(count: int, nbytes: int, device: str) -> Traveller:
    module = layers(count, nbytes, device)
    optimizer = stepped(module)
    manager = PlacementManager(module, optimizer, trace=Trace())
    return managed(manager, "optimizer", lambda: averages(optimizer))


def managed(
    manager: PlacementManager, component: str, tensors: Callable[[], Iterable[torch.Tensor]]
) -> Traveller:
    def round_trip() -> None:
        manager.onload([component])
        manager.offload([component])

    manager.offload([component])
    return Traveller(round_trip, tensors)


def parameters_by(moves: Moves, count: int, nbytes: int, device: str) -> Traveller:
    module = layers(count, nbytes, device)

    def round_trip() -> None:
        moves.load_model(module)
        moves.offload_model(module)
        torch.accelerator.synchronize()

    round_trip()
    return Traveller(round_trip, module.parameters)


def optimizer_by(moves: Moves, count: int, nbytes: int, device: str) -> Traveller:
    optimizer = stepped(layers(count, nbytes, device))

    def round_trip() -> None:
        moves.load_optimizer(optimizer, find_compute_device())
        moves.offload_optimizer(optimizer)
        torch.accelerator.synchronize()

    round_trip()
    return Traveller(round_trip, lambda: averages(optimizer))


def stepped(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Adam, after a step that gave each parameter a state of its own."""
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone()
    # One by one: a foreach step of thousands of DTensors takes minutes on the simulation.
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def averages(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The running averages of all parameters."""
    return [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def of_copy(ours: Traveller, theirs: Traveller | None) -> Measured:
    """Medians over repetitions, in each of which the flat copy is made first."""
    gc.collect()  # what travelled before
    travellers = [ours] if theirs is None else [ours, theirs]
    before = [traveller.fingerprint() for traveller in travellers]
    flat = flat_round_trip(sum(local(tensor).nbytes for tensor in ours.tensors()))
    rates: list[list[float]] = []
    for _ in range(WARM_UPS + REPETITIONS):
        limit = seconds(flat)
        rates.append([limit / seconds(traveller.round_trip) for traveller in travellers])
    assert [traveller.fingerprint() for traveller in travellers] == before
    return Measured(*map(statistics.median, zip(*rates[WARM_UPS:], strict=True)))


def flat_round_trip(nbytes: int) -> Callable[[], None]:
    """A copy of one pinned tensor of ``nbytes`` to the device, and one back: as fast as the link
    can be."""
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=find_compute_device())
    on_host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def round_trip() -> None:
        on_device.copy_(on_host, non_blocking=True)
        torch.accelerator.synchronize()
        on_host.copy_(on_device, non_blocking=True)
        torch.accelerator.synchronize()

    return round_trip
