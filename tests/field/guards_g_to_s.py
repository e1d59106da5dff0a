"""Further guards, for the field tests of reports G to S."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from guards import _holding_less, guard, nothing
from torch.distributed.tensor import DTensor

from placement import (
    TABLE,
    Component,
    Legal,
    Operation,
    Placement,
    Trigger,
    agreement,
    manager,
    mover,
    slabs,
)
from placement.agreement import Agreement
from placement.claims import Claim
from placement.leases import Leases
from placement.mover import Mover
from placement.owners import fsdp1, fsdp2
from placement.residence import CPU, Residence
from placement.slabs import Slabs
from placement.states import COMPUTES_WITH
from placement.tensors import Kind
from placement.use import UseGuard
from placement.weights import gather
from placement.weights.gather import UnderWay

Patch = pytest.MonkeyPatch
_EVERYTHING = frozenset(Component)


@guard
def a_failed_pinning_is_not_the_end(patch: Patch) -> None:
    def strict(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    patch.setattr(slabs, "_pinned", strict)


@guard
def pinned_memory_is_carved(patch: Patch) -> None:
    def one_block_each(self: Slabs, sizes: Sequence[int]) -> list[torch.Tensor]:
        blocks = [slabs._Slab(slabs._ceiling(size)) for size in sizes]
        self._slabs += blocks
        return [block._piece(0, size) for block, size in zip(blocks, sizes, strict=True)]

    patch.setattr(Slabs, "carve", one_block_each)


@guard
def host_memory_is_let_go_on_request(patch: Patch) -> None:
    patch.setattr(Slabs, "release", lambda self: 0)


@guard
def host_copies_are_pinned_before_they_are_written(patch: Patch) -> None:
    def pageable(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    patch.setattr(slabs, "_pinned", pageable)


@guard
def leftovers_are_looked_for(patch: Patch) -> None:
    def none(*args: Any) -> Iterator[Any]:
        return iter(())

    patch.setattr(mover, "find_leftovers", none)


@guard
def what_is_declared_to_stay_stays(patch: Patch) -> None:
    def moves(self: Residence, holding: object) -> bool:
        return False

    patch.setattr(Residence, "stays", moves)


@guard
def evaluating_brings_the_model(patch: Patch) -> None:
    patch.setitem(COMPUTES_WITH, Operation.EVALUATE, frozenset())


@guard
def loading_brings_nothing(patch: Patch) -> None:
    patch.setitem(COMPUTES_WITH, Operation.LOAD, _EVERYTHING)


@guard
def flat_parameters_are_brought_for_their_state_dict(patch: Patch) -> None:
    patch.setattr(fsdp1.FSDP1Module, "stages", {})


@guard
def flat_parameters_are_exported_where_they_rest(patch: Patch) -> None:
    patch.setattr(fsdp1.FSDP1Module, "weights_in_place", False)


@guard
def an_export_stages_each_shard(patch: Patch) -> None:
    def unstaged(value: torch.Tensor, *_: object) -> UnderWay:
        value = value.detach()
        return UnderWay((value.full_tensor() if isinstance(value, DTensor) else value).clone())

    patch.setattr(gather, "begin", unstaged)


@guard
def an_export_gathers_the_shards(patch: Patch) -> None:
    def shard(value: torch.Tensor, device: torch.device, *_: object) -> UnderWay:
        value = value.detach()
        local = value.to_local() if isinstance(value, DTensor) else value
        return UnderWay(local.to(device, copy=True))

    patch.setattr(gather, "begin", shard)


@guard
def ranks_meet_before_a_collective_operation(patch: Patch) -> None:
    @contextmanager
    def alone(self: Agreement, *args: Any) -> Iterator[None]:
        yield

    patch.setattr(Agreement, "together", alone)


@guard
def a_trigger_out_of_order_is_refused(patch: Patch) -> None:
    for placement, trigger in (
        (Placement.GPU, Trigger.ONLOAD),
        (Placement.CPU_MANUAL, Trigger.OFFLOAD),
    ):
        patch.setitem(TABLE, (placement, trigger), Legal(placement, "unguarded"))


@guard
def a_module_has_one_manager(patch: Patch) -> None:
    patch.setattr(manager, "watch", nothing)
    patch.setattr(Claim, "refuse_shared", nothing)  # which would refuse it, too


@guard
def a_policy_is_read_from_its_class(patch: Patch) -> None:
    def is_there(group: Any, names: object) -> bool:
        return group.offload_policy is not None

    patch.setattr(fsdp2, "_offloads", is_there)


@guard
def the_device_is_kept_with_its_index(patch: Patch) -> None:
    target: Callable[..., torch.device | None] = Mover._target

    def forgetful(self: Mover, *args: Any) -> torch.device | None:
        found = target(self, *args)
        return found if found is None or found == CPU else torch.device(found.type)

    patch.setattr(Mover, "_target", forgetful)


@guard
def computing_with_what_is_put_away_is_refused(patch: Patch) -> None:
    patch.setattr(UseGuard, "before_forward", nothing)
    patch.setattr(UseGuard, "before_step", nothing)


@guard
def tensors_in_plain_attributes_are_named(patch: Patch) -> None:
    patch.setattr(mover, "find_unregistered", lambda *_: iter(()))


@guard
def ranks_compare_what_their_optimizers_hold(patch: Patch) -> None:
    patch.setattr(manager, "optimizer_manifest", lambda *_: {})


@guard
def a_phase_of_another_thread_is_refused(patch: Patch) -> None:
    patch.setattr(Leases, "refuse_other_threads", nothing)


@guard
def collectives_of_an_export_wait_no_longer_than_the_deadline(patch: Patch) -> None:
    @contextmanager
    def unlimited(deadline: object) -> Iterator[None]:
        yield

    patch.setattr(agreement, "_lowered_timeouts", unlimited)


@guard
def trainable_parameters_move(patch: Patch) -> None:
    _holding_less(patch, lambda h: h.kind is not Kind.PARAM or not h.tensor.requires_grad)
