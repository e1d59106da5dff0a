"""What the manager adopts, what it refuses to, and that a refusal moves nothing."""

from __future__ import annotations

import gc

import pytest
import torch
from models import adam, normed, normed_batch, normed_loss, policy, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from placement import (
    CannotMove,
    Census,
    Component,
    ContradictoryOptions,
    ForeignOptimizer,
    Holding,
    Kind,
    NoAccelerator,
    NothingToPlace,
    OwnershipChanged,
    OwnershipUnclear,
    Placement,
    PlacementDrift,
    PlacementManager,
    ScatteredModule,
    Trace,
    owner_of,
)
from placement.census import take_census


def look(module: nn.Module) -> list[str]:
    return [str(site) for site in take_census(owner_of(module).holdings()).sites]


# What it reads from the module.


@pytest.mark.parametrize(
    ("on", "expected"), [("device", Placement.GPU), ("cpu", Placement.CPU_MANUAL)]
)
def test_the_placement_of_a_plain_module_is_where_its_tensors_are(
    one_rank: str, on: str, expected: Placement
) -> None:
    module = normed().to(one_rank if on == "device" else "cpu")
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer)
    assert manager.placement is expected
    assert manager.placements.get(Component.OPTIMIZER) is expected, (
        "no state yet: its parameters' placement"
    )
    assert manager.owner.name == "plain module"


def test_fsdp2_without_a_policy_is_moved_by_hand(one_rank: str) -> None:
    manager = PlacementManager(sharded(normed()))
    assert manager.placement is Placement.GPU
    assert manager.placements.get(Component.OPTIMIZER) is None
    manager.offload()
    assert manager.placement is Placement.CPU_MANUAL


@pytest.mark.parametrize("pin_memory", [True, False])
def test_the_policy_is_read_from_fsdp2_and_not_from_a_flag(one_rank: str, pin_memory: bool) -> None:
    module = sharded(normed(), policy(pin_memory=pin_memory))
    module.offload_policy = False  # type: ignore[assignment]  # an engine's flag that lies
    assert PlacementManager(module).placement is Placement.CPU_FSDP2_MANAGED


def test_on_the_cpu_alone_does_not_mean_managed(one_rank: str) -> None:
    module = sharded(normed())
    module.to("cpu")
    assert PlacementManager(module).placement is Placement.CPU_MANUAL


def test_a_class_derived_from_the_policy_is_the_policy(one_rank: str) -> None:
    class Mine(CPUOffloadPolicy):
        pass

    manager = PlacementManager(sharded(normed(), Mine()))
    assert manager.placement is Placement.CPU_FSDP2_MANAGED


def test_buffers_of_a_managed_module_are_put_on_the_compute_device(
    one_rank: str, trace: Trace
) -> None:
    module = sharded(normed(), policy())
    for buffer in module.buffers():
        buffer.data = buffer.data.cpu()
    PlacementManager(module, trace=trace).verify()
    assert {buffer.device.type for buffer in module.buffers()} == {one_rank}
    assert [(event.kind.value, event.name) for event in trace.moves()] == [("move", "adopt")]
    normed_loss(module, [x.to(one_rank) for x in normed_batch()]).backward()


def test_parameters_that_fsdp2_ignores_belong_on_the_compute_device(one_rank: str) -> None:
    module = normed().to(one_rank)
    mesh = init_device_mesh(one_rank, (1,))
    fully_shard(
        module,
        mesh=mesh,
        offload_policy=policy(),
        ignored_params=set(module.second.parameters()),
    )
    manager = PlacementManager(module)
    assert manager.placement is Placement.CPU_FSDP2_MANAGED
    manager.verify()
    assert module.second.weight.device.type == one_rank


# What it refuses.


def test_a_parameter_on_the_wrong_device_is_refused_by_name(one_rank: str) -> None:
    module = normed().to(one_rank)
    module.second.to("cpu")
    before = look(module)
    with pytest.raises(ScatteredModule) as caught:
        PlacementManager(module)
    assert caught.value.tensors == (
        "second.weight (param) on cpu",
        "second.bias (param) on cpu",
    )
    assert "stays=" in caught.value.instead
    assert look(module) == before


def test_what_is_declared_to_stay_is_left_alone(one_rank: str) -> None:
    module = normed().to(one_rank)
    module.second.to("cpu")
    manager = PlacementManager(module, stays=["second.*"], verify="always")
    assert manager.placement is Placement.GPU
    manager.offload()
    manager.onload()
    assert module.first.weight.device.type == one_rank
    assert module.second.weight.device.type == "cpu"


def test_a_pattern_that_matches_nothing_is_refused(one_rank: str) -> None:
    with pytest.raises(ContradictoryOptions, match=r"secnd\.\*"):
        PlacementManager(normed(), stays=["second.*", "secnd.*"])


def test_a_tensor_that_stays_may_not_share_bytes_with_one_that_moves(one_rank: str) -> None:
    module = nn.Module()
    module.one = nn.Parameter(torch.zeros(4, device=one_rank))
    module.register_buffer("two", module.one.detach()[1:])
    manager = PlacementManager(module, stays=["two"])
    with pytest.raises(CannotMove, match="share"):
        manager.offload()
    assert manager.placement is Placement.GPU
    assert module.one.device.type == one_rank


def test_the_policy_on_some_groups_only_is_refused_naming_the_groups(one_rank: str) -> None:
    module = normed().to(one_rank)
    mesh = init_device_mesh(one_rank, (1,))
    fully_shard(module.first, mesh=mesh, offload_policy=policy())
    fully_shard(module, mesh=mesh)
    before = look_at_tensors(module)
    with pytest.raises(OwnershipUnclear) as caught:
        PlacementManager(module)
    assert set(caught.value.tensors) == {"first: CPUOffloadPolicy", "(root): no offload"}
    assert look_at_tensors(module) == before


def test_a_policy_of_an_unknown_class_is_refused_rather_than_read_as_none(one_rank: str) -> None:
    class Partial(OffloadPolicy):
        pass

    with pytest.raises(OwnershipUnclear, match="Partial"):
        PlacementManager(sharded(normed(), Partial()))


def test_no_policy_object_at_all_is_no_policy(one_rank: str) -> None:
    mesh = init_device_mesh(one_rank, (1,))
    module = fully_shard(normed().to(one_rank), mesh=mesh, offload_policy=None)  # as verl does
    manager = PlacementManager(module)
    assert manager.owner.managed is None
    manager.offload()
    manager.onload()


def test_an_optimizer_over_other_parameters_is_refused(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = adam(module.parameters())  # made too early: fully_shard makes new parameters
    sharded(module)
    before = look(module)
    with pytest.raises(ForeignOptimizer, match="before fully_shard") as caught:
        PlacementManager(module, optimizer)
    assert len(caught.value.tensors) == 5
    assert look(module) == before


def test_an_optimizer_made_while_parameters_are_gathered_is_refused(one_rank: str) -> None:
    module = sharded(normed())
    module.unshard()
    optimizer = adam(module.parameters())
    module.reshard()
    with pytest.raises(ForeignOptimizer, match="gathered"):
        PlacementManager(module, optimizer)


def test_a_module_without_parameters_is_refused(one_rank: str) -> None:
    with pytest.raises(NothingToPlace, match="ReLU has no parameters"):
        PlacementManager(nn.ReLU())


def test_wrapper_and_bytes_at_odds_are_refused_by_name(one_rank: str) -> None:
    module = sharded(normed(), policy(pin_memory=True))
    module.to(one_rank)
    before = look(module)
    with pytest.raises(ScatteredModule) as caught:
        PlacementManager(module)
    odd = f"first.weight (param) says {one_rank}:0, but its bytes are on cpu"
    assert odd in caught.value.tensors
    assert look(module) == before


def test_a_managed_module_moved_without_pinning_is_refused_too(one_rank: str) -> None:
    module = sharded(normed(), policy(pin_memory=False))
    module.to(one_rank)  # wrapper and bytes agree, but FSDP2 wants them on the CPU
    with pytest.raises(ScatteredModule, match="moved by hand under a policy"):
        PlacementManager(module)


def test_meta_tensors_are_no_placement(one_rank: str) -> None:
    with torch.device("meta"):
        module = normed()
    with pytest.raises(ScatteredModule, match="meta"):
        PlacementManager(module)


@pytest.mark.parametrize(
    ("offload_policy", "rest"),
    [(policy(), Placement.CPU_MANUAL), (policy(), Placement.GPU), (None, "managed")],
)
def test_a_policy_and_a_resting_place_that_exclude_each_other_are_refused(
    one_rank: str, offload_policy: CPUOffloadPolicy | None, rest: Placement | str
) -> None:
    module = sharded(normed(), offload_policy)
    before = look(module)
    wanted = Placement.CPU_FSDP2_MANAGED if rest == "managed" else rest
    with pytest.raises(ContradictoryOptions, match="rest="):
        PlacementManager(module, rest=wanted)
    with pytest.raises(ContradictoryOptions, match="rest="):
        PlacementManager(module, rest=wanted.value)
    assert look(module) == before


def test_another_device_than_the_module_was_sharded_for_is_refused(one_rank: str) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices, to shard for one and ask for the other")
    with pytest.raises(ContradictoryOptions, match=f"computes on {one_rank}:0"):
        PlacementManager(sharded(normed()), device=f"{one_rank}:1")


def test_a_device_that_is_not_there_is_refused(one_rank: str) -> None:
    with pytest.raises(NoAccelerator, match="hpu"):
        PlacementManager(normed(), device="hpu")


# What it notices afterwards.


def test_a_tensor_moved_behind_its_back_is_drift_with_the_name(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    manager.verify()
    module.first.weight.data = module.first.weight.data.cpu()
    with pytest.raises(PlacementDrift) as caught:
        manager.verify()
    assert caught.value.tensors == ("first.weight (param) on cpu",)
    with pytest.raises(PlacementDrift):
        manager.offload()
    assert module.second.bias.device.type == one_rank, "nothing moved"
    with pytest.raises(PlacementDrift), manager.saving():
        pytest.fail("the context must not be entered")


def test_a_stray_buffer_of_a_managed_module_is_drift(one_rank: str) -> None:
    module = sharded(normed(), policy())
    manager = PlacementManager(module)
    module.norm.running_mean.data = module.norm.running_mean.data.cpu()
    with pytest.raises(PlacementDrift, match=r"norm.running_mean \(buffer\) on cpu"):
        manager.verify()


def test_wrapping_after_adoption_is_noticed(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    sharded(module)
    with pytest.raises(OwnershipChanged, match="plain module and is FSDP2 now"):
        manager.offload()


def test_a_single_name_needs_no_list_around_it(one_rank: str) -> None:
    """Letter by letter, one of these patterns would be ``*``, and match everything."""
    module = normed().to(one_rank)
    module.second.cpu()
    manager = PlacementManager(module, stays="second.*", unchanged="first.*")
    manager.offload("buffers")
    assert manager.placements[Component.PARAMS] is Placement.GPU
    assert manager.placements[Component.BUFFERS] is Placement.CPU_MANUAL
    manager.offload(Component.PARAMS)
    assert manager.placements[Component.PARAMS] is Placement.CPU_MANUAL
    manager.onload()
    assert module.first.weight.device.type == one_rank
    assert module.second.weight.device.type == "cpu"


def test_a_policy_that_comes_after_adoption_is_named(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    sharded(module, policy())
    with pytest.raises(OwnershipChanged, match="is FSDP2 with CPUOffloadPolicy now"):
        manager.offload()


def test_another_policy_after_adoption_is_noticed(one_rank: str) -> None:
    module = normed().to(one_rank)
    mesh = init_device_mesh(one_rank, (1,))
    fully_shard(module.first, mesh=mesh)
    manager = PlacementManager(module)
    fully_shard(module.second, mesh=mesh)
    with pytest.raises(OwnershipChanged):
        manager.verify()


# The census.


def test_a_storage_is_counted_once_however_many_look_into_it() -> None:
    weight = nn.Parameter(torch.zeros(10))
    census = take_census(
        [
            Holding("a", Kind.PARAM, weight),
            Holding("b", Kind.PARAM, weight),
            Holding("c", Kind.BUFFER, weight.detach()[2:4]),
        ]
    )
    assert isinstance(census, Census)
    assert census.bytes_by_device() == {"cpu": 40}


def test_the_census_counts_what_the_allocator_counts(one_rank: str) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    held = manager.census().bytes_by_device()[f"{one_rank}:0"]
    if one_rank == "sim":  # exact there; real allocators round up
        assert held == torch.accelerator.memory_allocated() - before
        manager.offload()
        assert torch.accelerator.memory_allocated() == before


def look_at_tensors(module: nn.Module) -> list[str]:
    return [f"{name} {p.device}" for name, p in module.named_parameters()]


def test_where_to_rest_is_named_as_a_trace_names_it(one_rank: str) -> None:
    manager = PlacementManager(normed().to(one_rank), rest="cpu_manual")
    assert manager.placements[Component.PARAMS] is Placement.CPU_MANUAL
    with pytest.raises(ContradictoryOptions, match="gpu, cpu_manual, cpu_fsdp2_managed"):
        PlacementManager(normed().to(one_rank), rest="cpu")
