"""A small causal transformer over bytes: what the main job trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own way to write it)

VOCABULARY = 256


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm, on a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` has shape (batch, time, width), and so has the result."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        fed: torch.Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + fed


class ByteTransformer(nn.Module):
    """Predicts the next byte.

    It has what placement has to get right: an input embedding tied to the output layer, and
    positions as a buffer that no state dict contains.
    """

    positions: torch.Tensor

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", _sinusoids(context, width), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` has shape (batch, time), the logits (batch, time, 256)."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(module: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy, in nats a byte. ``batch`` is one tensor of shape (batch, time + 1)."""
    (text,) = batch
    logits = module(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def _sinusoids(context: int, width: int) -> torch.Tensor:
    position = torch.arange(context).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2) * (-torch.log(torch.tensor(10000.0)) / width))
    return torch.cat([torch.sin(position * rate), torch.cos(position * rate)], dim=1)
