"""A decoder-only transformer in the current idiom, sharded with FSDP2.

RMSNorm before each sub-layer, rotary positions, SwiGLU, scaled dot-product attention, no biases. It is
built on the meta device, sharded, and only then given memory: no rank ever holds the whole model.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ridethrough.config import SIZES, JobConfig

VOCABULARY = 256  # one token is one byte
ROTARY_BASE = 10_000.0


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(batch, time, width) → the same shape."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            rotate(q, rotary), rotate(k, rotary), v, is_causal=True, dropout_p=dropout
        )
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return projected


class FeedForward(nn.Module):
    """SwiGLU: a gated hidden layer, 8/3 of the width rounded up to 32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = -(-8 * width // 3 // 32) * 32
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) → the same shape."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """One transformer layer; FSDP2 shards and gathers the model block by block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-5)
        self.feed_forward = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(batch, time, width) → the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x


class Transformer(nn.Module):
    """Bytes in, next-byte logits out."""

    rotary: Tensor

    def __init__(self, config: JobConfig) -> None:
        super().__init__()
        layers, width, heads = SIZES[config.size]
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, config.dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        # A function of the configuration, so it is computed, never saved.
        self.register_buffer("rotary", rotary_angles(config.seq_len, width // heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) of token ids → (batch, time, vocabulary) of logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotary_angles(time: int, head_width: int, device: str | torch.device | None = None) -> Tensor:
    """cos and sin of each position's angles: (2, time, head_width / 2)."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, head_width, 2, device=device) / head_width)
    angles = torch.outer(torch.arange(time, device=device), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) of (batch, heads, time, head_width) by its position's angle."""
    cos, sin = rotary[:, : x.shape[-2]].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of predicting tokens[:, 1:] from tokens[:, :-1]."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def build_model(config: JobConfig, mesh: DeviceMesh) -> Transformer:
    """The sharded model with its initial weights, on every rank of `mesh` together.

    The weights depend on `config.seed` and each parameter's name only: they are the same on any
    number of ranks.
    """
    with torch.device("meta"):
        model = Transformer(config)
    precision = MixedPrecisionPolicy()
    if mesh.device_type == "cuda":  # halves what GPUs gather; a CPU would only be slower
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device=mesh.device_type)
    initialise(model, config)
    return model


@torch.no_grad()
def initialise(model: Transformer, config: JobConfig) -> None:
    """Give every parameter and buffer its value; works on the sharded and on the whole model.

    Each rank draws the whole of one parameter at a time and keeps its shard: no communication, and
    memory for one parameter only.
    """
    layers, width, heads = SIZES[config.size]
    for name, parameter in model.named_parameters():
        whole = _initial_value(name, parameter.shape, layers, config.seed).to(parameter.device)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
        else:
            parameter.copy_(whole)
    model.rotary = rotary_angles(config.seq_len, width // heads, model.rotary.device)


def _initial_value(name: str, shape: torch.Size, layers: int, seed: int) -> Tensor:
    """N(0, 0.02); what writes into the residual stream is scaled down by its depth; norms are one."""
    if "norm" in name:
        return torch.ones(shape)
    std = 0.02 / math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 0.02
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.empty(shape).normal_(0.0, std, generator=generator)
