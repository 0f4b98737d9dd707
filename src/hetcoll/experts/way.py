"""What the ways of the throughput form are given, and give."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import DType
from ..calls.buffers import Buffer
from .routing import Column

NUMPY = {DType.INT32: np.int32, DType.INT64: np.int64, DType.FLOAT32: np.float32}


class Dispatched(NamedTuple):
    """What one `Experts.dispatch` was given."""

    x: Any
    like_ids: Any
    source: Buffer  # `x`
    named: Buffer  # ids
    ids: Column  # the same on the host, [tokens, topk]
    number: int
    stream: int | None


class Way(Protocol):
    """How tokens travel."""

    def dispatch(self, call: Dispatched, timeout: float | None) -> tuple[Any, Any, list[int], Any]:
        """What came, its counts as an array and as numbers, and what `combine` needs."""

    def combine(
        self, source: Buffer, weights: Buffer | None, into: Buffer, tokens: int, number: int, route: Any,
        stream: int | None, timeout: float | None,
    ) -> None: ...  # fmt: skip

    def close(self) -> None: ...
