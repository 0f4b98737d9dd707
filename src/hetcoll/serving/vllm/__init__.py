"""vLLM's KV-connector interface (0.32, 0.33) over `hetcoll.serving`: one instance prefills, another decodes.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HetcollConnector", "kv_connector_module_path":
        "hetcoll.serving.vllm", "kv_role": "kv_producer", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": "10.0.0.1:29600", "prefill_ranks": 4, "decode_ranks": 2}}'

The other instance is the ``kv_consumer``. The two may have GPUs of different vendors and different tensor parallel
sizes. All their workers are one hetcoll job, prefilling ranks first, whose first rank listens at ``address``. A router
gives both requests the same ``transfer_id`` in `kv_transfer_params`, with ``do_remote_decode`` and
``do_remote_prefill``, at once or one after the other.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from ... import ArgumentError
from ...calls.buffers import read_buffer
from .decoding import DecodeWorker
from .meeting import Settings, in_memory_order, join, layout_of, meet
from .prefilling import PrefillWorker
from .scheduling import DecodeScheduling, PrefillScheduling
from .steps import Report, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["HetcollConnector"]

_ALONE = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
_DIGITS = re.compile(r"(\d+)")


def _by_number(name: str) -> list[Any]:
    """layers.2 before layers.10."""
    return [int(part) if part.isdigit() else part for part in _DIGITS.split(name)]


class HetcollConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. What cannot work is an `ArgumentError` at the start: both roles in one instance, pipelines,
    caches of several groups, layers that are not in one piece.

    Where a request's cache does not come in time, or its prefilling was aborted, its blocks are those of
    `get_block_ids_with_load_errors`; vLLM computes it anew with ``kv_load_failure_policy: recompute``. Once a rank of
    the job is lost, what is under way fails so, and the instances go on by themselves: the decoder computes whole
    requests.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        if transfer.kv_role not in ("kv_producer", "kv_consumer"):
            raise ArgumentError(f"kv_role: wanted kv_producer or kv_consumer, got {transfer.kv_role}")
        self._prefills = transfer.kv_role == "kv_producer"
        settings = self._settings = Settings.of(transfer.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        for name in _ALONE:
            if getattr(parallel, name, 1) != 1:
                raise ArgumentError(f"{name}: wanted 1, got {getattr(parallel, name)}")
        self._ranks = settings.prefill_ranks if self._prefills else settings.decode_ranks
        if (size := parallel.tensor_parallel_size) != self._ranks:
            name = "prefill_ranks" if self._prefills else "decode_ranks"
            raise ArgumentError(f"tensor_parallel_size: wanted {self._ranks}, as {name} says, got {size}")
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ArgumentError(f"kv_cache_groups: wanted one, of layers that are alike, got {len(groups)}")
        self._names = sorted(groups[0].layer_names, key=_by_number)
        self._block_tokens = int(groups[0].kv_cache_spec.block_size)
        self._scheduling: PrefillScheduling | DecodeScheduling | None = None
        self._worker: PrefillWorker | DecodeWorker | None = None
        self._bad: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduling = PrefillScheduling() if self._prefills else DecodeScheduling(
                settings.slots, self._ranks, self._block_tokens, settings.layerwise
            )  # fmt: skip

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # what is sent, or waited for, by layer is not in a graph

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "LBHNC"  # a head's tokens together: few pieces, where heads are re-cut

    # Of the scheduler.

    @property
    def _planned(self) -> PrefillScheduling | DecodeScheduling:
        assert self._scheduling is not None, "a method of the scheduler was called on a worker"
        return self._scheduling

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._planned.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._planned.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._planned.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, Report)
        self._planned.hear(report, set(connector_output.finished_recving or ()))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._planned.finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._planned.finished(request)

    # Of a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Become a rank of the job: blocks until all workers of both instances are there."""
        if missing := set(self._names) - set(kv_caches):
            raise ArgumentError(f"kv_caches: wanted all layers of the group, got none for {sorted(missing)}")
        turned = [in_memory_order(name, kv_caches[name]) for name in self._names]
        self._arrays = arrays = [array for array, _ in turned]
        if len({(tuple(array.shape), axes) for array, axes in turned}) > 1:
            raise ArgumentError(f"kv_caches: wanted layers that are alike, got {[tuple(a.shape) for a in arrays]}")
        model = self._vllm_config.model_config
        heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
        layout = layout_of(arrays[0].shape, turned[0][1], len(arrays), heads, self._ranks)
        if self._block_tokens % layout.block_tokens:
            raise ArgumentError(
                f"kv_caches: wanted a divisor of {self._block_tokens} tokens, got {layout.block_tokens}"
            )
        parts = self._block_tokens // layout.block_tokens

        def expand(blocks: list[int]) -> list[int]:
            return [block * parts + part for block in blocks for part in range(parts)]

        settings, first = self._settings, 0 if self._prefills else self._settings.prefill_ranks
        rank = int(self._vllm_config.parallel_config.rank)
        most = -(-int(model.max_model_len) // layout.block_tokens) + parts
        self._layer = {name: layer for layer, name in enumerate(self._names)}
        self._comm = comm = join(settings, first + rank, arrays[0])
        try:
            handoff, mailbox = meet(comm, settings, arrays, self._names, layout, most)
            self._worker = (
                PrefillWorker(comm, handoff, mailbox, expand, settings.timeout)
                if self._prefills
                else DecodeWorker(comm, handoff, mailbox, expand, settings.timeout, rank == 0)
            )
        except BaseException:
            comm.close()
            raise

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Step)
        if self._worker is not None:
            self._worker.flush(kv_connector_metadata.preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Step)
        if self._worker is not None:
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        if isinstance(self._worker, DecodeWorker):
            self._worker.start(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if isinstance(self._worker, DecodeWorker) and layer_name in self._layer:
            self._worker.wait(self._layer[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if isinstance(self._worker, PrefillWorker) and layer_name in self._layer:
            self._worker.save(self._layer[layer_name], self._stream())

    def wait_for_save(self) -> None:
        if isinstance(self._worker, PrefillWorker):
            self._worker.save_rest(self._stream())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        sent, came, bad = self._worker.results(finished_req_ids)
        self._bad |= bad
        return sent or None, came or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        found, self._bad = self._bad, set()
        return found

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self._worker is None else self._worker.report()

    def shutdown(self) -> None:
        if (worker := self._worker) is not None:
            self._worker = None
            with self._comm:
                worker.close()

    def _stream(self) -> int | None:
        """On which this thread computes now; None on a CPU."""
        buffer = read_buffer(self._arrays[0], "kv_caches", writable=False)
        if buffer.device == "cpu":
            return None
        import torch

        stream: int = torch.cuda.current_stream(buffer.index).cuda_stream
        return stream
