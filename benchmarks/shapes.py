"""Shapes of the decoder of llama.py. Whoever only tells ranks what to train needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """About 3.1 million parameters. `batch` is a rank's."""

    width: int = 256
    layers: int = 4
    heads: int = 8
    shared_heads: int = 4  # keys and values: grouped-query attention
    hidden: int = 688
    length: int = 64
    batch: int = 2
    vocabulary: int = 256  # the text is bytes, whatever more there is

    @property
    def parameters(self) -> int:
        attention = 2 * self.width * (self.width + self.width // self.heads * self.shared_heads)
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * block + (2 * self.vocabulary + 1) * self.width


SHAPES = {
    "tiny": Shape(width=64, heads=4, shared_heads=2, hidden=128, length=32, batch=4),
    "small": Shape(),
    "billion": Shape(width=2048, layers=16, heads=32, shared_heads=8, hidden=8192, length=2048, batch=8),
    # Meta-Llama-3-8B's and Qwen2-7B's, but for the latter's biases and the bases of their rotations.
    "llama-8b": Shape(width=4096, layers=32, heads=32, shared_heads=8, hidden=14336, length=2048, batch=1,
                      vocabulary=128256),
    "qwen2-7b": Shape(width=3584, layers=28, heads=28, shared_heads=4, hidden=18944, length=2048, batch=1,
                      vocabulary=152064),
}  # fmt: skip
