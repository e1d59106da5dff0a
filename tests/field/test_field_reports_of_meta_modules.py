"""Faults reported in public around modules that are made on the meta device, and what happens here
instead."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial

import guards_a_to_f  # noqa: F401  (registers the guards)
import pytest
import torch
import torch.distributed as dist
from guards import in_ranks
from models import (
    Normed,
    adam,
    assert_equal,
    local,
    normed,
    normed_batch,
    normed_loss,
    policy,
    sharded,
    values,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from placement import (
    ContradictoryOptions,
    NotMaterialised,
    Placement,
    PlacementManager,
    find_compute_device,
    materialising,
)
from placement.testing import Ranks

field_report = pytest.mark.field_report

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Rotary(nn.Module):
    """Has a buffer that is computed and in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.compute()

    def compute(self) -> None:
        self.frequencies.copy_(torch.arange(4.0) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale(x) * self.frequencies
        return out


class Tied(nn.Module):
    """A head that has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(tokens))
        return out


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def load_from_rank_0(module: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Load ``whole``, which rank 0 alone needs to have, tensor by tensor over the device."""
    device, loaded = find_compute_device(), {}
    for name, target in module.state_dict().items():
        if dist.get_rank() == 0:
            full = whole[name].detach().to(device)
        else:
            full = torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(full, 0)
        if isinstance(target, DTensor):
            full = distribute_tensor(
                full, target.device_mesh, target.placements, src_data_rank=None
            )
        loaded[name] = full
    module.load_state_dict(loaded)


def places(module: nn.Module) -> tuple[set[str], set[str]]:
    """Where parameters and buffers are."""
    return (
        {local(parameter).device.type for parameter in module.parameters()},
        {buffer.device.type for buffer in module.buffers()},
    )


@field_report("D03", guard="what nobody wrote to is refused")
@pytest.mark.parametrize("shard", [nn.Module.requires_grad_, sharded], ids=["plain", "fsdp2"])
def test_a_computed_buffer_that_no_checkpoint_has_is_not_left_as_it_was_allocated(
    one_rank: str, shard: Callable[[nn.Module], nn.Module]
) -> None:
    source = Rotary()
    (x,) = torch.randn(1, 2, 4)
    expected = source(x)
    module = shard(on_meta(Rotary))
    with pytest.raises(NotMaterialised, match=r"frequencies \(buffer\)") as caught:
        with materialising(module):
            load_from_rank_0(module, source.state_dict())
    assert caught.value.tensors == ("frequencies (buffer)",)
    assert module.frequencies.isnan().all()  # nothing that could be taken for values
    module = shard(on_meta(Rotary))
    with materialising(module):
        load_from_rank_0(module, source.state_dict())
        module.compute()
    with PlacementManager(module).evaluating():
        torch.testing.assert_close(module(x.to(one_rank)).cpu(), expected)


@field_report("D10", guard="what nobody wrote to is refused")
def test_after_a_sleep_that_discards_everything_a_reload_of_parameters_alone_is_not_enough(
    one_rank: str,
) -> None:
    module = normed().to(one_rank).eval()
    manager = PlacementManager(module)
    (x,) = (tensor.to(one_rank) for tensor in normed_batch())
    saved = {name: value.cpu() for name, value in module.state_dict().items()}
    parameters = {name: saved[name] for name, _ in module.named_parameters()}
    expected = module(x)
    gc.collect()
    awake = torch.accelerator.memory_allocated()
    module.to("meta")
    assert torch.accelerator.memory_allocated() < awake
    with pytest.raises(NotMaterialised) as caught, materialising(module):
        module.load_state_dict(parameters, strict=False)
    # torch itself gives a missing counter of batches its first value.
    assert caught.value.tensors == ("norm.running_mean (buffer)", "norm.running_var (buffer)")
    module.to("meta")
    with materialising(module):
        module.load_state_dict(saved)
    with manager.evaluating():
        assert torch.equal(module(x), expected)


@field_report("F02", guard="ties outlive the meta device")
def test_tied_embeddings_made_on_the_meta_device_stay_tied(one_rank: str) -> None:
    source = Tied()
    tokens = torch.arange(8)
    twin = adam(source.parameters())
    source(tokens).square().mean().backward()
    before = {name: value.clone() for name, value in source.state_dict().items()}
    twin.step()
    module = on_meta(Tied)
    with materialising(module):
        load_from_rank_0(module, before)
    assert module.head.weight is module.embedding.weight
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer)
    with manager.training():
        module(tokens.to(one_rank)).square().mean().backward()
        optimizer.step()
    trained = dict(manager.export_weights(tied="both"))
    for name in ("embedding.weight", "head.weight"):
        torch.testing.assert_close(trained[name].cpu(), source.embedding.weight.detach())


@field_report("F02", guard="ties outlive the meta device")
def test_a_load_that_assigns_two_tensors_to_tied_names_is_refused(one_rank: str) -> None:
    module = on_meta(Tied)
    state = {name: value.to(one_rank) for name, value in Tied().state_dict().items()}
    state["head.weight"] = state["embedding.weight"].clone()
    with pytest.raises(NotMaterialised, match=r"embedding\.weight and head\.weight"):
        with materialising(module):
            module.load_state_dict(state, assign=True)


@field_report("L05", guard="memory is given where the module is to rest")
@pytest.mark.parametrize("rest", [Placement.GPU, Placement.CPU_MANUAL])
def test_a_load_into_a_meta_module_has_its_memory_where_the_module_is_to_rest(
    one_rank: str, rest: Placement
) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    module = on_meta(Normed)
    with materialising(module, rest):
        module.load_state_dict(normed().state_dict())
    manager = PlacementManager(module)
    assert manager.placement is rest
    assert_equal(
        {name: value.cpu() for name, value in module.state_dict().items()},
        dict(normed().state_dict()),
    )
    on_device = torch.accelerator.max_memory_allocated() > before
    assert on_device is (rest is Placement.GPU)


def loads_from_rank_0_under_the_policy() -> None:
    device = find_compute_device()
    module = sharded(on_meta(Normed), policy())
    state = normed().state_dict() if dist.get_rank() == 0 else {}
    with materialising(module):
        load_from_rank_0(module, state)
    assert places(module) == ({"cpu"}, {device.type})
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer)
    loaded = get_model_state_dict(module, options=WHOLE)
    if dist.get_rank() == 0:
        assert_equal({name: value.cpu() for name, value in loaded.items()}, dict(state))
    with manager.training():
        normed_loss(module, [x.to(device) for x in normed_batch()]).backward()
        optimizer.step()
    manager.verify()


@field_report("A14", guard="memory is given where the module is to rest")
def test_a_load_that_spares_memory_leaves_parameters_where_the_policy_wants_them_on_every_rank(
    two_ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    in_ranks(two_ranks, request, loads_from_rank_0_under_the_policy)


def loads_with_and_without_a_place(rest: Placement | None) -> None:
    device = find_compute_device()
    for managed in (True, False):
        state = normed().state_dict() if dist.get_rank() == 0 else {}
        module = sharded(on_meta(Normed), policy() if managed else None)
        if rest is not None and managed is not (rest is Placement.CPU_FSDP2_MANAGED):
            with pytest.raises(ContradictoryOptions, match="choose one of the two"):
                with materialising(module, rest):
                    pass
            assert places(module) == ({"meta"}, {"meta"})
            continue
        with materialising(module, rest):
            load_from_rank_0(module, state)
        at_rest = "cpu" if managed or rest is Placement.CPU_MANUAL else device.type
        buffers = "cpu" if rest is Placement.CPU_MANUAL else device.type
        assert places(module) == ({at_rest}, {buffers})
        loaded = values(PlacementManager(module).census())
        whole = sharded(normed().to(device))
        for name, parameter in whole.named_parameters():
            assert torch.equal(loaded[f"param {name}"], local(parameter).cpu())


@field_report("S06", guard="a resting place that the owner forbids is refused")
@pytest.mark.parametrize("rest", Placement)
def test_a_load_to_a_given_place_agrees_with_the_owner_or_is_refused(
    two_ranks: Ranks, request: pytest.FixtureRequest, rest: Placement
) -> None:
    in_ranks(two_ranks, request, partial(loads_with_and_without_a_place, rest))


@field_report("S06", guard="memory is given where the module is to rest")
def test_a_place_that_is_not_given_is_the_owners(
    two_ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    in_ranks(two_ranks, request, partial(loads_with_and_without_a_place, None))
