"""Whoever owns a module, in whatever placement: the same weights, shards and names come out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from exported_modules import (
    ON_FOUR_RANKS,
    ON_TWO_RANKS,
    Make,
    compiled,
    fsdp2,
    plain,
    reader,
    truth,
)
from models import assert_equal, whereabouts
from torch import nn

from placement import (
    ContradictoryOptions,
    GroupPoisoned,
    Placement,
    PlacementHeld,
    PlacementManager,
    RankLost,
    RanksDisagree,
    Trace,
)
from placement.testing import Ranks

RESTS = [None, Placement.CPU_MANUAL]


def managed(make: Make, rest: Placement | None, trace: Trace | None = None) -> PlacementManager:
    """The module as it was made, or resting on the CPU where it may."""
    manager = PlacementManager(make(), trace=trace if trace is not None else Trace())
    if rest is not None and manager.owner.managed is None:
        manager.offload()
    return manager


def on_cpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.cpu() for name, weight in weights.items()}


def exports_what_a_plain_twin_has(make: Make, rest: Placement | None) -> None:
    trace = Trace()
    manager = managed(make, rest, trace)
    found, moves = whereabouts(manager), trace.moves()
    exported = dict(manager.export_weights(tied="both"))
    assert list(exported) == list(truth())
    assert_equal(on_cpu(exported), truth())
    for name, weight in exported.items():
        assert type(weight) is torch.Tensor, name
        assert weight.device == manager.device, name
        assert weight.is_contiguous(), name
    assert len({weight.untyped_storage().data_ptr() for weight in exported.values()}) == len(
        exported
    )
    assert whereabouts(manager) == found
    assert trace.moves() == moves, "no whole-model move"

    halved = dict(manager.export_weights(dtype=torch.bfloat16, tied="both", bucket_bytes=1))
    assert_equal(on_cpu(halved), reader().to(torch.bfloat16).state_dict())

    with manager.loading(), torch.no_grad():
        for site in manager.census().sites:
            getattr(site.holding.tensor, "_local_tensor", site.holding.tensor).zero_()
    assert_equal(on_cpu(exported), truth())


@pytest.mark.parametrize("rest", RESTS, ids=["as made", "offloaded"])
@pytest.mark.parametrize("make", ON_TWO_RANKS)
def test_weights_come_out_as_a_plain_twin_has_them(
    two_ranks: Ranks, make: Make, rest: Placement | None
) -> None:
    two_ranks.run(exports_what_a_plain_twin_has, make, rest)


@pytest.mark.parametrize("make", ON_FOUR_RANKS)
def test_weights_of_larger_meshes_come_out_as_a_plain_twin_has_them(
    four_ranks: Ranks, make: Make
) -> None:
    four_ranks.run(exports_what_a_plain_twin_has, make, Placement.CPU_MANUAL)


@pytest.mark.parametrize("make", [*ON_TWO_RANKS, compiled])
def test_weights_of_one_rank_come_out_as_a_plain_twin_has_them(one_rank: str, make: Make) -> None:
    exports_what_a_plain_twin_has(make, Placement.CPU_MANUAL)


# Shards.


def shards_make_the_whole(make: Make, rest: Placement | None) -> None:
    trace = Trace()
    manager = managed(make, rest, trace)
    found, moves = whereabouts(manager), trace.moves()
    mine = {}
    for shard in manager.export_shards():
        rests = {(site.holding.of, site.device) for site in manager.census().sites}
        assert shard.tensor.device in {device for _, device in rests}
        where = shard.offset, shard.flattened, tuple(shard.shape)
        mine[shard.name] = (*where, shard.tensor.cpu().clone())
    assert whereabouts(manager) == found
    assert trace.moves() == moves
    every: list[dict[str, tuple[tuple[int, ...], bool, tuple[int, ...], torch.Tensor]]]
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    expected = truth()
    assert list(mine) == list(expected)
    for name, value in expected.items():
        whole = torch.full_like(value, -7)
        for offset, flattened, shape, part in (rank[name] for rank in every):
            assert shape == tuple(value.shape)
            target = whole.view(-1) if flattened else whole
            place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            target[place] = part
        assert torch.equal(whole, value), name


@pytest.mark.parametrize("rest", RESTS, ids=["as made", "offloaded"])
@pytest.mark.parametrize("make", ON_TWO_RANKS)
def test_shards_put_together_are_the_whole(
    two_ranks: Ranks, make: Make, rest: Placement | None
) -> None:
    two_ranks.run(shards_make_the_whole, make, rest)


@pytest.mark.parametrize("make", ON_FOUR_RANKS)
def test_shards_of_larger_meshes_put_together_are_the_whole(four_ranks: Ranks, make: Make) -> None:
    four_ranks.run(shards_make_the_whole, make, None)


def test_a_shard_looks_into_the_module_and_says_so(one_rank: str) -> None:
    """What the docs promise: no copy, so a change shows, and nobody may make one meanwhile."""
    manager = managed(fsdp2, None)
    shards = {}
    generator = manager.export_shards()
    shard = next(generator)
    with pytest.raises(PlacementHeld), manager.training():
        pytest.fail("training would change what the shard shows")
    shards = {shard.name: shard} | {shard.name: shard for shard in generator}
    with manager.training(), torch.no_grad():
        manager.module.narrow.weight.fill_(3)
    assert shards["narrow.weight"].tensor.eq(3).all()
    assert shards["narrow.weight"].mesh is not None
    assert [type(layout).__name__ for layout in shards["narrow.weight"].layout] == ["Shard"]


# Names.


def test_names_are_changed_by_a_function_or_a_mapping(one_rank: str) -> None:
    manager = managed(plain, None)
    by_function = [n for n, _ in manager.export_weights(names=lambda name: f"model.{name}")]
    assert by_function == [f"model.{name}" for name in truth() if name != "head.weight"]
    mapping = {"embedding.weight": "tokens", "counts": "seen"}
    by_mapping = [name for name, _ in manager.export_weights(names=mapping)]
    assert by_mapping == [mapping.get(name, name) for name in truth() if name != "head.weight"]
    assert [shard.name for shard in manager.export_shards(names=mapping)][:2] == ["seen", "tokens"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"embeding.weight": "tokens"}, "embeding.weight"),
        ({"embedding.weight": "counts"}, "counts: counts, embedding.weight"),
        (lambda name: "weight", "more than one"),
    ],
)
def test_names_that_do_not_fit_are_refused_before_a_weight_comes(
    one_rank: str, names: object, says: str
) -> None:
    manager = managed(fsdp2, Placement.CPU_MANUAL)
    for export in (manager.export_weights, manager.export_shards):
        with pytest.raises(ContradictoryOptions, match=says):
            next(export(names=names))  # type: ignore[operator]
    assert dict(manager.export_weights())


def test_a_wrapper_around_a_part_of_the_model_is_not_in_its_names(one_rank: str) -> None:
    module = nn.Sequential(nn.parallel.DistributedDataParallel(reader().to(one_rank)))
    names = [name for name, _ in PlacementManager(module).export_weights(tied="both")]
    assert names == [f"0.{name}" for name in truth()]


def test_adapters_alone_of_a_model_without_any_are_refused(one_rank: str) -> None:
    with pytest.raises(ContradictoryOptions, match="no peft model"):
        next(managed(plain, None).export_weights(adapters="only"))
    with pytest.raises(ContradictoryOptions, match="adapters=alone"):
        next(managed(plain, None).export_weights(adapters="alone"))  # type: ignore[arg-type]


# Ranks.


def exports_with_another_dtype_on_rank_1() -> None:
    manager = managed(fsdp2, Placement.CPU_MANUAL)
    dtype = torch.bfloat16 if dist.get_rank() == 1 else None
    with pytest.raises(RanksDisagree, match=r"dtype is None on rank 0, but torch.bfloat16 on rank"):
        next(manager.export_weights(dtype=dtype))
    assert_equal(on_cpu(dict(manager.export_weights(tied="both"))), truth())


def test_ranks_that_ask_for_different_dtypes_are_refused_together(two_ranks: Ranks) -> None:
    two_ranks.run(exports_with_another_dtype_on_rank_1)


def drops_an_export_on_rank_1() -> str:
    manager = PlacementManager(fsdp2(), rest=Placement.CPU_MANUAL, deadline=20.0)
    found = whereabouts(manager)
    try:
        for number, _ in enumerate(manager.export_weights(bucket_bytes=2**20)):
            if number == 3 and dist.get_rank() == 1:
                break
    except RankLost as lost:
        told = lost.why
    else:
        told = "nothing"
    assert whereabouts(manager) == found
    with pytest.raises(GroupPoisoned, match="rank 1 failed in export: its consumer dropped it"):
        next(manager.export_weights())
    return told


def test_an_export_that_one_rank_drops_fails_on_the_other(two_ranks: Ranks) -> None:
    kept, dropped = two_ranks.run(drops_an_export_on_rank_1)
    assert "rank 1" in kept
    assert dropped == "nothing"


def drops_exports_in_step() -> None:
    manager = PlacementManager(fsdp2(), rest=Placement.CPU_MANUAL, deadline=20.0)
    found = whereabouts(manager)
    for dropped_at in (0, 3):
        for number, _ in enumerate(manager.export_weights(bucket_bytes=1)):
            if number == dropped_at:
                break
    generator = manager.export_shards()
    next(generator)
    del generator
    assert whereabouts(manager) == found
    assert_equal(on_cpu(dict(manager.export_weights(tied="both"))), truth())
    with manager.saving(0):
        assert whereabouts(manager) == found


def test_an_export_that_all_ranks_drop_leaves_them_in_step(two_ranks: Ranks) -> None:
    two_ranks.run(drops_exports_in_step)
