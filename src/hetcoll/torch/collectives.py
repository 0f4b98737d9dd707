"""The collectives of a process group, in torch's names and forms.

torch has three forms of most: lists of tensors, one flat tensor ("single", "base", "tensor"), and many at once
("coalesced"). Lists are staged: torch promises nothing about where their tensors lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from . import sparse
from .launch import Launcher
from .tensors import flat, joined, packed, reduction, rows, spread

Tensors = Sequence[torch.Tensor]


def _options(opts: Any, kind: Any, op: Any, root: int | None, timeout: timedelta | None) -> Any:
    """Of a call in one of torch's short forms, such as ``group.allreduce(tensor, ReduceOp.SUM)``: its options."""
    if type(opts) is kind or (opts is not None and not isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType | int)):
        return opts
    made = kind()
    if isinstance(opts, int):
        root = opts
    elif opts is not None:
        op = opts
    if op is not None:
        made.reduceOp = op
    if root is not None:
        made.rootRank = root
    if timeout is not None:
        made.timeout = timeout
    return made


def _one(tensors: Any) -> torch.Tensor:
    """torch passes lists of one tensor, from when a process had several GPUs."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"tensors: wanted one tensor, got {len(tensors)}")
    found: torch.Tensor = tensors[0]
    return found


def _list(tensors: Any) -> list[torch.Tensor]:
    """The one list of tensors in a list of lists, or the list itself."""
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        return list(tensors[0])
    return list(tensors)


class Collectives(Launcher):
    """See `HetcollProcessGroup`. Every method returns a Work; options decide whether the call blocks."""

    def _check_list(self, tensors: Tensors, name: str) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{name}: wanted {self.size()} tensors, one a rank, got {len(tensors)}")

    def _check_parts(self, tensors: Tensors, name: str, part: torch.Tensor) -> None:
        """A root's are cut alike for all ranks: parts of other lengths would come apart in other places."""
        self._check_list(tensors, name)
        if set(counts := [tensor.numel() for tensor in tensors]) != {part.numel()}:
            raise ValueError(f"{name}: wanted {part.numel()} elements each, as every rank's tensor has, got {counts}")

    # Whole tensors.

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist.Work:
        tensor = _one(tensors)
        opts = _options(opts, c10d.AllreduceOptions, op, None, timeout)
        if tensor.layout is torch.sparse_coo:
            return sparse.allreduce(self._comm, self._launch, tensor, opts)
        return self._allreduce([tensor], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._allreduce(list(tensors), _options(opts, c10d.AllreduceCoalescedOptions, None, None, None))

    def _allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        op, factor = reduction(opts.reduceOp)

        def start(how: dict[str, Any]) -> Any:
            memory = [flat(tensor) for tensor in tensors]
            if factor is not None:
                for each in memory:
                    each.mul_(factor)
            return [self._comm.allreduce(each, None, op, **how) for each in memory]

        return self._launch(opts, tensors, start, tensors)

    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None) -> dist.Work:
        tensor = _one(tensors)
        opts = _options(opts, c10d.BroadcastOptions, None, root, timeout)
        return self._launch(
            opts, [tensor], lambda how: [self._comm.broadcast(flat(tensor), opts.rootRank, **how)], [tensor]
        )

    def reduce(
        self, tensors: Any, opts: Any = None, root: int | None = None, op: Any = None, timeout: Any = None
    ) -> dist.Work:
        tensor = _one(tensors)
        opts = _options(opts, c10d.ReduceOptions, op, root, timeout)
        name, factor = reduction(opts.reduceOp)

        def start(how: dict[str, Any]) -> Any:
            memory = flat(tensor)
            if factor is not None:
                memory = memory.mul_(factor) if self.rank() == opts.rootRank else memory * factor
            return [self._comm.reduce(memory, op=name, root=opts.rootRank, **how)]

        return self._launch(opts, [tensor], start, [tensor])

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Like NCCL's it also waits on the host for what is on the current stream of the GPU, if the group has one."""
        opts = _options(opts, c10d.BarrierOptions, None, None, timeout)
        device = opts.device
        if device is not None and device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.current_stream(device).synchronize()
        return self._launch(opts, [], lambda how: [self._comm.barrier(**how)], [])

    # All-gather.

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        outputs, tensor = _list(output_tensors), _one(input_tensors)
        self._check_list(outputs, "output_tensors")
        opts = _options(opts, c10d.AllgatherOptions, None, None, timeout)
        counts = [output.numel() for output in outputs]
        staged = tensor.new_empty(0)

        def start(how: dict[str, Any]) -> Any:
            nonlocal staged
            staged = tensor.new_empty(sum(counts))
            return [self._gather_parts(packed(tensor.contiguous()), staged, counts, how)]

        return self._launch(opts, [tensor, *outputs], start, outputs, lambda: spread(staged, outputs))

    def _gather_parts(self, mine: torch.Tensor, whole: torch.Tensor, counts: list[int], how: dict[str, Any]) -> Any:
        if len(set(counts)) == 1:
            return self._comm.allgather(mine, whole, **how)
        return self._comm.allgatherv(mine, whole, counts, **how)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.AllgatherOptions, None, None, None)

        def start(how: dict[str, Any]) -> Any:
            pairs = zip(inputs, outputs, strict=True)
            return [self._comm.allgather(packed(mine), packed(whole), **how) for mine, whole in pairs]

        return self._launch(opts, [*inputs, *outputs], start, outputs)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> dist.Work:
        """``output_lists[r][i]`` is rank r's ``input_list[i]``."""
        self._check_list(output_lists, "output_lists")
        opts = _options(opts, c10d.AllgatherOptions, None, None, None)
        columns = [(mine, parts) for mine, *parts in zip(input_list, *output_lists, strict=True)]
        outputs = [tensor for each in output_lists for tensor in each]
        staged: list[torch.Tensor] = []

        def start(how: dict[str, Any]) -> Any:
            works = []
            for mine, parts in columns:
                counts = [part.numel() for part in parts]
                staged.append(mine.new_empty(sum(counts)))
                works.append(self._gather_parts(packed(mine.contiguous()), staged[-1], counts, how))
            return works

        def after() -> None:
            for whole, (_, parts) in zip(staged, columns, strict=True):
                spread(whole, parts)

        return self._launch(opts, [*input_list, *outputs], start, outputs, after)

    # Reduce-scatter.

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> dist.Work:
        output, inputs = _one(output_tensors), _list(input_tensors)
        self._check_list(inputs, "input_tensors")
        opts = _options(opts, c10d.ReduceScatterOptions, op, None, timeout)
        name, factor = reduction(opts.reduceOp)
        counts = [tensor.numel() for tensor in inputs]

        def start(how: dict[str, Any]) -> Any:
            whole = joined(inputs)
            if factor is not None:
                whole.mul_(factor)
            if len(set(counts)) == 1:
                return [self._comm.reduce_scatter(whole, packed(output), name, **how)]
            return [self._comm.reduce_scatterv(whole, packed(output), name, counts=counts, **how)]

        return self._launch(opts, [output, *inputs], start, [output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.ReduceScatterOptions, None, None, None)
        name, factor = reduction(opts.reduceOp)

        def start(how: dict[str, Any]) -> Any:
            wholes = [packed(tensor) if factor is None else packed(tensor) * factor for tensor in inputs]
            pairs = zip(wholes, outputs, strict=True)
            return [self._comm.reduce_scatter(whole, packed(mine), name, **how) for whole, mine in pairs]

        return self._launch(opts, [*inputs, *outputs], start, outputs)

    # From and to a root.

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None
    ) -> dist.Work:
        tensor = _one(input_tensors)
        opts = _options(opts, c10d.GatherOptions, None, root, timeout)
        here = opts.rootRank == self.rank()
        outputs = _list(output_tensors) if here else []
        if here:
            self._check_parts(outputs, "output_tensors", tensor)
        staged: torch.Tensor | None = None

        def start(how: dict[str, Any]) -> Any:
            nonlocal staged
            staged = tensor.new_empty(self.size() * tensor.numel()) if here else None
            return [self._comm.gather(packed(tensor.contiguous()), staged, opts.rootRank, **how)]

        def after() -> None:
            if staged is not None:
                spread(staged, outputs)

        return self._launch(opts, [tensor, *outputs], start, outputs, after)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None
    ) -> dist.Work:
        output = _one(output_tensors)
        opts = _options(opts, c10d.ScatterOptions, None, root, timeout)
        here = opts.rootRank == self.rank()
        inputs = _list(input_tensors) if here else []
        if here:
            self._check_parts(inputs, "input_tensors", output)

        def start(how: dict[str, Any]) -> Any:
            return [self._comm.scatter(joined(inputs) if here else None, packed(output), opts.rootRank, **how)]

        return self._launch(opts, [output, *inputs], start, [output])

    # All-to-all.

    def alltoall(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        outputs, inputs = list(output_tensors), list(input_tensors)
        self._check_list(outputs, "output_tensors")
        self._check_list(inputs, "input_tensors")
        opts = _options(opts, c10d.AllToAllOptions, None, None, timeout)
        send, receive = [t.numel() for t in inputs], [t.numel() for t in outputs]
        staged = outputs[0].new_empty(0)

        def start(how: dict[str, Any]) -> Any:
            nonlocal staged
            staged = outputs[0].new_empty(sum(receive))
            return [self._comm.alltoall(joined(inputs), staged, sendcounts=send, recvcounts=receive, **how)]

        return self._launch(opts, [*inputs, *outputs], start, outputs, lambda: spread(staged, outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> dist.Work:
        """Split sizes are in entries of the first dimension; none means equal ones."""
        opts = _options(opts, c10d.AllToAllOptions, None, None, timeout)
        counts: dict[str, Any] = {}
        if output_split_sizes or input_split_sizes:
            counts["sendcounts"] = self._counts(input, input_split_sizes, "input_split_sizes")
            counts["recvcounts"] = self._counts(output, output_split_sizes, "output_split_sizes")
        else:
            self._counts(input, [], "input"), self._counts(output, [], "output")
        return self._launch(
            opts,
            [input, output],
            lambda how: [self._comm.alltoall(packed(input), packed(output), **counts, **how)],
            [output],
        )

    def _counts(self, tensor: torch.Tensor, sizes: Sequence[int], name: str) -> list[int]:
        first, each = rows(tensor)
        if not sizes:
            if first % self.size():
                raise ValueError(f"{name}: wanted a first dimension that {self.size()} ranks divide, got {first}")
            return [first // self.size() * each] * self.size()
        if len(sizes) != self.size() or sum(sizes) != first:
            raise ValueError(f"{name}: wanted {self.size()} sizes whose sum is {first}, got {list(sizes)}")
        return [size * each for size in sizes]

    # What these were called before torch 2.13.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
