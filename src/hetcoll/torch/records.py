"""The last calls of a process group, for when something hangs: what a flight recorder is to ProcessGroupNCCL."""

from __future__ import annotations

import collections
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

KEPT = 1000  # calls a group


@dataclass(slots=True)
class _Call:
    number: int
    name: str
    tensors: list[tuple[torch.dtype, torch.Size]]
    started: float
    work: weakref.ref[dist.Work] | None = None
    raised: str | None = None
    """The error that the call itself raised, where it did."""


class Records:
    """Notes calls without keeping their tensors alive."""

    def __init__(self) -> None:
        self._calls: collections.deque[_Call] = collections.deque(maxlen=KEPT)
        self.count = 0
        """Calls so far."""

    def begin(self, name: str, tensors: Sequence[torch.Tensor]) -> _Call:
        """Note a call before it starts: it may never return."""
        self.count += 1
        call = _Call(self.count, name, [(t.dtype, t.shape) for t in tensors], time.time())
        self._calls.append(call)
        return call

    def dump(self) -> list[dict[str, Any]]:
        """The calls, oldest first."""
        return [
            {
                "number": call.number,
                "operation": call.name,
                "tensors": [f"{dtype}{list(shape)}".removeprefix("torch.") for dtype, shape in call.tensors],
                "started": call.started,
                "state": _state(call),
            }
            for call in list(self._calls)
        ]


def _state(call: _Call) -> str:
    if call.raised is not None:
        return f"failed: {call.raised}"
    if call.work is None:
        return "not returned"
    work = call.work()
    if work is None:
        return "not held any more"
    if (error := work.exception()) is not None:
        return f"failed: {error}"
    return "complete" if work.is_completed() else "in flight"
