"""A LoRA adapter (peft) on a tiny Qwen2 (transformers), sharded with FSDP2: the whole lifecycle.

Run by ``make test-clients``, which installs both into an environment of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from placement import Placement, PlacementManager, Trace, find_compute_device
from placement.testing import Ranks

pytest.importorskip("peft", reason="peft is not installed; make test-clients runs this")

os.environ["HF_HUB_OFFLINE"] = "1"
VOCABULARY = 64


def base_model() -> nn.Module:
    """A Qwen2 with random weights and tied embeddings."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=64,
            attn_implementation="sdpa",
        )
    )


def model(lora: bool) -> nn.Module:
    """The model, plain, with or without an adapter."""
    from peft import LoraConfig, get_peft_model

    base = base_model()
    if not lora:
        return base
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: nn.Module = get_peft_model(base, config)
    return adapted


def sharded(module: nn.Module, policy: OffloadPolicy) -> nn.Module:
    mesh = init_device_mesh(find_compute_device().type, (dist.get_world_size(),))
    for layer in module.get_submodule(_layers(module)):
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    return fully_shard(module, mesh=mesh, offload_policy=policy)


def _layers(module: nn.Module) -> str:
    return next(name for name, _ in module.named_modules() if name.endswith("model.layers"))


def trainable(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(step)).to(
        next(module.buffers()).device
    )
    loss = module(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def twin(lora: bool) -> tuple[list[float], list[str], dict[str, torch.Tensor]]:
    """The same steps on a plain model on the CPU: losses, names in its state dict, and the weights,
    into which an adapter is merged."""
    module: Any = model(lora)
    optimizer = torch.optim.AdamW(trainable(module), lr=1e-2)
    losses = [train(module, optimizer, step) for step in range(3)]
    names = list(module.state_dict())
    weights = module.merge_and_unload().state_dict() if lora else module.state_dict()
    return losses, names, weights


POLICIES = {
    "none": (OffloadPolicy, None),
    "manual": (OffloadPolicy, Placement.CPU_MANUAL),
    "policy": (CPUOffloadPolicy, None),
}


def whole_lifecycle(name: str, lora: bool) -> None:
    policy, rest = POLICIES[name]
    module = sharded(model(lora), policy())
    optimizer = torch.optim.AdamW(trainable(module), lr=1e-2)
    frozen = sum(not parameter.requires_grad for parameter in module.parameters())
    assert (frozen > 0) is lora
    manager = PlacementManager(module, optimizer, rest=rest, verify="always", deadline=60.0)
    found = manager.placement
    losses, names, weights = twin(lora)
    for step, expected in enumerate(losses):
        with manager.training():
            assert train(module, optimizer, step) == pytest.approx(expected, rel=1e-5)
        with manager.saving(step):
            assert list(module.state_dict()) == names
        assert manager.placement is found
    exported = dict(manager.export_weights(tied="both"))
    assert exported.keys() == weights.keys()
    for key, weight in exported.items():
        # AdamW divides a gradient by its own size: where it is all but zero, the order in which a
        # tied weight's two gradients are added shows.
        torch.testing.assert_close(weight.cpu(), weights[key], rtol=1e-4, atol=5e-5)
    tied = [name for name in exported if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    assert len(tied) == 2
    if manager.placement is not Placement.CPU_FSDP2_MANAGED:
        manager.offload()
        assert {str(site.device) for site in manager.census().sites} == {"cpu"}
        manager.onload()
    manager.verify()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("size", [1, 2], ids=["1 rank", "2 ranks"])
def test_the_whole_lifecycle_under_each_policy(
    ranks: Callable[[int], Ranks], size: int, name: str, lora: bool
) -> None:
    ranks(size).run(whole_lifecycle, name, lora)


# The adapter merged into its base weights, and alone.


def adapters(module: nn.Module) -> Iterator[nn.Module]:
    from peft.tuners.lora import LoraLayer

    return (part for part in module.modules() if isinstance(part, LoraLayer))


def merge(module: nn.Module) -> None:
    with torch.no_grad():
        for adapter in adapters(module):
            adapter.merge()


def unmerge(module: nn.Module) -> None:
    with torch.no_grad():
        for adapter in adapters(module):
            adapter.unmerge()


def logits(module: nn.Module) -> torch.Tensor:
    tokens = torch.arange(9).expand(2, 9).to(next(module.buffers()).device)
    with torch.no_grad():
        out: torch.Tensor = module(input_ids=tokens).logits
    return out.cpu()


def merged_and_unmerged(name: str) -> None:
    policy, rest = POLICIES[name]
    expected = model(lora=True).merge_and_unload().state_dict()
    module = sharded(model(lora=True), policy())
    manager = PlacementManager(module, rest=rest, verify="always", deadline=60.0)
    found = manager.placements

    def exports_the_merged_weights() -> None:
        assert manager.placements == found
        for key, weight in manager.export_weights():
            torch.testing.assert_close(weight.cpu(), expected[key], rtol=1e-5, atol=1e-6)

    exports_the_merged_weights()
    with manager.evaluating(unchanged=False):
        apart = logits(module)
        merge(module)
        torch.testing.assert_close(logits(module), apart, rtol=1e-4, atol=1e-5)
    exports_the_merged_weights()
    with manager.evaluating(unchanged=False):
        torch.testing.assert_close(logits(module), apart, rtol=1e-4, atol=1e-5)
        unmerge(module)
        torch.testing.assert_close(logits(module), apart, rtol=1e-4, atol=1e-5)
    exports_the_merged_weights()
    manager.verify()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("size", [1, 2], ids=["1 rank", "2 ranks"])
def test_an_adapter_is_merged_where_the_model_is_evaluated_and_stays_so_through_moves(
    ranks: Callable[[int], Ranks], size: int, name: str
) -> None:
    ranks(size).run(merged_and_unmerged, name)


def saved_alone(name: str) -> None:
    from peft import get_peft_model_state_dict

    policy, rest = POLICIES[name]
    plain = get_peft_model_state_dict(model(lora=True))
    module = sharded(model(lora=True), policy())
    manager = PlacementManager(module, rest=rest, deadline=60.0, trace=Trace())
    found, moved = manager.placements, len(manager.trace.moves())
    with manager.saving():
        alone = {key: part.full_tensor() for key, part in get_peft_model_state_dict(module).items()}
    assert manager.placements == found
    assert len(manager.trace.moves()) == moved
    assert alone.keys() == plain.keys()
    for key, weight in alone.items():
        assert torch.equal(weight.cpu(), plain[key]), key


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("size", [1, 2], ids=["1 rank", "2 ranks"])
def test_an_adapter_is_saved_alone_without_a_move_of_its_base(
    ranks: Callable[[int], Ranks], size: int, name: str
) -> None:
    ranks(size).run(saved_alone, name)
