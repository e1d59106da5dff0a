"""Further guards that field tests name: of the reports whose ids begin with A to F."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from guards import Patch, _holding_less, guard, nothing
from torch import nn
from torch.distributed.tensor import DTensor

from placement import (
    Component,
    Mode,
    Placement,
    PlacementManager,
    materialise,
    optimizer,
    record,
    twins,
)
from placement.mover import Begun, Mover
from placement.owners import base, ddp, fsdp1, fsdp2
from placement.owners.fsdp1 import FSDP1Module
from placement.owners.plain import PlainModule
from placement.residence import CPU, Residence
from placement.states import COMPUTES_WITH, Operation
from placement.tensors import Kind
from placement.transfer import Part, Transfer
from placement.watch import ForeignWatch
from placement.weights import gather, plan
from placement.weights.gather import UnderWay


@guard
def a_managed_module_refuses_conversions(patch: Patch) -> None:
    patch.setattr(ForeignWatch, "before_conversion", nothing)


@guard
def exported_shards_are_staged_on_the_device(patch: Patch) -> None:
    def where_it_rests(value: torch.Tensor, *_: object) -> UnderWay:
        value = value.detach()
        return UnderWay(value.full_tensor() if isinstance(value, DTensor) else value.clone())

    patch.setattr(gather, "begin", where_it_rests)


@guard
def names_are_without_the_parts_of_wrappers(patch: Patch) -> None:
    for user in (base, ddp, fsdp1, fsdp2, plan):
        patch.setattr(user, "canonical_names", lambda module: str)


@guard
def everything_is_copied_before_anything_is_swapped(patch: Patch) -> None:
    copy = Transfer._copy

    def copy_and_swap(self: Transfer, bucket: Sequence[Any], part: Any) -> None:
        for storage in bucket:
            copy(self, [storage], part)
            for tensor, twin in zip(storage.tensors, storage.twins, strict=True):
                tensor.data = twin

    patch.setattr(Transfer, "_copy", copy_and_swap)


@guard
def what_a_gathering_owner_needs_is_brought(patch: Patch) -> None:
    patch.setattr(FSDP1Module, "stages", {})


@guard
def a_load_brings_nothing_to_the_device(patch: Patch) -> None:
    patch.setitem(COMPUTES_WITH, Operation.LOAD, frozenset(Component))  # type: ignore[arg-type]


@guard
def tensors_keep_their_identity(patch: Patch) -> None:
    swap_and_land = Mover._swap_and_land

    def replace(self: Mover, begun: Begun) -> None:
        held = self._record.optimizer
        if Component.OPTIMIZER in begun.triggers and held is not None:
            part = begun.transfer._parts[Component.OPTIMIZER]
            twins = {id(tensor): twin for tensor, twin in part.swaps()}
            part.storages, part.wrappers = [], []
            for entries in held.state.values():
                entries.update({k: twins.get(id(value), value) for k, value in entries.items()})
        swap_and_land(self, begun)

    patch.setattr(Mover, "_swap_and_land", replace)


@guard
def tensors_are_matched_with_their_own_copies(patch: Patch) -> None:
    swaps = Part.swaps

    def by_position(self: Part) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        pairs = list(swaps(self))
        for (tensor, _), (_, twin) in zip(pairs, reversed(pairs), strict=True):
            yield tensor, twin

    patch.setattr(Part, "swaps", by_position)


@guard
def the_compute_device_has_the_meshs_type(patch: Patch) -> None:
    def one_vendors(*_: object) -> torch.device:
        return torch.device("cuda", torch.accelerator.current_device_index())

    patch.setattr(record, "_agreed_device", one_vendors)


@guard
def wrappers_keep_their_global_shape(patch: Patch) -> None:
    rewrap = twins.rewrap

    def from_local(tensor: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return rewrap(tensor, inner)
        local, spec = inner["_local_tensor"], copy.copy(tensor._spec)
        assert spec.tensor_meta is not None
        spec.tensor_meta = spec.tensor_meta._replace(shape=local.size(), stride=local.stride())
        return DTensor(local, spec, requires_grad=tensor.requires_grad)

    patch.setattr(twins, "rewrap", from_local)


@guard
def buffers_move_with_the_model(patch: Patch) -> None:
    _holding_less(patch, lambda holding: holding.kind is not Kind.BUFFER)


@guard
def unreduced_gradients_move_along(patch: Patch) -> None:
    holdings = fsdp2.FSDP2Module.holdings

    def reduced(self: fsdp2.FSDP2Module) -> Iterator[Any]:
        whole = (fsdp2._UNREDUCED, fsdp2._PART_REDUCED)
        return (holding for holding in holdings(self) if holding.detail not in whole)

    patch.setattr(fsdp2.FSDP2Module, "holdings", reduced)


@guard
def tensors_are_read_anew_for_each_move(patch: Patch) -> None:
    read = PlainModule.parameters

    def remembered(self: PlainModule) -> Mapping[str, nn.Parameter]:
        first: Mapping[str, nn.Parameter] = self.__dict__.setdefault("first", read(self))
        return first

    patch.setattr(PlainModule, "parameters", remembered)


@guard
def state_is_looked_for_in_wrapped_optimizers(patch: Patch) -> None:
    patch.setattr(optimizer, "optimizers_in", lambda wrapper: iter([wrapper]))


@guard
def the_end_of_a_save_or_a_load_is_a_boundary(patch: Patch) -> None:
    patch.setattr(PlacementManager, "_require_what_was_found", nothing)


@guard
def gradients_on_the_host_need_a_backend_for_it(patch: Patch) -> None:
    patch.setattr(fsdp2.FSDP2Module, "require_collectives", nothing)


@guard
def what_nobody_wrote_to_is_refused(patch: Patch) -> None:
    patch.setattr(materialise, "_unwritten", lambda *_: [])


@guard
def ties_outlive_the_meta_device(patch: Patch) -> None:
    patch.setattr(materialise, "_tie_again", nothing)
    patch.setattr(materialise, "_apart", lambda _: [])


@guard
def memory_is_given_where_the_module_is_to_rest(patch: Patch) -> None:
    def elsewhere(self: Residence, holding: object, placement: Placement) -> torch.device:
        return CPU if placement is Placement.GPU else self._compute_device

    patch.setattr(Residence, "of", elsewhere)


@guard
def a_resting_place_that_the_owner_forbids_is_refused(patch: Patch) -> None:
    patch.setattr(materialise, "require_possible", nothing)


@guard
def a_managed_module_is_used_where_it_rests(patch: Patch) -> None:
    def everything(self: PlacementManager, operation: object) -> tuple[frozenset[Component], Mode]:
        return frozenset(self.placements), Mode.STAGED

    patch.setattr(PlacementManager, "_needs", everything)
