"""What vLLM's scheduler tells its workers of a step, and they tell it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class Prefill:
    """A request of which this step computes a part: its first `computed` tokens are in its blocks then."""

    request: str
    transfer: str
    blocks: list[int]  # that came since the last step; all, with `anew`
    anew: bool
    computed: int


@dataclass
class Load:
    """A request whose first `tokens` tokens the other side has: `blocks` are for those that block `first` begins."""

    request: str
    transfer: str
    slot: int
    first: int
    blocks: list[int]
    tokens: int
    at_once: bool = False  # this step computes with them
    awaited: bool = True


@dataclass
class Step(KVConnectorMetadata):
    """Of one side or the other."""

    prefills: list[Prefill] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)  # nothing more of them is computed
    loads: list[Load] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # loads that nobody wants any more


@dataclass
class Report(KVConnectorWorkerMetadata):
    """How many workers are through with which slot, and why there is no other side any more."""

    slots: Counter[int] = field(default_factory=Counter)
    lost: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        assert isinstance(other, Report)
        return Report(self.slots + other.slots, self.lost or other.lost)
