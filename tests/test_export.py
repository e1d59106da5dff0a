"""Weights come out in full from every placement, and are the consumer's own."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from models import byte_batch, byte_engine, normed_batch, normed_engine, whereabouts
from torch import nn

from engine import FSDPEngine, Offload
from placement import Placement, PlacementDrift, PlacementHeld, PlacementManager, Trace
from placement.testing import Ranks


def full_state(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """The truth: gathered from the shards on the CPU, without the code under test."""
    state = {}
    for name, value in engine.module.state_dict().items():
        if not hasattr(value, "to_local"):
            state[name] = value.cpu()
            continue
        local = value.to_local().cpu()
        shards: list[torch.Tensor] = [None] * dist.get_world_size()  # type: ignore[list-item]
        dist.all_gather_object(shards, local)
        state[name] = torch.cat(shards)
    return state


def exports_what_is_there(offload: Offload, situation: str) -> None:
    trace = Trace()
    engine = byte_engine(offload, trace)
    engine.train_batch([x.chunk(dist.get_world_size())[dist.get_rank()] for x in byte_batch(0)])
    if situation == "after an offload by hand":
        engine.manager.offload()
    found, known = whereabouts(engine.manager), len(trace)
    exported = {}
    for name, weight in engine.export_weights(tied="both"):
        assert weight.device == engine.manager.device
        assert type(weight) is torch.Tensor
        assert not weight.requires_grad
        exported[name] = weight
    truth = full_state(engine)
    assert list(exported) == list(truth)
    for name, value in truth.items():
        assert torch.equal(exported[name].cpu(), value), name
    assert whereabouts(engine.manager) == found
    assert not [event for event in list(trace)[known:] if event.moved], "no whole-model move"

    before = {name: value.clone() for name, value in exported.items()}
    engine.train_batch([x.chunk(dist.get_world_size())[dist.get_rank()] for x in byte_batch(1)])
    with engine.manager.training(), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    for name, value in before.items():
        assert torch.equal(exported[name], value), f"{name} is no copy"


SITUATIONS = [(offload, "at rest") for offload in Offload] + [
    (Offload.NONE, "after an offload by hand")
]


@pytest.mark.parametrize(("offload", "situation"), SITUATIONS)
def test_an_export_equals_the_shards_and_never_aliases_them(
    one_rank: str, offload: Offload, situation: str
) -> None:
    exports_what_is_there(offload, situation)


@pytest.mark.parametrize(("offload", "situation"), SITUATIONS)
def test_an_export_on_two_ranks(two_ranks: Ranks, offload: Offload, situation: str) -> None:
    two_ranks.run(exports_what_is_there, offload, situation)


def test_tied_names_come_once_or_under_both(one_rank: str) -> None:
    engine = byte_engine(Offload.MANUAL)
    once = [name for name, _ in engine.export_weights()]
    both = [name for name, _ in engine.export_weights(tied="both")]
    assert "embedding.weight" in once
    assert "head.weight" not in once
    assert both == [*once, "head.weight"]


def test_only_one_tensor_at_a_time_is_on_the_device(one_rank: str) -> None:
    if one_rank != "sim":
        pytest.skip("exact memory is the simulated accelerator's")
    engine = byte_engine(Offload.MANUAL)
    gc.collect()
    rest = torch.accelerator.memory_allocated()
    largest = max(p.numel() * p.element_size() for p in engine.module.parameters())
    torch.accelerator.reset_peak_memory_stats()
    for _, weight in engine.export_weights():
        del weight
    assert torch.accelerator.max_memory_allocated() - rest <= 3 * largest
    assert torch.accelerator.memory_allocated() == rest


def test_bytes_copied_for_an_export_stand_in_its_operation(one_rank: str, trace: Trace) -> None:
    engine = normed_engine(Offload.MANUAL, trace)
    exported = dict(engine.export_weights())
    event = list(trace)[-1]
    assert event.name == "export"
    assert event.bytes_to_device == sum(weight.nbytes for weight in exported.values())


# Consumers that misbehave.


def test_training_is_refused_while_an_export_is_half_consumed(one_rank: str) -> None:
    engine = normed_engine(Offload.MANUAL)
    generator = engine.export_weights()
    next(generator)
    with pytest.raises(PlacementHeld, match=r"export, entered at .*test_export\.py:\d+"):
        engine.train_batch(normed_batch(0))
    with pytest.raises(PlacementHeld), engine.manager.loading():
        pytest.fail("a load would change what the export still reads")
    generator.close()
    engine.train_batch(normed_batch(0))


def test_a_dropped_export_leaves_what_was_found(one_rank: str) -> None:
    engine = normed_engine(Offload.MANUAL)
    found = whereabouts(engine.manager)
    generator = engine.export_weights()
    next(generator)
    del generator
    gc.collect()
    assert whereabouts(engine.manager) == found
    engine.train_batch(normed_batch(0))


def test_an_export_that_was_never_started_holds_nothing(one_rank: str) -> None:
    engine = normed_engine(Offload.MANUAL)
    generator = engine.export_weights()
    engine.train_batch(normed_batch(0))
    assert dict(generator)
    assert engine.manager.placement is Placement.CPU_MANUAL


def test_a_module_that_is_not_sharded_is_exported_too(one_rank: str) -> None:
    module = nn.BatchNorm1d(3)
    manager = PlacementManager(module)
    exported = dict(manager.export_weights())
    assert list(exported) == [
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    exported["weight"].fill_(7)
    assert module.weight.tolist() == [1, 1, 1]


def test_an_export_does_not_go_on_with_tensors_that_a_conversion_replaced(one_rank: str) -> None:
    manager = PlacementManager(nn.BatchNorm1d(2).to(one_rank))
    generator = manager.export_weights()
    next(generator)
    manager.module.to("cpu")
    manager.module.to(one_rank)
    with pytest.raises(PlacementDrift, match=r"module\.to\(\) at .*test_export\.py"):
        next(generator)
    assert list(dict(manager.export_weights())) == list(manager.module.state_dict())
