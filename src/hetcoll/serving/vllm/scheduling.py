"""The scheduler's part of both sides: which requests change hands, in which slots and blocks."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from .steps import Load, Prefill, Report, Step

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("hetcoll.serving.vllm")

_WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")  # names of vLLM's RequestStatus; others were given up


def _asked(request: Request, what: str) -> dict[str, Any] | None:
    """What the router says of a request, where it says this."""
    params: dict[str, Any] | None = request.kv_transfer_params
    return params if params and params.get(what) else None


class PrefillScheduling:
    """Says which blocks are computed, and keeps them until the workers have sent them."""

    def __init__(self) -> None:
        self._transfers: dict[str, str] = {}  # by request
        self._finished: list[str] = []

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        return 0, False

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        if params := _asked(request, "do_remote_decode"):
            self._transfers[request.request_id] = str(params.get("transfer_id") or request.request_id)

    def step(self, output: SchedulerOutput) -> Step:
        step = Step(finished=self._finished)
        self._finished = []
        step.preempted = [each for each in output.preempted_req_ids or () if each in self._transfers]
        for new in output.scheduled_new_reqs:
            self._add(step, output, new.req_id, new.block_ids, True, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request, blocks, computed in rows:
            self._add(step, output, request, blocks, request in cached.resumed_req_ids, computed)
        return step

    def _add(self, step: Step, output: SchedulerOutput, request: str, blocks: Any, anew: bool, computed: int) -> None:
        if request in self._transfers:
            computed += output.num_scheduled_tokens[request]
            own = list(blocks[0]) if blocks else []
            step.prefills.append(Prefill(request, self._transfers[request], own, anew, computed))

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        transfer = self._transfers.pop(request.request_id, None)
        if transfer is None:
            return False, None
        self._finished.append(request.request_id)
        if request.status.name not in _WHOLE:
            return True, None  # its blocks may still be read
        return True, {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer}

    def hear(self, report: Report | None, received: set[str]) -> None:
        pass


class DecodeScheduling:
    """Gives each request that the other side computes a slot and blocks. `ranks` workers are through with each.

    The last token of a prompt is always computed here, since the next one follows from it.
    """

    def __init__(self, slots: int, ranks: int, block_tokens: int, layerwise: bool) -> None:
        self._free = list(range(slots))
        self._ranks, self._block_tokens, self._layerwise = ranks, block_tokens, layerwise
        self._through: Counter[int] = Counter()  # workers, by slot
        self._local: dict[str, int] = {}  # tokens that were here already
        self._loading: set[str] = set()
        self._unwanted: list[tuple[str, str]] = []  # requests and transfers that the other side need not keep
        self._step = Step()
        self.lost = ""

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        params = _asked(request, "do_remote_prefill")
        if params is None or self.lost:
            return 0, False
        if not params.get("transfer_id"):
            log.warning("%s: kv_transfer_params: wanted a transfer_id; it is computed here", request.request_id)
            return 0, False
        count = request.num_prompt_tokens - 1 - computed
        if count <= 0:
            return 0, False
        if not self._free:
            return None, False  # ask again
        self._local[request.request_id] = computed
        return count, not self._layerwise

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        params = _asked(request, "do_remote_prefill")
        if params is None:
            return
        params["do_remote_prefill"] = False  # once: a preempted request is computed here
        computed = self._local.pop(request.request_id, 0)
        if not external:
            self._unwanted.append((request.request_id, str(params.get("transfer_id"))))
            return
        first, tokens = computed // self._block_tokens, computed + external
        own = list(blocks.get_block_ids()[0][first : -(-tokens // self._block_tokens)])
        load = Load(request.request_id, str(params["transfer_id"]), self._free.pop(), first, own, tokens)
        load.at_once, load.awaited = self._layerwise, not self._layerwise
        self._step.loads.append(load)
        if load.awaited:
            self._loading.add(request.request_id)

    def step(self, output: SchedulerOutput) -> Step:
        while self._unwanted and self._free and not self.lost:
            request, transfer = self._unwanted.pop(0)
            self._step.loads.append(Load(request, transfer, self._free.pop(), 0, [], 0, awaited=False))
        step, self._step = self._step, Step()
        return step

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._local.pop(request.request_id, None)
        if params := _asked(request, "do_remote_prefill"):  # it ended before it had blocks
            params["do_remote_prefill"] = False
            self._unwanted.append((request.request_id, str(params.get("transfer_id"))))
        if request.request_id in self._loading:
            self._step.dropped.append(request.request_id)
        return False, None

    def hear(self, report: Report | None, received: set[str]) -> None:
        self._loading -= received
        if report is None:
            return
        if report.lost and not self.lost:
            log.error("requests are computed here from now on: %s", report.lost)
        self.lost = self.lost or report.lost
        self._through += report.slots
        for slot in [slot for slot, count in self._through.items() if count == self._ranks]:
            del self._through[slot]
            self._free.append(slot)
