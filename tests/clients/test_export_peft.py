"""Exports of peft and transformers models, against what these libraries themselves make of a plain
copy on the CPU: the same names, and the same bits.

Run by ``make test-clients``.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    OffloadPolicy,
    fully_shard,
)

from placement import Placement, PlacementManager, Trace, UnsupportedAdapter, find_compute_device
from placement.testing import Ranks

peft = pytest.importorskip("peft", reason="peft is not installed; make test-clients runs this")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

os.environ["HF_HUB_OFFLINE"] = "1"

Weights = dict[str, torch.Tensor]


def base(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """A Qwen2 with random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    return transformers.Qwen2ForCausalLM(config).to(dtype)


def lora(**options: Any) -> Any:
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    return peft.LoraConfig(init_lora_weights=False, **options)


def adapted() -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(base(), lora())


def adapted_in_bfloat16() -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(base(dtype=torch.bfloat16), lora())


def adapted_more() -> Any:
    """Embeddings too, a head that is trained whole, scaled for rank, and untied."""
    torch.manual_seed(1)
    targets = ["q_proj", "embed_tokens"]
    config = lora(target_modules=targets, modules_to_save=["lm_head"], use_rslora=True)
    model = peft.get_peft_model(base(tied=False), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(1)
    return model


def adapted_twice() -> Any:
    """Two adapters that are active at once, on layers of which one is in both."""
    torch.manual_seed(1)
    model = peft.get_peft_model(base(), lora())
    model.add_adapter("second", lora(r=2, lora_alpha=3, target_modules=["q_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


Make = Callable[[], Any]
ADAPTED: list[Make] = [adapted, adapted_in_bfloat16, adapted_more, adapted_twice]


# Owners.


def sharded(model: Any, policy: OffloadPolicy) -> nn.Module:
    mesh = init_device_mesh(find_compute_device().type, (dist.get_world_size(),))
    layers = next(m for name, m in model.named_modules() if name.endswith("model.layers"))
    for layer in layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def fsdp2(model: Any) -> nn.Module:
    return sharded(model, OffloadPolicy())


def fsdp2_under_the_policy(model: Any) -> nn.Module:
    return sharded(model, CPUOffloadPolicy())


def fsdp1(model: Any) -> nn.Module:
    device = find_compute_device()
    return FullyShardedDataParallel(model.to(device), device_id=device, use_orig_params=True)


def ddp(model: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model.to(find_compute_device()))


def compiled(model: Any) -> nn.Module:
    module: nn.Module = torch.compile(model, backend="eager")
    return module


Own = Callable[[Any], nn.Module]
OWNERS: list[Own] = [fsdp2, fsdp2_under_the_policy, fsdp1, ddp, compiled]


def managed(module: nn.Module) -> PlacementManager:
    manager = PlacementManager(module, trace=Trace(), deadline=60.0)
    if manager.owner.managed is None:
        manager.offload()
    return manager


PAIRS = [
    (own, make)
    for own in OWNERS
    for make in ADAPTED
    if (own, make) != (fsdp1, adapted_in_bfloat16)  # a flat parameter has one dtype
]


# What the libraries themselves make of a plain copy.


def merged_by_peft(make: Make) -> Weights:
    state: Weights = make().merge_and_unload().state_dict()
    return state


def without_second_names(state: Weights) -> Weights:
    """Tied weights under their first name."""
    first: dict[int, str] = {}
    for name, value in state.items():
        first.setdefault(value.data_ptr(), name)
    return {name: state[name] for name in first.values()}


def assert_same(exported: Weights, expected: Weights) -> None:
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        assert exported[name].dtype == value.dtype, name
        assert torch.equal(exported[name].cpu(), value), name


def bits(manager: PlacementManager) -> Weights:
    return {
        site.name: getattr(site.holding.tensor, "_local_tensor", site.holding.tensor)
        .detach()
        .cpu()
        .clone()
        for site in manager.census().sites
    }


@contextmanager
def unchanged(manager: PlacementManager) -> Iterator[None]:
    """Every bit and every place of the module is afterwards as before."""
    values = bits(manager)
    places = {site.name: site.rests_on for site in manager.census().sites}
    yield
    assert {site.name: site.rests_on for site in manager.census().sites} == places
    assert_same(bits(manager), values)


# Merged.


def exports_what_peft_merges(own: Own, make: Make) -> None:
    manager = managed(own(make()))
    with unchanged(manager):
        exported = dict(manager.export_weights(tied="both"))
    expected = merged_by_peft(make)
    assert_same(exported, expected)
    assert_same(dict(manager.export_weights()), without_second_names(expected))
    in_half = {n: v.to(torch.bfloat16) for n, v in expected.items() if v.is_floating_point()}
    assert_same(dict(manager.export_weights(dtype=torch.bfloat16, tied="both")), in_half)


@pytest.mark.parametrize(("own", "make"), PAIRS)
@pytest.mark.parametrize("size", [1, 2], ids=["1 rank", "2 ranks"])
def test_merged_weights_are_those_that_peft_merges_itself(
    ranks: Callable[[int], Ranks], size: int, own: Own, make: Make
) -> None:
    ranks(size).run(exports_what_peft_merges, own, make)


def leaves_no_merge_behind(consumer: str) -> None:
    manager = managed(fsdp2_under_the_policy(adapted()))
    kept: Weights = {}
    with unchanged(manager):
        weights = manager.export_weights(bucket_bytes=1)
        try:
            for name, weight in weights:
                kept[name] = weight
                if name.endswith("layers.0.self_attn.q_proj.weight"):
                    if consumer == "raises":
                        raise KeyError(name)
                    break
        except KeyError:
            pass
        weights.close()  # type: ignore[attr-defined]
    assert manager.placement is Placement.CPU_FSDP2_MANAGED
    expected = merged_by_peft(adapted)
    assert_same(kept, {name: expected[name] for name in kept})


@pytest.mark.parametrize("consumer", ["breaks off", "raises"])
def test_no_merge_is_left_behind_whatever_the_consumer_does(
    ranks: Callable[[int], Ranks], consumer: str
) -> None:
    ranks(1).run(leaves_no_merge_behind, consumer)


def a_merge_takes_what_is_documented() -> None:
    if find_compute_device().type != "sim":
        pytest.skip("exact memory is the simulated accelerator's")
    manager = managed(fsdp2_under_the_policy(adapted()))
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    for _, weight in manager.export_weights(bucket_bytes=1):
        del weight
    peak = torch.accelerator.max_memory_allocated() - before
    product, factors = 32 * 48 * 4, 4 * (32 + 48) * 4
    scaling = 4  # a number that the simulated accelerator puts into device memory
    assert peak == 3 * product + factors + scaling
    assert torch.accelerator.memory_allocated() == before


def test_a_merge_takes_no_more_device_memory_than_is_documented(
    ranks: Callable[[int], Ranks],
) -> None:
    ranks(2).run(a_merge_takes_what_is_documented)


# Adapters alone.


def exports_the_adapter_as_peft_does(own: Own, make: Make) -> None:
    manager = managed(own(make()))
    with unchanged(manager):
        alone = dict(manager.export_weights(adapters="only", tied="both"))
    model = make()
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert_same(alone, expected)
    with tempfile.TemporaryDirectory() as directory:
        shared = [directory]
        dist.broadcast_object_list(shared, src=0)
        place = Path(shared[0]) / "adapter"
        manager.save_pretrained(place, adapters="only")
        dist.barrier()
        assert_same(safetensors.load_file(place / "adapter_model.safetensors"), expected)
        plain = base(tied=make is not adapted_more)
        loaded = peft.PeftModel.from_pretrained(plain, str(place)).eval()
        tokens = torch.arange(8).view(1, 8)
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
        dist.barrier()


@pytest.mark.parametrize("make", [adapted, adapted_more])
@pytest.mark.parametrize("own", OWNERS)
@pytest.mark.parametrize("size", [1, 2], ids=["1 rank", "2 ranks"])
def test_an_adapter_alone_is_what_peft_saves_and_loads(
    ranks: Callable[[int], Ranks], size: int, own: Own, make: Make
) -> None:
    ranks(size).run(exports_the_adapter_as_peft_does, own, make)


# Files that transformers loads.


def is_loaded_by_transformers(own: Own, make: Make, max_shard_bytes: int) -> None:
    manager = managed(own(make()))
    expected = make()
    if isinstance(expected, peft.PeftModel):
        expected = expected.merge_and_unload()
    with tempfile.TemporaryDirectory() as directory:
        shared = [directory]
        dist.broadcast_object_list(shared, src=0)
        place = Path(shared[0]) / "model"
        with unchanged(manager):
            manager.save_pretrained(place, max_shard_bytes=max_shard_bytes)
        dist.barrier()
        assert (place / "model.safetensors.index.json").exists() is (max_shard_bytes < 10**6)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(place)
        assert loaded.config.architectures == ["Qwen2ForCausalLM"]
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is (
            expected.lm_head.weight is expected.model.embed_tokens.weight
        )
        dist.barrier()
    assert type(loaded) is transformers.Qwen2ForCausalLM
    assert_same(dict(loaded.state_dict()), dict(expected.state_dict()))
    if loaded.dtype is torch.float32:  # else to() has rounded the twin's rotary frequencies, too
        tokens = torch.arange(8).view(1, 8)
        with torch.no_grad():
            assert torch.equal(loaded.eval()(tokens).logits, expected.eval()(tokens).logits)


@pytest.mark.parametrize("max_shard_bytes", [10**4, 10**9], ids=["many files", "one file"])
@pytest.mark.parametrize(
    ("own", "make"), [(fsdp1, base), *((fsdp2_under_the_policy, m) for m in (base, *ADAPTED[:3]))]
)
def test_saved_weights_are_loaded_by_transformers(
    ranks: Callable[[int], Ranks], own: Own, make: Make, max_shard_bytes: int
) -> None:
    ranks(2).run(is_loaded_by_transformers, own, make, max_shard_bytes)


# Refused by name.


def with_dora(model: Any) -> Any:
    return peft.get_peft_model(model, lora(use_dora=True))


def with_a_bias(model: Any) -> Any:
    return peft.get_peft_model(model, lora(lora_bias=True, target_modules=["q_proj"]))


def with_ia3(model: Any) -> Any:
    targets = {"target_modules": ["k_proj"], "feedforward_modules": []}
    return peft.get_peft_model(model, peft.IA3Config(**targets))


def disabled(model: Any) -> Any:
    model = peft.get_peft_model(model, lora())
    model.base_model.disable_adapter_layers()
    return model


def on_tied_embeddings(model: Any) -> Any:
    return peft.get_peft_model(model, lora(target_modules=["embed_tokens"]))


def trainable_tokens(model: Any) -> Any:
    return peft.get_peft_model(model, lora(trainable_token_indices=[0, 1]))


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (with_dora, r"q_proj: default is a DoraLinearVariant, not plain LoRA"),
        (with_a_bias, r"q_proj: default has a bias of its own"),
        (with_ia3, r"k_proj: Linear is neither LoRA on a linear layer nor"),
        (disabled, r"q_proj: its adapters are disabled"),
        (on_tied_embeddings, r"embed_tokens: its weight is tied to another one"),
        (trainable_tokens, r"embed_tokens: TrainableTokensWrapper is not known here"),
    ],
)
def test_what_can_not_be_merged_exactly_is_refused_before_a_weight_comes(
    ranks: Callable[[int], Ranks], wrap: Callable[[Any], Any], says: str
) -> None:
    ranks(1).run(refuses, wrap, says)


def refuses(wrap: Callable[[Any], Any], says: str) -> None:
    manager = managed(fsdp2(wrap(base())))
    with pytest.raises(UnsupportedAdapter, match=says):
        next(manager.export_weights())


def test_dora_is_exported_alone(ranks: Callable[[int], Ranks]) -> None:
    ranks(1).run(exports_dora_alone)


def exports_dora_alone() -> None:
    torch.manual_seed(1)
    plain = with_dora(base())
    expected = peft.get_peft_model_state_dict(plain, save_embedding_layers=False)
    expected = {name: value.clone() for name, value in expected.items()}
    manager = managed(fsdp2_under_the_policy(plain))
    assert any("magnitude" in name for name in expected)
    assert_same(dict(manager.export_weights(adapters="only", tied="both")), expected)


def several_active() -> None:
    manager = managed(fsdp2(adapted_twice()))
    with pytest.raises(UnsupportedAdapter, match="active adapters: default, second"):
        next(manager.export_weights(adapters="only"))


def test_several_active_adapters_are_no_single_one(ranks: Callable[[int], Ranks]) -> None:
    ranks(1).run(several_active)
