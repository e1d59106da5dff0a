"""explain() says who owns a module, where it is, what is legal, and what will go wrong."""

from __future__ import annotations

import torch
from models import adam, normed, normed_batch, normed_loss, policy, sharded
from torch import nn

from placement import Component, Kind, Placement, Trigger, explain
from placement.device import find_compute_device


def stepped(module: nn.Module, device: str) -> torch.optim.Optimizer:
    optimizer = adam(module.parameters())
    normed_loss(module, [x.to(device) for x in normed_batch()]).backward()
    optimizer.step()
    return optimizer


def test_a_module_with_nothing_amiss(one_rank: str) -> None:
    module = sharded(normed())
    found = explain(module, stepped(module, one_rank))
    assert found.owner == "FSDP2"
    assert found.placements == dict.fromkeys(Component, Placement.GPU)
    assert found.findings == ()
    assert found.legal[Trigger.OFFLOAD] is None
    assert "already" in str(found.legal[Trigger.ONLOAD])
    assert found.bytes_by_device[Kind.PARAM] == {f"{one_rank}:0": 4 * (30 + 5 + 5 + 15 + 3)}
    assert str(found).endswith("Nothing is amiss.")


def test_a_managed_module_says_why_nothing_moves_it(one_rank: str) -> None:
    found = explain(sharded(normed(), policy()))
    assert found.placements[Component.PARAMS] is Placement.CPU_FSDP2_MANAGED
    assert all("CPUOffloadPolicy" in str(why) for why in found.legal.values())
    assert "staging    no: " in str(found)
    assert "instead: use manager.saving()" in str(found)
    assert str(found).count("instead: ") == len(Trigger)
    assert found.findings == ()


def only(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """The one finding, as a person reads it."""
    found = explain(module, optimizer)
    assert len(found.findings) == 1, str(found)
    text = str(found)
    assert found.findings[0].remedy in text
    return text


def test_optimizer_state_apart_from_its_parameters(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = stepped(module, one_rank)
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].cpu()
    assert "the optimizer's state is apart from its parameters" in only(module, optimizer)


def test_buffers_on_the_cpu_under_the_policy(one_rank: str) -> None:
    module = sharded(normed(), policy())
    module.to("cpu")
    text = only(module)
    assert "3 buffers on the CPU" in text
    assert "norm.running_mean (buffer) on cpu" in text


def test_wrapper_and_bytes_at_odds(one_rank: str) -> None:
    module = sharded(normed(), policy(pin_memory=True))
    module.to(one_rank)
    text = str(explain(module))
    assert "whose wrapper says another device" in text
    assert f"first.weight (param) says {one_rank}:0, but its bytes are on cpu" in text
    assert "Attempted to set the storage" in text


def test_managed_parameters_on_the_device(one_rank: str) -> None:
    module = sharded(normed(), policy(pin_memory=False))
    module.to(one_rank)
    assert "that FSDP2's policy keeps on the CPU are elsewhere" in only(module)


def test_a_module_on_two_devices(one_rank: str) -> None:
    module = normed().to(one_rank)
    module.second.to("cpu")
    found = explain(module)
    assert found.placements[Component.PARAMS] is None
    assert "second.weight (param) on cpu" in str(found)
    assert found.legal == {}


def test_an_optimizer_of_other_parameters(one_rank: str) -> None:
    module = normed().to(find_compute_device())
    optimizer = adam(module.parameters())
    assert "of its parameters are not the module's" in only(sharded(module), optimizer)


def test_a_policy_on_some_groups_only(one_rank: str) -> None:
    from torch.distributed.fsdp import fully_shard

    module = normed().to(one_rank)
    fully_shard(module.first, offload_policy=policy())
    fully_shard(module)
    found = explain(module)
    assert found.owner is None
    assert "on some of its groups only" in str(found)


class Tied(nn.Module):
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)


def test_broken_ties(one_rank: str) -> None:
    module = Tied()
    assert "head.weight and embedding.weight" in only(module)
    module.head.weight = module.embedding.weight
    assert explain(module).findings == ()


def test_explaining_moves_and_refuses_nothing(one_rank: str) -> None:
    with torch.device("meta"):
        module = normed()
    assert "meta" in str(explain(module))
    assert explain(nn.ReLU()).findings == ()
