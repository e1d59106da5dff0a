"""Computing with what is put away is refused by name; whatever can compute is let through."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from models import adam, normed, normed_batch, normed_loss, policy, sharded
from torch import nn

from placement import EventKind, Placement, PlacementManager, PutAway, Trace


def on(device: str) -> torch.Tensor:
    return normed_batch()[0].to(device)


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
def test_a_forward_pass_of_an_offloaded_module_is_refused_by_name(
    one_rank: str, trace: Trace, shard: bool
) -> None:
    module = sharded(normed()) if shard else normed().to(one_rank)
    manager = PlacementManager(module, trace=trace, rest=Placement.CPU_MANUAL)
    with pytest.raises(PutAway, match=r"second\.weight \(param\) on cpu") as caught:
        module(on(one_rank))
    assert caught.value.asked == "a forward pass"
    assert (
        caught.value.state == "the record has the params in cpu_manual, the buffers in cpu_manual"
    )
    assert "manager.evaluating()" in caught.value.instead
    assert list(trace)[-1].kind is EventKind.REFUSAL
    with manager.evaluating():
        module(on(one_rank))


def test_buffers_alone_that_are_put_away_are_refused_too(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    manager.offload(include=["buffers", "grads"])
    with pytest.raises(PutAway) as caught:
        module(on(one_rank))
    assert caught.value.state == "the record has the buffers in cpu_manual"
    manager.onload(include=["buffers"])
    module(on(one_rank))


def test_a_keyword_deep_in_a_batch_is_an_input_too(one_rank: str) -> None:
    class Head(nn.Linear):
        def forward(self, *, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(batch["x"][0])

    module = Head(6, 2)
    manager = PlacementManager(module)
    with pytest.raises(PutAway, match=f"an input is on {manager.device}"):
        module(batch={"x": [on(one_rank)]})


def test_a_plain_module_on_the_cpu_computes_on_the_cpu(one_rank: str) -> None:
    expected = normed().eval()(on("cpu"))
    module = normed().to(one_rank).eval()
    manager = PlacementManager(module)
    manager.offload()
    assert torch.equal(module(on("cpu")), expected)


def test_a_sharded_module_that_is_put_away_does_not_compute_on_the_cpu_either(
    one_rank: str,
) -> None:
    module = sharded(normed())
    manager = PlacementManager(module)
    manager.offload()
    with pytest.raises(PutAway, match="FSDP2 computes on"):
        module(on("cpu"))


def test_a_managed_module_computes_where_it_rests(one_rank: str) -> None:
    module = sharded(normed(), policy())
    manager = PlacementManager(module)
    assert manager.placement is Placement.CPU_FSDP2_MANAGED
    assert module(on(one_rank)).device.type == one_rank


def test_a_module_whose_parts_are_declared_to_stay_on_the_device_computes_with_both(
    one_rank: str,
) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.there, self.here = nn.Linear(6, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.here(self.there(x).cpu())
            return out

    module = Split()
    module.there.to(one_rank)
    manager = PlacementManager(module, stays=["there.*"])
    assert manager.placement is Placement.CPU_MANUAL
    assert module(on(one_rank)).shape == (8, 2)


def test_what_the_tensors_show_decides_and_not_the_record(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module, verify="boundaries")
    manager.offload()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.to(one_rank)  # drift, which the next boundary reports
    module(on(one_rank))


def test_a_state_dict_and_a_load_of_an_offloaded_module_are_no_use_of_it(one_rank: str) -> None:
    module = sharded(normed())
    manager = PlacementManager(module)
    manager.offload()
    module.load_state_dict(module.state_dict())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_guard_leaves_a_compiled_module_one_whole_graph(one_rank: str, backend: str) -> None:
    torch._dynamo.reset()
    module = normed().to(one_rank).eval()
    manager = PlacementManager(module)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        expected = module(on(one_rank))
        for _ in range(2):
            manager.offload()
            with manager.evaluating():
                assert torch.equal(compiled(on(one_rank)), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


def test_a_compiled_wrapper_that_the_manager_has_is_guarded(one_rank: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(normed().to(one_rank).eval(), backend="eager", fullgraph=True)
    manager = PlacementManager(compiled)
    with torch.no_grad():
        with manager.evaluating():
            compiled(on(one_rank))
        manager.offload()
        with pytest.raises(PutAway):
            compiled(on(one_rank))


def test_copies_of_the_module_ask_nobody(one_rank: str) -> None:
    module = normed().to(one_rank)
    manager = PlacementManager(module)
    copied = copy.deepcopy(module)
    pickled = pickle.loads(pickle.dumps(module.cpu()))  # an offload that went past the manager
    manager._record.adopt_anew()
    assert manager.placement is Placement.CPU_MANUAL
    assert copied(on(one_rank)).device.type == one_rank
    assert pickled(on("cpu")).device.type == "cpu"


def test_nobody_asks_once_the_manager_is_detached_or_gone(one_rank: str) -> None:
    for let_go in ("detach", "collect"):
        module = normed()
        optimizer = adam(module.parameters())
        manager: PlacementManager | None = PlacementManager(module, optimizer)
        hooks = len(module._forward_pre_hooks), len(optimizer._optimizer_step_pre_hooks)
        assert hooks == (1, 1)
        if let_go == "detach":
            assert manager is not None
            manager.detach()
        else:
            manager = None
            gc.collect()
        assert not module._forward_pre_hooks
        assert not optimizer._optimizer_step_pre_hooks


def trained(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = normed().to(device)
    optimizer = adam(module.parameters())
    normed_loss(module, [on(device)]).backward()
    optimizer.step()
    return module, optimizer


def test_a_step_while_the_state_is_put_away_is_refused_by_name(one_rank: str) -> None:
    module, optimizer = trained(one_rank)
    manager = PlacementManager(module, optimizer, rest=Placement.CPU_MANUAL)
    with manager.evaluating():
        before = module.second.weight.detach().clone()
        with pytest.raises(PutAway, match=r"first\.weight/exp_avg \(optimizer\) on cpu") as caught:
            optimizer.step()
        assert caught.value.asked == "optimizer.step()"
        assert torch.equal(module.second.weight, before)
    with manager.training():
        optimizer.step()
    optimizer.step()  # parameters, gradients and state, all on the CPU


def test_a_step_while_gradients_are_put_away_is_refused_by_name(one_rank: str) -> None:
    module, optimizer = trained(one_rank)
    manager = PlacementManager(module, optimizer)
    manager.offload(include=["grads"])
    with pytest.raises(PutAway, match=r"second\.weight \(grad\) on cpu"):
        optimizer.step()
    manager.onload(include=["grads"])
    manager.offload(include=["buffers"])  # which a step does not read
    optimizer.step()


def test_the_first_step_of_an_optimizer_needs_no_context(one_rank: str) -> None:
    module = normed().to(one_rank)
    optimizer = adam(module.parameters())
    manager = PlacementManager(module, optimizer)
    normed_loss(module, [on(one_rank)]).backward()
    optimizer.step()
    manager.verify()
