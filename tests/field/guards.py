"""The guards that field tests name, and how each is taken away.

``make field-guards`` takes each away in turn and runs its tests, which must fail then: a guard
whose test passes without it guards nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from placement import (
    TABLE,
    Component,
    Legal,
    Placement,
    PlacementManager,
    Trigger,
    manager,
    mover,
    optimizer,
    record,
    residence,
    transfer,
)
from placement.leases import Lease, Leases
from placement.owners import base, fsdp1, fsdp2, plain
from placement.states import COMPUTES_WITH, Operation
from placement.tensors import Holding, Kind
from placement.testing import Ranks
from placement.transfer import Transfer
from placement.weights import gather
from placement.weights.gather import UnderWay

Patch = pytest.MonkeyPatch
GUARDS: dict[str, Callable[[Patch], None]] = {}


def guard(take_away: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Register a guard under its function's name, with spaces for underscores."""
    GUARDS[take_away.__name__.replace("_", " ")] = take_away
    return take_away


def nothing(*args: Any, **kwargs: Any) -> None:
    """What a guard does that is not there."""


def in_ranks(ranks: Ranks, request: pytest.FixtureRequest, body: Callable[[], None]) -> None:
    """Run ``body`` on all ranks: other processes, where the guard has to be taken away, too."""
    marker = request.node.get_closest_marker("field_report")
    taken = (
        marker.kwargs["guard"]
        if request.config.getoption("--without-guards", default=False)
        else None
    )
    ranks.run(without, taken, body)


def without(guard: str | None, body: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if guard is not None:
            GUARDS[guard](patch)
        body()


@guard
def managed_modules_are_not_moved_by_hand(patch: Patch) -> None:
    for trigger, dest in (
        (Trigger.ONLOAD, Placement.GPU),
        (Trigger.OFFLOAD, Placement.CPU_MANUAL),
        (Trigger.SAVE, Placement.CPU_FSDP2_MANAGED),
    ):
        patch.setitem(TABLE, (Placement.CPU_FSDP2_MANAGED, trigger), Legal(dest, "unguarded"))  # type: ignore[arg-type]


@guard
def ownership_is_read_from_the_module(patch: Patch) -> None:
    patch.setattr(fsdp2.FSDP2Module, "managed", None)


@guard
def unknown_policies_are_refused(patch: Patch) -> None:
    def offloads(group: Any, names: object) -> bool:
        return isinstance(group.offload_policy, CPUOffloadPolicy)

    patch.setattr(fsdp2, "_offloads", offloads)


@guard
def contexts_put_back_what_they_found(patch: Patch) -> None:
    patch.setattr(PlacementManager, "_put_back", nothing)


@guard
def gathered_parameters_are_resharded_first(patch: Patch) -> None:
    def registered(self: fsdp2.FSDP2Module) -> dict[str, torch.nn.Parameter]:
        return dict(self.module.named_parameters(remove_duplicate=False))

    patch.setattr(fsdp2.FSDP2Module, "settle", nothing)
    patch.setattr(fsdp2.FSDP2Module, "parameters", registered)


@guard
def the_resting_place_is_reached_at_once(patch: Patch) -> None:
    patch.setattr(PlacementManager, "_come_to_rest", nothing)


@guard
def training_brings_the_optimizer(patch: Patch) -> None:
    patch.setitem(COMPUTES_WITH, Operation.TRAIN, frozenset({Component.PARAMS}))  # type: ignore[arg-type]


@guard
def a_load_ends_where_the_record_says(patch: Patch) -> None:
    patch.setattr(PlacementManager, "_put_right_what_was_loaded", nothing)


@guard
def step_counters_follow_torchs_rule(patch: Patch) -> None:
    holdings = optimizer._optimizer_holdings

    def without_rule(*args: Any) -> Iterator[Holding]:
        return (replace(holding, host_scalar=False) for holding in holdings(*args))

    patch.setattr(optimizer, "_optimizer_holdings", without_rule)


@guard
def nested_optimizer_state_is_found(patch: Patch) -> None:
    def flat(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"/{k}", v) for k, v in value.items() if isinstance(v, torch.Tensor))

    patch.setattr(optimizer, "tensors_in", flat)


@guard
def buffers_of_a_managed_module_are_placed(patch: Patch) -> None:
    patch.setattr(PlacementManager, "_place_what_the_owner_leaves_to_us", nothing)


def _holding_less(patch: Patch, keep: Callable[[Holding], bool]) -> None:
    holdings = base.module_holdings

    def fewer(*args: Any) -> Iterator[Holding]:
        return (holding for holding in holdings(*args) if keep(holding))

    for owner in (fsdp1, fsdp2, plain):
        patch.setattr(owner, "module_holdings", fewer)


@guard
def gradients_move_with_their_parameters(patch: Patch) -> None:
    _holding_less(patch, lambda holding: holding.kind is not Kind.GRAD)


@guard
def frozen_parameters_move(patch: Patch) -> None:
    _holding_less(patch, lambda h: h.kind is not Kind.PARAM or bool(h.tensor.requires_grad))


@guard
def a_storage_is_copied_once(patch: Patch) -> None:
    patch.setattr(transfer, "storage_address", id)  # each tensor has a storage of its own


@guard
def offloaded_means_landed(patch: Patch) -> None:
    patch.setattr(Transfer, "land", nothing)


@guard
def bases_of_views_move_along(patch: Patch) -> None:
    patch.setattr(transfer, "view_base", nothing)


@guard
def exported_weights_are_owned(patch: Patch) -> None:
    def shared(value: torch.Tensor, device: torch.device, *_: object) -> UnderWay:
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return UnderWay(whole.detach().to(device))

    patch.setattr(gather, "begin", shared)


@guard
def moving_what_is_there_is_no_move(patch: Patch) -> None:
    def strict(self: PlacementManager, trigger: Trigger, dest: Placement) -> None:
        self._mover.bring(dict.fromkeys(self._record.machines, dest), trigger.value)
        self._mover.fire(Component.PARAMS, trigger)

    patch.setattr(PlacementManager, "_move_by_hand", strict)


@guard
def an_inner_context_takes_nothing_from_an_outer(patch: Patch) -> None:
    def everything(self: Leases, lease: Lease) -> dict[Component, Placement]:
        return dict.fromkeys(lease.found, Placement.CPU_MANUAL)

    patch.setattr(Leases, "owed", everything)


@guard
def optimizers_hold_the_sharded_parameters(patch: Patch) -> None:
    patch.setattr(record, "require_own_parameters", nothing)


@guard
def meta_tensors_are_no_placement(patch: Patch) -> None:
    strays = residence.Residence.strays

    def without_meta(*args: Any) -> list[Any]:
        return [site for site in strays(*args) if site.device.type != "meta"]

    patch.setattr(residence.Residence, "strays", without_meta)


@guard
def a_context_knows_the_compute_device(patch: Patch) -> None:
    def first_parameter(self: PlacementManager) -> torch.device:
        return next(self.module.parameters()).device

    patch.setattr(PlacementManager, "device", property(first_parameter))


@guard
def an_idle_context_moves_nothing(patch: Patch) -> None:
    def always(self: mover.Mover, wanted: dict[Component, Placement], asked: str) -> None:
        self._record.check(asked)
        for component in wanted:
            self._journal.moved(asked, component, transfer.Moved(to_device=1))

    patch.setattr(mover.Mover, "bring", always)


@guard
def tensors_that_subclasses_carry_are_held_with_them(patch: Patch) -> None:
    patch.setattr(optimizer, "carried_along", lambda tensor: [])


@guard
def unknown_options_are_refused(patch: Patch) -> None:
    patch.setattr(manager, "_one_of", lambda option, value, *_: value)


@guard
def optimizer_state_is_asked_and_not_the_groups(patch: Patch) -> None:
    holdings = optimizer._optimizer_holdings

    def of_groups(
        wrapped: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]
    ) -> Iterator[Holding]:
        grouped = {id(p) for group in wrapped.param_groups for p in group["params"]}
        names = {name for name, p in parameters.items() if id(p) in grouped}
        return (holding for holding in holdings(wrapped, parameters) if holding.of in names)

    patch.setattr(optimizer, "_optimizer_holdings", of_groups)
