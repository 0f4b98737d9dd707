"""Point to point and groups, on four ranks."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh


def send_and_receive() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for src in range(n):
        for dst in range(n):
            if src == rank != dst:
                dist.send(torch.full((3,), float(src * n + dst)), dst)
            elif dst == rank != src:
                x = torch.empty(3)
                assert dist.recv(x, src) == src
                assert (x == src * n + dst).all()


def many_in_order() -> None:
    """Messages between two ranks match in the order of the calls, whatever their sizes."""
    n, rank = dist.get_world_size(), dist.get_rank()
    sizes = [1, 100_000, 0, 7, 1_000_000]
    works = [dist.isend(torch.full((size,), float(i)), (rank + 1) % n) for i, size in enumerate(sizes)]
    got = [torch.empty(size) for size in sizes]
    works += [dist.irecv(x, (rank - 1) % n) for x in got]
    for work in works:
        assert work is not None
        work.wait()
    assert all((x == i).all() for i, x in enumerate(got))
    assert works[-1] is not None
    assert works[-1]._source_rank() == (rank - 1) % n


def peers_out_of_turn() -> None:
    """A peer that is late holds up no message with another: in the order of the calls nobody could begin."""
    rank, count = dist.get_rank(), 2_000_003
    turns: dict[int, list[tuple[str, int]]] = {
        0: [("to", 1), ("to", 3)],
        1: [("from", 2), ("from", 0)],
        2: [("to", 3), ("to", 1)],
        3: [("from", 0), ("from", 2)],
    }
    messages = [(way, peer, torch.full((count,), float(rank if way == "to" else -1))) for way, peer in turns[rank]]
    works = [(dist.isend if way == "to" else dist.irecv)(x, peer) for way, peer, x in messages]
    for (way, peer, x), work in zip(messages, works, strict=True):
        assert work is not None
        work.wait(timedelta(seconds=30))
        assert (x == (rank if way == "to" else peer)).all()


def receives_ahead_of_sends() -> None:
    """Both ranks of a pair may post what they receive first."""
    rank, count = dist.get_rank(), 2_000_003
    for peer in (rank ^ 1, rank ^ 2):
        x = torch.empty(count)
        works = [dist.irecv(x, peer), dist.isend(torch.full((count,), float(rank)), peer)]
        for work in works:
            assert work is not None
            work.wait(timedelta(seconds=30))
        assert (x == peer).all()


def messages_beside_collectives() -> None:
    """A receive that waits for its message holds nothing else up, not even futures."""
    rank = dist.get_rank()
    x, y = torch.empty(4), torch.ones(4)
    work = dist.irecv(x, 0) if rank == 1 else None
    future = None if work is None else work.get_future()
    assert (dist.all_reduce(y, async_op=True).get_future().wait()[0] == 4).all()
    if rank == 0:
        dist.send(torch.ones(4), 1)
    if work is not None and future is not None:
        work.wait()
        assert future.wait()[0] is x
        assert (x == 1).all()


def batches() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    left, right = (rank - 1) % n, (rank + 1) % n
    from_left, from_right, own = torch.empty(5), torch.empty(5), torch.empty(5)
    for order in (slice(None), slice(None, None, -1)):
        operations = [
            dist.P2POp(dist.irecv, from_left, left),
            dist.P2POp(dist.isend, torch.full((5,), rank + 0.5), right),
            dist.P2POp(dist.isend, torch.full((5,), rank + 0.25), left),
            dist.P2POp(dist.irecv, from_right, right),
            dist.P2POp(dist.isend, torch.full((5,), rank + 0.75), rank),
            dist.P2POp(dist.irecv, own, rank),
        ]
        for work in dist.batch_isend_irecv(operations[order]):
            work.wait()
        assert (from_left == left + 0.5).all()
        assert (from_right == right + 0.25).all()
        assert (own == rank + 0.75).all()


def batches_that_are_none() -> None:
    for wrong in ([1, 2], (), "ab"):
        with pytest.raises(ValueError, match="p2p_op_list"):
            dist.batch_isend_irecv(wrong)


def objects_under_detailed_debugging() -> None:
    """torch then logs a hash of what is sent under the name nccl, for which it wants CUDA's memory."""
    objects = [None] * dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
        patch.setattr(distributed_c10d, "get_backend", lambda group=None: dist.Backend.NCCL)
        patch.setattr(distributed_c10d, "is_nccl_available", lambda: True)
        dist.all_gather_object(objects, {"rank": dist.get_rank() * "x"})  # of unlike sizes: torch resizes
    assert objects == [{"rank": rank * "x"} for rank in range(dist.get_world_size())]


def any_source() -> None:
    """Every message comes once, those of one rank in their order; the handle tells whose it was."""
    n, rank = dist.get_world_size(), dist.get_rank()
    if rank == 2:
        got: dict[int, list[float]] = {}
        for _ in range(3 * (n - 1)):
            x = torch.empty(5)
            got.setdefault(dist.recv(x), []).append(x[4].item())
        assert got == {other: [other + i / 4 for i in range(3)] for other in range(n) if other != rank}
    else:
        for i in range(3):
            dist.send(torch.full((5,), rank + i / 4), 2)
    dist.barrier()


def any_source_in_the_background() -> None:
    """Receives have their turns in the order of the calls, those that name their source as well."""
    rank = dist.get_rank()
    if rank == 0:
        got = [torch.empty(2) for _ in range(4)]
        works = [dist.irecv(got[0]), dist.irecv(got[1]), dist.irecv(got[2], 1), dist.irecv(got[3])]
        future = works[0].get_future()
        assert not any(work.is_completed() for work in works)
        dist.barrier()
        for work in works:
            work.wait()
        assert future.wait()[0] is got[0]
        assert [x[0].item() for x in got] == [0, 1, 2, 3]
        assert [work._source_rank() for work in works] == [1, 1, 1, 1]
    else:
        dist.barrier()
    if rank == 1:
        for i in range(4):
            dist.send(torch.full((2,), float(i)), 0)
    dist.barrier()


def any_source_is_fair() -> None:
    """Ranks whose messages wait have their turns. What came from ranks that have left is received all the same."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for stay in (True, False):
        works = [] if rank == 0 else [dist.isend(torch.full((1,), float(rank)), 0) for _ in range(4)]
        dist.barrier()
        if rank == 0:
            sources = [dist.recv(torch.empty(1)) for _ in range(4 * (n - 1))]
            wanted = [1, 2, 3] * 4
            assert (sources if stay else sorted(sources)) == (wanted if stay else sorted(wanted)), sources
        for work in works:
            assert work is not None
            work.wait()
        if stay:
            dist.barrier()


def any_source_after_what_was_refused() -> None:
    """A send or a receive that never began is no message."""
    rank, holes = dist.get_rank(), torch.ones(4, 4)[:, ::2]
    odd = torch.empty(2, dtype=torch.float8_e8m0fnu)
    if rank == 1:
        with pytest.raises(ValueError, match="without holes"):
            dist.send(holes, 0)
        with pytest.raises(TypeError, match=r"supported|exported"):
            dist.send(odd, 0)
        batch = [SimpleNamespace(op=dist.isend, tensor=holes, group_peer=0)]  # as those of a GPU's tensors go
        with pytest.raises(ValueError, match="without holes"):
            dist.group.WORLD._enqueue_batch(batch)
    if rank == 0:
        with pytest.raises(TypeError, match=r"supported|exported"):
            dist.recv(odd, 2)
    dist.barrier()
    if rank == 2:
        dist.send(torch.full((1,), 5.0), 0)
    if rank == 0:
        x = torch.empty(1)
        assert dist.recv(x) == 2
        assert x.item() == 5
    dist.barrier()


def ranks_that_are_none() -> None:
    """Nothing was sent, and nothing counts: the last receive asks who has begun to."""
    rank, x = dist.get_rank(), torch.ones(1)
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=rf"dst: wanted a rank in \[0, 4\), got {wrong}"):
            dist.isend(x, wrong)
        with pytest.raises(ValueError, match=rf"src: wanted a rank in \[0, 4\), got {wrong}"):
            dist.irecv(x, wrong)
        batch = [dist.P2POp(dist.isend, x, (rank + 1) % 4), dist.P2POp(dist.isend, x, wrong)]
        with pytest.raises(ValueError, match=rf"peer: wanted a rank in \[0, 4\), got {wrong}"):
            dist.batch_isend_irecv(batch)
    dist.barrier()
    if rank == 3:
        dist.send(torch.full((1,), 7.0), 0)
    if rank == 0:
        assert dist.recv(x) == 3
        assert x.item() == 7
    dist.barrier()


def any_source_in_a_callback() -> None:
    """What callbacks send and receive goes over a communicator of its own."""
    rank, n, found = dist.get_rank(), dist.get_world_size(), torch.empty(1)

    def swap(_: object) -> int:
        work = dist.isend(torch.full((1,), float(rank)), (rank + 1) % n)
        source = dist.recv(found)
        assert work is not None
        work.wait()
        return source

    source = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(swap).wait()
    assert (source, found.item()) == ((rank - 1) % n, (rank - 1) % n)


def groups() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for members in ([0, 1], [3, 1, 2], [2], list(range(n))):
        group = dist.new_group(members)
        if rank not in members:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_backend(group) == "hetcoll"
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        assert x.item() == sum(members)
        dist.broadcast(x, members[-1], group=group)
        assert dist.get_process_group_ranks(group) == sorted(members)
        dist.destroy_process_group(group)
    halves, whole = dist.new_subgroups(2)
    assert len(whole) == n // 2
    x = torch.ones(1)
    dist.all_reduce(x, group=halves)
    assert x.item() == 2
    own = dist.new_group([rank, (rank + 1) % n] if rank % 2 == 0 else [rank - 1, rank], use_local_synchronization=True)
    dist.all_reduce(x, group=own)
    assert x.item() == 4


def split() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    half = world.split_group([0, 2] if rank % 2 == 0 else [1, 3], group_name=f"half {rank % 2}")
    assert half is not None
    x = torch.tensor([float(rank)])
    half.allreduce([x]).wait()
    assert x.item() == (2 if rank % 2 == 0 else 4)
    assert half.group_name == f"half {rank % 2}"
    half.shutdown()


def device_mesh() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, total in (("replicate", 2 * (rank % 2) + 2), ("shard", 4 * (rank // 2) + 1)):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh.get_group(name))
        assert x.item() == total, (name, x)
    flat = mesh._flatten("all")
    x = torch.ones(1)
    dist.all_reduce(x, group=flat.get_group())
    assert x.item() == 4


def the_last_calls_can_be_told() -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    x = torch.ones(3, dtype=torch.bfloat16)
    dist.broadcast(x, 0)
    work = dist.irecv(x, 0) if rank == 1 else None
    calls = world.dump()
    assert [call["operation"] for call in calls] == ["broadcast", *(["recv"] if rank == 1 else [])]
    assert calls[0]["tensors"] == ["bfloat16[3]"]
    if work is not None:
        assert calls[1]["state"] == "in flight"
    dist.barrier()
    if rank == 0:
        dist.send(x, 1)
    if work is not None:
        work.wait()
        assert world.dump()[1]["state"] == "complete"


def the_group_answers() -> None:
    world = dist.group.WORLD
    assert dist.get_backend() == "hetcoll"
    assert dist.get_backend_config() == "cpu:hetcoll,cuda:hetcoll"
    assert dist.is_initialized()
    assert dist.get_process_group_ranks(None) == [0, 1, 2, 3]
    assert world.name() == "hetcoll"
    assert world.get_group_store() is not None
    before = world._get_sequence_number_for_group()
    dist.barrier()
    assert world._get_sequence_number_for_group() == before + 1
    assert world.comm.size == dist.get_world_size()
    assert "allreduce" in str(world.comm.explain("allreduce", 1024))
