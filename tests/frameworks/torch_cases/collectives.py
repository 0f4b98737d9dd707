"""Every collective in every form that torch has for it; each function runs on four ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor


def _mine(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What this rank contributes: small whole numbers, so that every order of adding gives the same."""
    return _of(dist.get_rank(), *shape, dtype=dtype)


def _of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * 7 + rank * 5 + 1) % 11).to(dtype).reshape(shape)


def _all(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [_of(rank, *shape, dtype=dtype) for rank in range(dist.get_world_size())]


def _same(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (found, wanted)
    assert torch.equal(found, wanted), (found, wanted)


def all_reduce() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for shape in ((), (1,), (5, 3), (1000,), (0,)):
            x = _mine(*shape, dtype=dtype)
            assert dist.all_reduce(x) is None
            _same(x, torch.stack(_all(*shape, dtype=torch.float64)).sum(0).to(dtype))


def all_reduce_operations() -> None:
    whole = torch.stack(_all(6))
    for op, wanted in (
        (dist.ReduceOp.SUM, whole.sum(0)),
        (dist.ReduceOp.PRODUCT, whole.prod(0)),
        (dist.ReduceOp.MIN, whole.amin(0)),
        (dist.ReduceOp.MAX, whole.amax(0)),
        (dist.ReduceOp.AVG, whole.mean(0)),
        (dist._make_nccl_premul_sum(2.0), 2 * whole.sum(0)),
    ):
        x = _mine(6)
        dist.all_reduce(x, op)
        _same(x, wanted)
    bits = [each.long() for each in whole]
    for op, wanted in (
        (dist.ReduceOp.BAND, bits[0] & bits[1] & bits[2] & bits[3]),
        (dist.ReduceOp.BOR, bits[0] | bits[1] | bits[2] | bits[3]),
        (dist.ReduceOp.BXOR, bits[0] ^ bits[1] ^ bits[2] ^ bits[3]),
    ):
        x = _mine(6, dtype=torch.int64)
        dist.all_reduce(x, op)
        _same(x, wanted)


def all_reduce_of_other_kinds() -> None:
    n = dist.get_world_size()
    flag = torch.tensor([dist.get_rank() == 2, False])
    dist.all_reduce(flag)
    _same(flag, torch.tensor([True, False]))
    z = torch.complex(_mine(4), _mine(4) + 1)
    dist.all_reduce(z)
    _same(z, sum(torch.complex(each, each + 1) for each in _all(4)))  # type: ignore[arg-type]
    parameter = torch.nn.Parameter(_mine(3))
    dist.all_reduce(parameter)
    _same(parameter.data, sum(_all(3)))  # type: ignore[arg-type]
    image = _mine(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    _same(image, sum(_all(2, 3, 4, 5)))  # type: ignore[arg-type]
    small = (_mine(16) % 3).to(torch.float8_e4m3fn)
    dist.all_reduce(small)
    _same(small.float(), sum(each % 3 for each in _all(16)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wanted memory without holes"):
        dist.all_reduce(torch.zeros(4, 4)[:, ::2])
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == n, "the refused call must leave no trace"


def sparse_all_reduce() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.sparse_coo_tensor([[rank, rank + 1, 0]], torch.ones(3, 2), (n + 2, 2), check_invariants=True)
    wanted = torch.zeros(n + 2, 2)
    for r in range(n):
        for i in (r, r + 1, 0):
            wanted[i] += 1
    dist.all_reduce(x)
    _same(x.to_dense(), wanted)


def sparse_tensors_of_other_shapes_are_refused() -> None:
    """An index of one rank would lie outside of another one's tensor. They go on with whatever comes next."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.sparse_coo_tensor([[rank]], torch.ones(1, 2), (n + (rank == 1), 2), check_invariants=True)
    with pytest.raises(ValueError, match=r"wanted one shape.*\(4, 2\) with 1 on rank 0, \(5, 2\) with 1 on rank 1"):
        dist.all_reduce(x)
    y = torch.ones(1)
    dist.all_reduce(y)
    assert y.item() == n


def asynchronous() -> None:
    n = dist.get_world_size()
    xs = [_mine(k + 1) for k in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work, x in reversed(list(zip(works, xs, strict=True))):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is x
        _same(x, sum(_all(len(x))))  # type: ignore[arg-type]
    outputs = [torch.empty(3) for _ in range(n)]
    work = dist.all_gather(outputs, _mine(3), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    for found, wanted in zip(outputs, _all(3), strict=True):
        _same(found, wanted)


def futures() -> None:
    x = _mine(10)

    def again(future: Any) -> Tensor:
        """A callback that starts a collective and waits for its future: PowerSGD's hook does."""
        (found,) = future.value()
        return dist.all_reduce(found, async_op=True).get_future().wait()[0] * 2

    chained = [dist.all_reduce(_mine(10), async_op=True).get_future().then(again) for _ in range(5)]
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    assert future is work.get_future()
    assert future.wait()[0] is x
    total = sum(_all(10))
    for each in chained:
        _same(each.wait(), total * dist.get_world_size() * 2)  # type: ignore[operator]


def coalesced() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    with dist._coalescing_manager() as manager:
        xs = [_mine(3), _mine(5)]
        for x in xs:
            dist.all_reduce(x)
    for x in xs:
        _same(x, sum(_all(len(x))))  # type: ignore[arg-type]
    with dist._coalescing_manager(async_ops=True) as manager:
        outs = [torch.empty(n * 2), torch.empty(n * 3)]
        for out, count in zip(outs, (2, 3), strict=True):
            dist.all_gather_into_tensor(out, _mine(count))
    manager.wait()
    for out, count in zip(outs, (2, 3), strict=True):
        _same(out, torch.cat(_all(count)))
    with dist._coalescing_manager():
        parts = [torch.empty(2), torch.empty(4)]
        for part in parts:
            dist.reduce_scatter_tensor(part, _mine(n * len(part)))
    for part in parts:
        _same(part, sum(_all(n * len(part))).chunk(n)[rank])  # type: ignore[union-attr]
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(n)]
    dist.all_gather_coalesced(lists, [_mine(2), _mine(3)])
    for found, two, three in zip(lists, _all(2), _all(3), strict=True):
        _same(found[0], two)
        _same(found[1], three)


def broadcast() -> None:
    for root in range(dist.get_world_size()):
        x = _mine(7)
        dist.broadcast(x, root)
        _same(x, _of(root, 7))


def reduce() -> None:
    for root in range(dist.get_world_size()):
        x = _mine(7)
        dist.reduce(x, root)
        _same(x, sum(_all(7)) if dist.get_rank() == root else _mine(7))  # type: ignore[arg-type]


def all_gather() -> None:
    n = dist.get_world_size()
    outputs = [torch.empty(2, 3, dtype=torch.bfloat16) for _ in range(n)]
    dist.all_gather(outputs, _mine(2, 3, dtype=torch.bfloat16))
    for found, wanted in zip(outputs, _all(2, 3, dtype=torch.bfloat16), strict=True):
        _same(found, wanted)
    uneven = [torch.empty(r + 1) for r in range(n)]
    dist.all_gather(uneven, _mine(dist.get_rank() + 1))
    for r, found in enumerate(uneven):
        _same(found, _of(r, r + 1))
    scattered = torch.empty(3, n)
    dist.all_gather([scattered[:, r] for r in range(n)], _mine(3))
    _same(scattered, torch.stack(_all(3), 1))
    whole = torch.empty(n * 4)
    dist.all_gather_into_tensor(whole, _mine(4))
    _same(whole, torch.cat(_all(4)))
    in_place = torch.zeros(n, 4)
    in_place[dist.get_rank()] = _mine(4)
    dist.all_gather_into_tensor(in_place, in_place[dist.get_rank()])
    _same(in_place, torch.stack(_all(4)))


def reduce_scatter() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty(3)
    inputs = [_mine(3) + r for r in range(n)]
    dist.reduce_scatter(output, inputs)
    _same(output, sum(_all(3)) + rank * n)  # type: ignore[arg-type]
    uneven = torch.empty(rank + 1)
    dist.reduce_scatter(uneven, [_mine(r + 1) for r in range(n)])
    _same(uneven, sum(_all(rank + 1)))  # type: ignore[arg-type]
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, _mine(2 * n), op=dist.ReduceOp.AVG)
    _same(part, (sum(_all(2 * n)) / n).chunk(n)[rank])  # type: ignore[union-attr]


def gather_and_scatter() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for root in range(n):
        outputs = [torch.empty(2, 2) for _ in range(n)] if rank == root else None
        dist.gather(_mine(2, 2), outputs, dst=root)
        for found, wanted in zip(outputs or [], _all(2, 2), strict=False):
            _same(found, wanted)
        part = torch.empty(2, 2)
        dist.scatter(part, _all(2, 2) if rank == root else None, src=root)
        _same(part, _mine(2, 2))


def parts_of_other_lengths_are_refused() -> None:
    """As many elements in all, but not of each rank: they would come apart in other places than they are cut."""
    n, rank = dist.get_world_size(), dist.get_rank()
    uneven = [torch.zeros(1), torch.zeros(3), *(torch.zeros(2) for _ in range(n - 2))]
    if rank == 1:
        words = r"wanted 2 elements each, as every rank's tensor has, got \[1, 3, 2, 2\]"
        with pytest.raises(ValueError, match=f"output_tensors: {words}"):
            dist.gather(torch.ones(2), uneven, dst=1)
        with pytest.raises(ValueError, match=f"input_tensors: {words}"):
            dist.scatter(torch.ones(2), uneven, src=1)
    dist.barrier()


def all_to_all() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty(2 * n, 3)
    dist.all_to_all_single(output, _mine(2 * n, 3))
    _same(output, torch.cat([each.chunk(n)[rank] for each in _all(2 * n, 3)]))
    send = [(rank + r) % 3 for r in range(n)]
    receive = [(r + rank) % 3 for r in range(n)]
    source, target = _mine(sum(send), 2), torch.empty(sum(receive), 2)
    dist.all_to_all_single(target, source, receive, send)
    wanted = []
    for r in range(n):
        sizes = [(r + k) % 3 for k in range(n)]
        wanted.append(_of(r, sum(sizes), 2).split(sizes)[rank])
    _same(target, torch.cat(wanted))
    outputs = [torch.empty(r + 1) for r in range(n)]
    dist.all_to_all(outputs, [_mine(rank + 1) + r for r in range(n)])
    for r, found in enumerate(outputs):
        _same(found, _of(r, r + 1) + rank)


def objects() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(n)]
    told: list[Any] = ["from 1", 7] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, 1)
    assert told == ["from 1", 7]
    found: list[Any] | None = [None] * n if rank == 2 else None
    dist.gather_object(rank * 10, found, dst=2)
    assert found in (None, [0, 10, 20, 30])
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(n)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b"], dst=3)
    elif rank == 3:
        got: list[Any] = [None, None]
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [{"a": 1}, "b"]


def functional() -> None:
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    _same(funcol.all_reduce(_mine(5), "sum", group) + 0, sum(_all(5)))  # type: ignore[arg-type]
    _same(funcol.all_gather_tensor(_mine(2, 3), 0, group) + 0, torch.cat(_all(2, 3)))
    _same(funcol.all_gather_tensor(_mine(2, 3), 1, group) + 0, torch.cat(_all(2, 3), 1))
    _same(funcol.reduce_scatter_tensor(_mine(2 * n), "sum", 0, group) + 0, sum(_all(2 * n)).chunk(n)[rank])  # type: ignore[union-attr]
    _same(funcol.broadcast(_mine(4), 2, group) + 0, _of(2, 4))
    _same(funcol.all_to_all_single(_mine(n), None, None, group) + 0, torch.stack([each[rank] for each in _all(n)]))
    for found, count in zip(funcol.all_reduce_coalesced([_mine(2), _mine(3)], "sum", group), (2, 3), strict=True):
        _same(found + 0, sum(_all(count)))  # type: ignore[arg-type]
    assert not isinstance(funcol.wait_tensor(funcol.all_reduce(_mine(5), "sum", group)), funcol.AsyncCollectiveTensor)


def older_forms() -> None:
    """`ProcessGroup.allreduce(tensor, op)` and the like, and names from before torch 2.13."""
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None
    x = _mine(4)
    group.allreduce(x, dist.ReduceOp.MAX).wait()
    _same(x, torch.stack(_all(4)).amax(0))
    group.allreduce([x]).wait()
    x = _mine(4)
    group.broadcast(x, 3).wait()
    _same(x, _of(3, 4))
    x = _mine(4)
    group.reduce(x, root=1, op=dist.ReduceOp.SUM).wait()
    outputs = [torch.empty(2) for _ in range(n)]
    group.allgather(outputs, _mine(2)).wait()
    _same(torch.stack(outputs), torch.stack(_all(2)))
    whole, part = torch.empty(n * 2), torch.empty(2)
    group._allgather_base(whole, _mine(2)).wait()
    _same(whole, torch.cat(_all(2)))
    group._reduce_scatter_base(part, _mine(n * 2), dist.ReduceScatterOptions()).wait()
    _same(part, sum(_all(n * 2)).chunk(n)[rank])  # type: ignore[union-attr]
    group.alltoall_base(torch.empty(n), _mine(n), [], []).wait()
    group.barrier().wait()


def monitored_barrier_passes() -> None:
    for _ in range(3):
        dist.monitored_barrier()


def profiled() -> None:
    """Two events a call: one ends with the operation, and is asynchronous for the profiler; one has shapes."""
    rank, n = dist.get_rank(), dist.get_world_size()
    cpu, mark = torch.profiler.ProfilerActivity.CPU, torch.profiler.record_function
    for profile in (torch.profiler.profile(activities=[cpu]), torch.autograd.profiler.profile(record_shapes=True)):
        dist.barrier()
        with profile:
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(100_000), async_op=True).wait()
            dist.all_gather_into_tensor(torch.ones(n), torch.ones(1), async_op=True).wait()
            late = dist.irecv(torch.ones(1), 0) if rank == 1 else None
            with mark("meanwhile"):
                dist.barrier()
            if rank == 0:
                dist.send(torch.ones(1), 1)
            if late is not None:
                late.wait()
            with mark("after"):
                torch.ones(1)
        every = profile.events() if isinstance(profile, torch.profiler.profile) else profile.function_events
        found = [each for each in every if each.name.startswith("hetcoll:")]
        names = [each.name.removeprefix("hetcoll:") for each in found]
        recv, send = ([name] * (rank == wanted) for name, wanted in (("recv", 1), ("send", 0)))
        assert names == ["all_reduce", "all_reduce", "all_gather_into_tensor", *recv, "barrier", *send]
        assert all(each.is_async and each.count == 1 for each in found)
        shaped = isinstance(profile, torch.autograd.profiler.profile)  # and not both, or record_shapes would do nothing
        shapes = [(each.name, each.input_shapes) for each in every if each.name.startswith("c10d::")]
        wanted = [("allreduce_", [[3]]), ("allreduce_", [[100_000]]),
                  ("allgather_into_tensor_coalesced_", [[1], [n]])]  # fmt: skip
        assert shapes[:3] == [(f"c10d::{name}", which if shaped else []) for name, which in wanted]
        recv, send = ([(name, [[1]] if shaped else [])] * (rank == who) for name, who in (("recv_", 1), ("send", 0)))
        assert shapes[3:] == [(f"c10d::{name}", which) for name, which in (*recv, ("barrier", []), *send)]
        assert not any(each.is_async for each in every if each.name.startswith("c10d::"))
        (meanwhile,), (after,) = (
            [each.time_range for each in every if each.name == name] for name in ("meanwhile", "after")
        )
        assert all(each.time_range.end <= after.start for each in found)
        assert all(each.time_range.end <= meanwhile.start for each in found[:3])
        if rank == 1:
            assert found[3].time_range.start <= meanwhile.start
            assert found[3].time_range.end >= meanwhile.start  # it was sent when all were in the barrier


def a_failure_under_the_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(ValueError, match="bor is not defined"):
            dist.all_reduce(torch.ones(1), dist.ReduceOp.BOR)
        x = torch.ones(1)
        dist.all_reduce(x)
    assert x.item() == dist.get_world_size()
    assert [each.name for each in profile.events() if "hetcoll:" in each.name] == 2 * ["hetcoll:all_reduce"]
