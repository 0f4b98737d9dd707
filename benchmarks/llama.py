"""A decoder in LLaMA's shape, a text to train it on, and how it is cut up, for benchmarks/training*.py."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """About 3.1 million parameters."""

    width: int = 256
    layers: int = 4
    heads: int = 8
    shared_heads: int = 4  # keys and values: grouped-query attention
    hidden: int = 688
    length: int = 64
    batch: int = 8


class Block(nn.Module):
    """Attention with rotary positions, then a gated linear unit; each behind an RMS norm and beside a shortcut."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape, self.head = s, s.width // s.heads
        kept = self.head * s.shared_heads
        self.norm1, self.norm2 = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.query, self.out = nn.Linear(s.width, s.width, bias=False), nn.Linear(s.width, s.width, bias=False)
        self.key, self.value = nn.Linear(s.width, kept, bias=False), nn.Linear(s.width, kept, bias=False)
        self.gate, self.up = nn.Linear(s.width, s.hidden, bias=False), nn.Linear(s.width, s.hidden, bias=False)
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (self._split(each(y)) for each in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head)).transpose(1, 2)


def _rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) on (batch, heads, length, head)."""
    cos, sin = _angles(x.shape[-2], x.shape[-1] // 2, x.device, x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


@functools.cache
def _angles(length: int, half: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def layers(s: Shape) -> list[nn.Module]:
    """The whole model, in order: embedding, blocks, and the way back to bytes; the same on every rank."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(s.width), nn.Linear(s.width, VOCABULARY, bias=False))
    return [nn.Embedding(VOCABULARY, s.width), *(Block(s) for _ in range(s.layers)), head]


def text() -> Tensor:
    found = importlib.util.find_spec("pydoc_data.topics")
    assert found is not None
    assert found.origin is not None
    return torch.frombuffer(bytearray(Path(found.origin).read_bytes()), dtype=torch.uint8).long()


def batches(s: Shape, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and what follows them: (batch, length) each."""
    whole, source = text(), torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(whole) - s.length - 1, (s.batch,), generator=source)
        rows = torch.stack([whole[i : i + s.length + 1] for i in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().reshape(-1, VOCABULARY), wanted.reshape(-1))
