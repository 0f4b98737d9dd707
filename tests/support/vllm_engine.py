"""What vLLM does around a connector, in small: a scheduler with paged blocks, and one worker of each rank.

Each rank runs the scheduler, with the same requests in the same order, and hears what the workers of all ranks of its
instance report. A "model" writes into the caches what follows from token, layer, head and request alone, so that every
byte that should have come can be told.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import vllm_or_fake  # noqa: F401  # before the next
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hetcoll import Communicator
from hetcoll.serving.vllm import HetcollConnector

HEADS, DIM, TOKENS, LAYERS = 4, 6, 5, 3  # of the model; of a tensor's block
NAMES = [f"model.layers.{layer}.self_attn" for layer in (0, 2, 10)]


class Tensor:
    """A NumPy array with what of torch's tensors a connector needs."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def permute(self, order: list[int]) -> Tensor:
        return Tensor(self.array.transpose(order))

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Shape(NamedTuple):
    """How one instance holds its cache: tokens in a scheduler's block, and the order of axes in memory."""

    ranks: int
    block: int = TOKENS
    blocks: int = 32  # of a tensor
    order: tuple[int, ...] = (0, 1, 2, 3)  # of block, head, token, dim


@dataclass
class Request:
    """Has the attributes of vLLM's that connectors read."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    seed: int
    local: int = 0  # tokens that are here already
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    state: str = "waiting"  # loading, running, finished
    status: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))


def value(seed: int, layer: int, head: Any, token: Any, dim: Any) -> Any:
    """What the model makes of a token."""
    return ((seed * 64 + layer) * 64 + head) * 4096 + token * 16 + dim


class Instance:
    """One rank of a prefilling or decoding instance. `side`: the ranks of the instance, which step together."""

    def __init__(self, side: Communicator, shape: Shape, role: str, extra: dict[str, Any]) -> None:
        self.side, self.shape = side, shape
        parallel = SimpleNamespace(tensor_parallel_size=shape.ranks, rank=side.rank, pipeline_parallel_size=1)
        model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: HEADS, max_model_len=64)
        transfer = SimpleNamespace(kv_role=role, kv_connector_extra_config=extra, is_kv_producer=role == "kv_producer")
        config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel, model_config=model)
        group = SimpleNamespace(layer_names=NAMES[::-1], kv_cache_spec=SimpleNamespace(block_size=shape.block))
        caches = SimpleNamespace(kv_cache_groups=[group])
        self.scheduler = HetcollConnector(config, KVConnectorRole.SCHEDULER, caches)
        self.worker = HetcollConnector(config, KVConnectorRole.WORKER, caches)
        own = max(HEADS // shape.ranks, 1)
        self.heads = np.arange(own) + side.rank * HEADS // shape.ranks
        extents = [(shape.blocks, own, TOKENS, DIM)[axis] for axis in shape.order]
        self.caches = [np.full(extents, -1, np.int64).transpose(np.argsort(shape.order)) for _ in NAMES]
        self.worker.register_kv_caches({name: Tensor(c) for name, c in zip(NAMES, self.caches, strict=True)})
        self.free = list(range(shape.blocks * TOKENS // shape.block))
        self.requests: dict[str, Request] = {}
        self.told: set[str] = set()  # finished, for the next step
        self.preempted: set[str] = set()
        self.sent: Counter[str] = Counter()
        self.came: Counter[str] = Counter()
        self.bad: set[int] = set()
        self.early: list[tuple[int, int]] = []  # what was wrong when a layer was about to be computed with
        self.params: dict[str, Any] = {}  # that finished requests gave

    # The scheduler.

    def add(self, name: str, tokens: int, seed: int, params: dict[str, Any] | None, local: int = 0) -> Request:
        self.requests[name] = request = Request(name, tokens, params, seed, local)
        return request

    def finish(self, name: str, status: str = "FINISHED_LENGTH_CAPPED") -> None:
        request = self.requests[name]
        request.status = SimpleNamespace(name=status)
        keep, params = self.scheduler.request_finished(request, request.blocks)
        self.params[name] = params
        self.told.add(name)
        if not keep and request.state != "loading":
            self._give_back(name)
        request.state = "finished"

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self.free += request.blocks
        request.blocks, request.computed, request.state = [], 0, "preempted"
        self.preempted.add(name)

    def _give_back(self, name: str) -> None:
        self.free += self.requests.pop(name).blocks

    def _grow(self, request: Request, tokens: int) -> list[int]:
        count = -(-tokens // self.shape.block) - len(request.blocks)
        new = [self.free.pop(0) for _ in range(count)]
        request.blocks += new
        return new

    def _schedule(self, chunk: int) -> tuple[Any, list[Request]]:
        new, cached, resumed, blocks, scheduled, at_once = [], [], set(), [], {}, []
        before = {}
        for name, request in self.requests.items():
            if not chunk or request.state in ("loading", "finished") or request.computed >= request.num_prompt_tokens:
                continue
            came = []
            if first := request.state in ("waiting", "preempted"):
                local = request.local if request.state == "waiting" else 0
                count, later = self.scheduler.get_num_new_matched_tokens(request, local)
                if count is None:
                    continue
                request.computed = local + count
                came = self._grow(request, request.computed)
                if local and request.state == "waiting":
                    self.write(request, 0, local)
                found = SimpleNamespace(get_block_ids=lambda request=request: (list(request.blocks),))
                if not later:
                    came += self._grow(request, min(request.computed + chunk, request.num_prompt_tokens))
                self.scheduler.update_state_after_alloc(request, found, count)
                if later:
                    request.state = "loading"
                    continue
                if count:
                    at_once.append(request)
            before[name] = request.computed
            end = min(request.computed + chunk, request.num_prompt_tokens)
            came += self._grow(request, end)
            scheduled[name] = end - request.computed
            if first and request.state == "waiting":
                new.append(SimpleNamespace(req_id=name, block_ids=(came,), num_computed_tokens=request.computed))
            else:
                cached.append(name)
                blocks.append((came,) if came else None)
                resumed |= {name} if first else set()
            request.state = "running"
        rows = SimpleNamespace(
            req_ids=cached,
            resumed_req_ids=resumed,
            new_block_ids=blocks,
            num_computed_tokens=[before[n] for n in cached],
        )
        output = SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=rows, num_scheduled_tokens=scheduled,
            preempted_req_ids=self.preempted, finished_req_ids=self.told,
        )  # fmt: skip
        self.preempted, self.told = set(), set()
        return output, at_once

    # The worker and its model.

    def write(self, request: Request, begin: int, end: int, layers: range = range(LAYERS)) -> None:
        """What the model makes of these tokens."""
        for layer in layers:
            for token in range(begin, end):
                block, at = self._place(request, token)
                self.caches[layer][block, :, at] = value(
                    request.seed, layer, self.heads[:, None], token, np.arange(DIM)[None]
                )

    def wrong(self, request: Request, begin: int, end: int, layers: range = range(LAYERS)) -> list[tuple[int, int]]:
        """Layers and tokens whose cache is not what the model would have made."""
        found = []
        for layer in layers:
            for token in range(begin, end):
                block, at = self._place(request, token)
                wanted = value(request.seed, layer, self.heads[:, None], token, np.arange(DIM)[None])
                if not (self.caches[layer][block, :, at] == wanted).all():
                    found.append((layer, token))
        return found

    def _place(self, request: Request, token: int) -> tuple[int, int]:
        """A block of the tensor, and where in it."""
        block, at = divmod(token, self.shape.block)
        return request.blocks[block] * (self.shape.block // TOKENS) + at // TOKENS, at % TOKENS

    def step(self, chunk: int = 64, *, alone: bool = False) -> None:
        """Schedule, compute so many tokens of each request, and hear what the workers say; `alone`: this rank's."""
        output, at_once = self._schedule(chunk)
        meta = self.scheduler.build_connector_meta(output)
        worker = self.worker
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        if at_once:
            worker.start_load_kv(None)
        ran = [(self.requests[name], count) for name, count in output.num_scheduled_tokens.items()]
        if ran:
            self._forward(ran, at_once)
        if not at_once:
            worker.start_load_kv(None)
        worker.wait_for_save()
        sent, came = worker.get_finished(output.finished_req_ids)
        bad, report = worker.get_block_ids_with_load_errors(), worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        mine = (sent or set(), came or set(), bad, report)
        self._hear([mine] if alone else self.side.allgather_object(mine), 1 if alone else self.side.size)

    def _forward(self, ran: list[tuple[Request, int]], at_once: list[Request]) -> None:
        for layer, name in enumerate(NAMES):
            self.worker.wait_for_layer_load(name)
            for request in at_once:
                self.early += self.wrong(request, 0, request.num_prompt_tokens - 1, range(layer, layer + 1))
            for request, count in ran:
                self.write(request, request.computed, request.computed + count, range(layer, layer + 1))
            if layer != 1:  # one that says nothing
                self.worker.save_kv_layer(name, None, None)
        for request, count in ran:
            request.computed += count

    def _hear(self, told: list[Any], ranks: int) -> None:
        reports = [each[3] for each in told if each[3] is not None]
        for other in reports[1:]:
            reports[0] = reports[0].aggregate(other)
        for counter, at in ((self.sent, 0), (self.came, 1)):
            for each in told:
                counter.update(each[at])
        sent, came = (
            {name for name, count in counter.items() if count == ranks and name in self.requests}
            for counter in (self.sent, self.came)
        )
        output = SimpleNamespace(kv_connector_worker_meta=reports[0] if reports else None, finished_recving=came)
        self.scheduler.update_connector_output(output)
        self.bad |= {block for each in told for block in each[2]}
        for name in came:
            request = self.requests[name]
            if request.state == "finished":
                self._give_back(name)
            elif request.state == "loading":
                request.state = "loaded"
        for name in sent & {name for name in self.requests if self.requests[name].state == "finished"}:
            self._give_back(name)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
