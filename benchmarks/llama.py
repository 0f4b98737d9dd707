"""A decoder in LLaMA's shape, a text for it, and how it is cut up, for benchmarks/training.py and decoding.py."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from shapes import Shape
from torch import Tensor, nn

_AT_ONCE = 1 << 24  # elements
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # SplitMix64's, as signed numbers


class Position:
    """Where the next token belongs, and which of `most` places it sees. It is on the device, so that a step that a
    graph has captured once is good for every token."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(most, device=device)
        self.seen = (self._places <= self.at)[None, None, None]

    def move(self, tokens: int) -> None:
        self.at.add_(tokens)
        self.seen.copy_(self._places <= self.at)


class Kept:
    """The keys and values of what a block has seen, which is as many as `position` says."""

    def __init__(self, position: Position) -> None:
        self.position = position
        self._both: list[Tensor] = []

    @property
    def most(self) -> int:
        return self.position.seen.shape[-1]

    def add(self, at: Tensor, *both: Tensor) -> list[Tensor]:
        """Of so many positions from `at[0]` on. Returns all there is room for."""
        self._both = self._both or [each.new_zeros(*each.shape[:2], self.most, each.shape[3]) for each in both]
        for whole, fresh in zip(self._both, both, strict=True):
            whole.index_copy_(2, at, fresh)
        return self._both


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

    def forward(self, x: Tensor, kept: Kept | None = None) -> Tensor:
        """`kept` has what came before `x`: nothing, or `x` is one position."""
        y, length = self.norm1(x), x.shape[1]
        q, k, v = (self._split(each(y)) for each in (self.query, self.key, self.value))
        alone = kept is None or length > 1
        at = kept.position.at if kept is not None and length == 1 else torch.arange(length, device=x.device)
        tables = _angles(length if kept is None else kept.most, self.head // 2, x.device, x.dtype)
        cos, sin = (each[at] for each in tables)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        everything = (k, v) if kept is None else kept.add(at, k, v)
        mask = None
        if kept is not None and not alone:
            (k, v), mask = everything, kept.position.seen
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=alone, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head)).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) on (batch, heads, length, head)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


@functools.cache
def _angles(length: int, half: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def whole(part: nn.Module, _at: int) -> nn.Module:
    return part


def layers(s: Shape, cut: Callable[[nn.Module, int], nn.Module] = whole) -> list[nn.Module]:
    """The whole model, in order: embedding, blocks, and the way back to bytes; the same on every rank.

    `cut` gets each part and its place in that order as soon as it is made, and gives what the rank keeps of it.
    """

    def made(part: nn.Module, at: int) -> nn.Module:
        for number, weight in enumerate(each for each in part.parameters() if each.dim() == 2):
            bound = 3**0.5 if isinstance(part, nn.Embedding) else weight.shape[1] ** -0.5
            _fill(weight.data.view(-1), bound, 16 * at + number)
        return cut(part, at)

    head = nn.Sequential(nn.RMSNorm(s.width), nn.Linear(s.width, s.vocabulary, bias=False))
    last = made(head, s.layers + 1)
    first = made(nn.Embedding(s.vocabulary, s.width), 0)
    return [first, *(made(Block(s), 1 + at) for at in range(s.layers)), last]


def _fill(weight: Tensor, bound: float, number: int) -> None:
    """Evenly between -bound and bound, by each element's place: a GPU and a CPU draw other numbers from one seed."""
    for begin in range(0, len(weight), _AT_ONCE):
        part = weight[begin : begin + _AT_ONCE]
        mixed = torch.arange(begin, begin + len(part), device=weight.device)
        for factor in _ODD:
            mixed.add_(number + 1).mul_(factor)
            mixed.bitwise_xor_((mixed >> 31) & 0x1FFFFFFFF)
        part.copy_(((mixed & 0xFFFFFF) - 0x800000).float().mul_(bound / 0x800000))


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
    return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
