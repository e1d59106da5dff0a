"""What is declared unchanged on the device is not copied back, and is caught if it changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import adam, assert_equal, local, normed, normed_batch, normed_loss, sharded, values
from torch import nn

from placement import (
    ContradictoryOptions,
    DeclarationBroken,
    EventKind,
    Placement,
    PlacementManager,
    Trace,
)


def asleep(
    *, shard: bool = True, trace: Trace | None = None, **options: object
) -> PlacementManager:
    module = sharded(normed()) if shard else normed()
    return PlacementManager(
        module,
        adam(module.parameters()),
        rest=Placement.CPU_MANUAL,
        trace=trace,
        **options,  # type: ignore[arg-type]
    )


def forward(manager: PlacementManager, number: int = 0) -> torch.Tensor:
    return normed_loss(manager.module, [x.to(manager.device) for x in normed_batch(number)])


def to_host(trace: Trace, component: str) -> int:
    return sum(event.bytes_to_host for event in trace if event.component == component)


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("trust", [False, True])
def test_an_evaluation_takes_no_parameter_back(
    one_rank: str, trace: Trace, shard: bool, trust: bool
) -> None:
    manager = asleep(shard=shard, trace=trace, trust=trust)
    before = values(manager.census())
    known = to_host(trace, "params")
    losses = []
    for _ in range(2):
        with manager.evaluating(), torch.no_grad():
            manager.module.eval()
            losses.append(forward(manager).item())
    assert losses[0] == losses[1]
    assert to_host(trace, "params") == known
    assert to_host(trace, "buffers") > 0, "a forward pass may change buffers"
    assert_equal(values(manager.census()), before)


def test_what_goes_back_without_a_copy_has_none_in_flight(one_rank: str, trace: Trace) -> None:
    manager = asleep(trace=trace)
    with manager.evaluating(), torch.no_grad():
        forward(manager)
    copying = [
        (e.kind, e.component) for e in trace if e.kind in (EventKind.ISSUED, EventKind.LANDED)
    ]
    issued = [component for kind, component in copying if kind is EventKind.ISSUED]
    landed = [component for kind, component in copying if kind is EventKind.LANDED]
    assert issued.count("params") == 2, "to rest, and for the evaluation, but not back"
    assert sorted(issued) == sorted(landed)


def test_training_takes_its_changes_back(one_rank: str, trace: Trace) -> None:
    manager, untouched = asleep(trace=trace), asleep()
    untouched.onload()
    for each in (manager, untouched):
        with each.evaluating(), torch.no_grad():
            forward(each)
        with each.training():
            forward(each).backward()
            each.optimizer.step()
    untouched.offload()
    assert_equal(values(manager.census()), values(untouched.census()))


def test_a_training_inside_an_evaluation_is_no_breach(one_rank: str) -> None:
    manager = asleep()
    before = local(manager.module.first.weight).clone()
    with manager.evaluating(), manager.training():
        forward(manager).backward()
        manager.optimizer.step()
    assert not torch.equal(local(manager.module.first.weight), before)


def a_foreach_step(manager: PlacementManager) -> None:
    a_step(manager, foreach=True)


def a_fused_step(manager: PlacementManager) -> None:
    a_step(manager, fused=True)


def a_step(manager: PlacementManager, **implementation: bool) -> None:
    forward(manager).backward()
    torch.optim.AdamW(manager.module.parameters(), lr=0.1, **implementation).step()


def a_data_write(manager: PlacementManager) -> None:
    manager.module.first.weight.data.mul_(-1)


def a_local_write(manager: PlacementManager) -> None:
    with torch.no_grad():
        local(manager.module.second.weight)[0] += 1e-6


CHANGES = [a_foreach_step, a_fused_step, a_data_write, a_local_write]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_an_evaluation_raises_and_is_kept(
    one_rank: str, change: Callable[[PlacementManager], None]
) -> None:
    manager = asleep()
    changed: dict[str, torch.Tensor] = {}

    def evaluate() -> None:
        with manager.evaluating():
            change(manager)
            changed.update((n, local(p).cpu()) for n, p in manager.module.named_parameters())

    with pytest.raises(DeclarationBroken, match=r"leaving evaluate") as raised:
        evaluate()
    assert raised.value.tensors
    assert manager.placement is Placement.CPU_MANUAL
    found = {n: local(p) for n, p in manager.module.named_parameters()}
    assert_equal(found, changed)
    manager.verify()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_reference_model_raises(
    one_rank: str, change: Callable[[PlacementManager], None]
) -> None:
    manager = asleep(unchanged=["*"])
    manager.onload()
    change(manager)
    with pytest.raises(DeclarationBroken, match=r"offload\(\)"):
        manager.offload()
    assert manager.placement is Placement.CPU_MANUAL


def test_an_evaluation_that_says_so_may_change_parameters(one_rank: str) -> None:
    manager = asleep()
    before = local(manager.module.first.weight).clone()
    with manager.evaluating(), manager.evaluating(unchanged=False):
        a_data_write(manager)
    assert torch.equal(local(manager.module.first.weight), -before)
    with manager.evaluating(unchanged=False):
        a_data_write(manager)
    assert torch.equal(local(manager.module.first.weight), before)


def test_the_exception_of_the_body_is_the_one_that_propagates(one_rank: str) -> None:
    manager = asleep()

    def evaluate() -> None:
        with manager.evaluating():
            a_data_write(manager)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        evaluate()
    assert any("declared unchanged" in note for note in raised.value.__notes__)


def test_frozen_layers_are_not_copied_back_from_a_training(one_rank: str, trace: Trace) -> None:
    module = sharded(normed())
    module.first.requires_grad_(False)
    manager = PlacementManager(
        module,
        torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1),
        unchanged=["first.*"],
        rest=Placement.CPU_MANUAL,
        trace=trace,
    )
    frozen = sum(local(p).untyped_storage().nbytes() for p in module.first.parameters())
    for step in range(2):
        known = len(trace)
        with manager.training():
            forward(manager, step).backward()
            manager.optimizer.step()
        moves = [event for event in list(trace)[known:] if event.component == "params"]
        up = sum(event.bytes_to_device for event in moves)
        assert sum(event.bytes_to_host for event in moves) == up - frozen


def test_a_declaration_that_names_nothing_is_refused(one_rank: str) -> None:
    with pytest.raises(ContradictoryOptions, match=r"unchanged= names nothing\.here"):
        PlacementManager(normed(), unchanged=["nothing.here"])


def test_trust_loses_a_change_without_a_word(one_rank: str) -> None:
    """What the documentation says of trust=, shown."""
    manager = asleep(trust=True)
    before = values(manager.census())
    with manager.evaluating():
        a_data_write(manager)
    assert_equal(values(manager.census()), before)


def test_a_state_dict_of_the_host_copy_is_not_written_over(one_rank: str) -> None:
    manager = asleep()
    taken = {n: local(p) for n, p in manager.module.state_dict().items()}
    kept = {name: tensor.clone() for name, tensor in taken.items()}
    with manager.training():
        forward(manager).backward()
        manager.optimizer.step()
    assert_equal(taken, kept)
    assert not torch.equal(local(manager.module.first.weight), kept["first.weight"])


def test_tensors_that_share_bytes_are_declared_together_or_not(one_rank: str) -> None:
    module = nn.Module()
    slab = torch.randn(8)
    module.left, module.right = nn.Parameter(slab[:4]), nn.Parameter(slab[4:])
    manager = PlacementManager(module, unchanged=["left"], rest=Placement.CPU_MANUAL)
    manager.onload()
    module.right.data.fill_(7)  # nobody said that it would not change
    manager.offload()
    assert module.right.tolist() == [7, 7, 7, 7]
