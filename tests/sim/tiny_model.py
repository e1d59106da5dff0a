"""A language model of two transformer blocks, small enough for a step in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

VOCABULARY = 61
WIDTH = 32
HEADS = 4


class Block(nn.Module):
    """Attention and a feed-forward layer; the buffer is what a policy for parameters may forget."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm_mid = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x_btd: Tensor) -> Tensor:
        batch, length, _ = x_btd.shape
        qkv = self.qkv(self.norm_in(x_btd)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed_btd = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
        x_btd = x_btd + self.project(mixed_btd) * self.scale.to(x_btd.dtype)
        return x_btd + self.narrow(functional.gelu(self.widen(self.norm_mid(x_btd))))


class TinyLM(nn.Module):
    """Embedding, two blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd = self.embed(tokens_bt)
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.head(self.norm(x_btd))


def make_model(seed: int = 0) -> TinyLM:
    """Return the same model, on the CPU, on every rank."""
    torch.manual_seed(seed)
    return TinyLM()


def make_tokens() -> Tensor:
    """Return the same batch, on the CPU, on every rank, so that one process is a valid twin."""
    return torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def shard(model: TinyLM, mesh: DeviceMesh, **policies: Any) -> TinyLM:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)
    return model


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens_bt: Tensor
) -> tuple[float, float]:
    """Return loss and gradient norm (before clipping) of one step."""
    logits = model(tokens_bt)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_bt[:, 1:].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def cpu_twin_steps(steps: int) -> list[tuple[float, float]]:
    """Return what ``steps`` training steps give on the CPU, in one process, without FSDP."""
    model = make_model()
    optimizer = make_optimizer(model)
    return [train_step(model, optimizer, make_tokens()) for _ in range(steps)]


def put_buffers_on(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device))
