"""What goes wrong, on four ranks; each function makes its own process groups."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import wait_until
from torch._subclasses import FakeTensorMode

import hetcoll
from hetcoll.rendezvous.protocol.unique_id import HOSTED
from hetcoll.torch import HetcollProcessGroup


def _init(store: dist.Store, rank: int, size: int, seconds: float = 20.0) -> None:
    dist.init_process_group("hetcoll", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def _use(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        dist.all_reduce(torch.ones(4))
        time.sleep(0.001)


def _end() -> None:
    dist.destroy_process_group()
    assert not dist.is_initialized()


def mismatch(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size)
    with pytest.raises(dist.DistBackendError, match="rank") as caught:
        dist.all_reduce(torch.ones(3 if rank == 2 else 4))
    assert isinstance(caught.value, hetcoll.CollectiveMismatchError)
    assert f"at {__file__}:{mismatch.__code__.co_firstlineno + 3}" in str(caught.value)  # not torch's own
    assert "distributed_c10d" not in str(caught.value)
    with pytest.raises(RuntimeError):
        dist.barrier()
    _end()


def no_memory(store: dist.Store, rank: int, size: int) -> None:
    """Of tensors that only describe one nothing is sent; later calls work."""
    _init(store, rank, size)
    meta, other = torch.empty(4, device="meta"), (rank + 1) % size
    with FakeTensorMode():
        fake = torch.empty(4)
    for tensor, words in ((meta, "got one on meta"), (fake, "FakeTensor has no memory")):
        for call in (dist.all_reduce, partial(dist.recv, src=other), partial(dist.send, dst=other)):
            with pytest.raises(hetcoll.BufferTypeError, match=words):
                call(tensor)
    dist.all_reduce(x := torch.ones(4))
    assert x.tolist() == [size] * 4
    _end()


def timeout(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size, 1.0)
    start = time.monotonic()
    if rank != 3:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(torch.ones(4))
        assert isinstance(caught.value, hetcoll.CollectiveTimeoutError | hetcoll.PeerLostError), caught.value
        assert 0.5 < time.monotonic() - start < 10
        (last,) = [call for call in dist.group.WORLD.dump() if call["operation"] == "allreduce"]
        assert last["state"] == f"failed: {caught.value}"
    else:
        time.sleep(2.5)
    _end()


def timeout_of_one_wait(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size)
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        future = work.get_future()
        with pytest.raises(dist.DistBackendError):
            work.wait(timedelta(seconds=0.5))
        with pytest.raises(Exception, match="rank"):
            future.wait()
        assert isinstance(work.exception(), hetcoll.CommunicationError)
        assert work.is_completed()
        assert not work.is_success()
    else:
        time.sleep(1.0)
    _end()


def futures_after_the_end(store: dist.Store, rank: int, size: int) -> None:
    """Who asks for one once the group's threads have ended is not left waiting."""
    _init(store, rank, size)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    _end()
    done = work.get_future().then(lambda found: found.value()[0].tolist())
    wait_until(done.done, 30)
    assert done.wait() == [size, size]


def abort(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size)
    group = dist.group.WORLD
    work = None if rank == 0 else dist.all_reduce(torch.ones(4), async_op=True)
    store.set(f"{rank} has called", "")
    if rank == 0:
        store.wait([f"{other} has called" for other in range(size)])
        dist.distributed_c10d._abort_process_group()
        assert not dist.is_initialized()
        group.shutdown()
        return
    with pytest.raises(dist.DistBackendError) as caught:
        work.wait()
    assert isinstance(caught.value, hetcoll.AbortedError | hetcoll.PeerLostError)
    assert group.get_error() == torch._C._distributed_c10d.ErrorType.COMM_ERROR
    _end()


def a_lost_rank(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size)
    if rank != 3:
        with pytest.raises(dist.DistBackendError) as caught:
            _use(seconds=10)
        assert isinstance(caught.value, hetcoll.PeerLostError)
        assert caught.value.rank == 3
    _end()


def backward_of_a_lost_rank(store: dist.Store, rank: int, size: int) -> None:
    """DistributedDataParallel takes results out of futures in C++, several buckets at a time."""
    _init(store, rank, size)
    layers = [torch.nn.Linear(300, 300) for _ in range(6)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    for _ in range(2):  # the second step makes new buckets
        model(torch.ones(2, 300)).sum().backward()
    if rank != 3:
        loss = model(torch.ones(2, 300)).sum()
        with pytest.raises(RuntimeError, match="rank 3 left"):  # PyTorch's error may be around ours
            loss.backward()
    _end()


def shrinking(store: dist.Store, rank: int, size: int) -> None:
    """The ranks that are left after one was lost go on as the default group."""
    _init(store, rank, size)
    if rank == 3:
        _end()
        return
    half = dist.new_group([0, 1, 2])
    with pytest.raises(dist.DistBackendError):
        _use(seconds=10)
    made = dist.shrink_group([3], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    assert dist.group.WORLD is made
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 3, "hetcoll")
    assert half not in dist.distributed_c10d._world.pg_map
    x = torch.full((5,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [6.0] * 5
    told = [None] * 3
    dist.all_gather_object(told, rank)
    assert told == [0, 1, 2]
    with pytest.raises(ValueError, match="out of bounds"):
        dist.shrink_group([3])
    if rank != 1:  # once more, and in the middle
        dist.shrink_group([1])
        dist.all_reduce(x)
        assert (dist.get_rank(), x.tolist()) == (rank // 2, [12.0] * 5)
    _end()


def shrinking_a_group(store: dist.Store, rank: int, size: int) -> None:
    """Another group than the default one: that and the others stay."""
    _init(store, rank, size)
    group = dist.new_group([0, 1, 3])
    if rank in (0, 3):
        made = dist.shrink_group([1], group)
        x = torch.ones(2)
        dist.all_reduce(x, group=made)
        assert x.tolist() == [2.0, 2.0]
        assert dist.get_process_group_ranks(made) == [0, 3]
    y = torch.ones(1)
    dist.all_reduce(y)
    assert y.item() == size
    _end()


def _waiting(store: dist.Store, rank: int, size: int) -> HetcollProcessGroup:
    """A group whose ranks `reconfigure` tells."""
    about: dict[str, Any] = {"store": store, "timeout": timedelta(seconds=20), "enable_reconfigure": True}
    if not hasattr(dist, "_reconfigure"):  # PyTorch before 2.14 knows nothing of it
        return HetcollProcessGroup.make(SimpleNamespace(group_rank=rank, group_size=size, **about))
    dist.init_process_group("hetcoll", rank=rank, world_size=size, **about)
    assert dist._supports_reconfigure()
    return cast(HetcollProcessGroup, dist.group.WORLD)


def _reconfigure(group: HetcollProcessGroup, uuid: int, handles: list[str] | set[str], seconds: float = 20) -> None:
    timeout = timedelta(seconds=seconds)
    if hasattr(dist, "_reconfigure"):
        assert dist._reconfigure(uuid, handles, timeout=timeout).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (group.rank(), group.size())
    else:
        assert group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout)).wait()


def _sum(group: HetcollProcessGroup) -> float:
    group.allreduce([x := torch.full((3,), group.rank() + 1.0)], dist.AllreduceOptions()).wait()
    return float(x[0])


def reconfigured(store: dist.Store, rank: int, size: int) -> None:
    """Ranks that are left out come again, in another order. No store is left behind, also where somebody never came."""
    before, group = set(HOSTED), _waiting(store, rank, size)

    def tell(what: str) -> list[str]:
        store.set(f"{what} {rank}", group.get_reconfigure_handle())
        return [store.get(f"{what} {each}").decode() for each in range(size)]

    with pytest.raises(dist.DistBackendError, match=r"wants torch\.distributed\._reconfigure"):
        _sum(group)
    first = tell("first")
    assert first == tell("again")
    _reconfigure(group, 1, first)
    assert (group.rank(), group.size(), _sum(group)) == (rank, 4, 10.0)
    group.monitored_barrier()
    second = tell("second")
    if rank in (1, 3):
        for wrong in (first, [second[0]], second[1:2] * 2, [second[rank], second[rank]]):
            with pytest.raises(ValueError, match="handles: wanted one of each rank"):
                _reconfigure(group, 2, wrong)
        _reconfigure(group, 2, second[1::2])
        assert (group.rank(), group.size(), _sum(group)) == (rank // 2, 2, 3.0)
    else:
        assert group.rank() == rank
        with pytest.raises(dist.DistBackendError):
            _sum(group)
    third = tell("third")
    assert (third[0], third[2]) == (second[0], second[2]), "which were not used"
    _reconfigure(group, 3, third[::-1])
    assert (group.rank(), group.size(), _sum(group)) == (3 - rank, 4, 10.0)
    group.monitored_barrier()
    done = group.allreduce([torch.ones(1)], None).get_future().then(lambda _: _sum(group))  # over one of its own
    assert done.wait() == 10.0
    fourth = tell("fourth")
    group.abort()
    _reconfigure(group, 4, set(fourth))
    assert _sum(group) == 10.0
    fifth = tell("fifth")
    if rank < 2:
        with pytest.raises(hetcoll.InitError, match="2"):
            _reconfigure(group, 5, fifth[:3], seconds=1)
        with pytest.raises(dist.DistBackendError, match="destroyed, or wants"):
            _sum(group)
        assert group.get_reconfigure_handle() not in fifth
    group.shutdown()
    if dist.is_initialized():
        _end()
    wait_until(lambda: set(HOSTED) == before, 30)


def tags_of_other_sizes(store: dist.Store, rank: int, size: int) -> None:
    """A tagged receive of another count than the send's fails the group. The sender hears of it by its next call, if
    the send was over before."""
    _init(store, rank, size)
    dist.barrier()
    if rank == 1:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.recv(torch.empty(4), 0, tag=3)
        assert isinstance(caught.value, hetcoll.CollectiveMismatchError)
        site = f"{__file__}:{tags_of_other_sizes.__code__.co_firstlineno + 7}"
        assert f"rank 1 called recv(float32, count=4, tag=3) from rank 0 at {site}" in str(caught.value)
        assert "; rank 0 called send(float32, count=8, tag=3) to rank 1" in str(caught.value)
    else:
        with pytest.raises(dist.DistBackendError, match="tag=3"):  # noqa: PT012 (whichever hears of it first)
            if rank == 0:
                dist.send(torch.ones(8), 1, tag=3)
            dist.barrier()
    _end()


def a_tag_that_nobody_sends(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size)
    dist.barrier()
    if rank == 1:
        work = dist.irecv(torch.empty(4), 0, tag=3)
        with pytest.raises(
            dist.DistBackendError, match=r"tag=3\) from rank 0 at .* did not finish in 0\.5 s"
        ) as caught:
            work.wait(timedelta(seconds=0.5))
        assert isinstance(caught.value, hetcoll.CollectiveTimeoutError)
    else:
        with pytest.raises(dist.DistBackendError, match="tag=3"):
            dist.barrier()
    _end()


def a_tagged_message_of_a_lost_rank(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size)
    x = torch.empty(2)
    if rank == 0:
        dist.send(torch.ones(2), 1, tag=1)
        store.wait(["received"])  # an abort would end that message, too
    if rank == 1:
        dist.recv(x, 0, tag=1)
        store.set("received", "")
        with pytest.raises(dist.DistBackendError) as caught:
            dist.recv(x, 0, tag=2)
        assert isinstance(caught.value, hetcoll.PeerLostError | hetcoll.AbortedError), caught.value
    if rank == 0:
        dist.distributed_c10d._abort_process_group()
    else:
        _end()


def a_tag_of_a_rank_that_leaves(store: dist.Store, rank: int, size: int) -> None:
    """Numbers are those of the group, whoever of the two found out."""
    _init(store, rank, size)
    x = torch.empty(2)
    if rank == 3:
        dist.send(torch.ones(2), 1, tag=1)
    if rank == 1:
        dist.recv(x, 3, tag=1)
        with pytest.raises(dist.DistBackendError, match=r"from rank 3 at .* left while it was needed") as caught:
            dist.recv(x, 3, tag=2)
        assert isinstance(caught.value, hetcoll.PeerLostError)
        assert caught.value.rank == 3
    _end()


def no_source(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size, 0.7)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"no rank began to send to rank 0 in 0\.7 s") as caught:
            dist.recv(torch.empty(1))
        assert isinstance(caught.value, hetcoll.CollectiveTimeoutError)
    else:
        time.sleep(1.2)
    _end()


def a_source_that_is_lost(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size)
    if rank == 0:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.recv(torch.empty(1))
        assert isinstance(caught.value, hetcoll.PeerLostError | hetcoll.AbortedError)
    else:
        time.sleep(0.2)
    if rank == 2:
        dist.distributed_c10d._abort_process_group()
    else:
        time.sleep(0.5)
        _end()


def monitored_barrier(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size)
    limit = timedelta(seconds=0.5)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Ranks 2, 3 failed to pass monitoredBarrier in 500 ms"):
            dist.monitored_barrier(timeout=limit, wait_all_ranks=True)
    elif rank == 1:
        with pytest.raises(RuntimeError, match="Please check rank 0 logs"):
            dist.monitored_barrier(timeout=limit, wait_all_ranks=True)
    else:
        time.sleep(1.0)
    x = torch.ones(1)
    dist.all_reduce(x)  # the group is whole
    assert x.item() == size
    _end()


def again_and_again(store: dist.Store, rank: int, size: int) -> None:
    """Groups come and go over one store, the last with three years for each call."""
    for round_, seconds in enumerate((20.0, 20.0, 1e8)):
        _init(store, rank, size, seconds)
        x = torch.tensor([float(round_)])
        dist.all_reduce(x)
        assert x.item() == round_ * size
        _end()


def rank_0_never_comes(store: dist.Store, rank: int, size: int) -> None:
    if rank:
        with pytest.raises(hetcoll.InitError, match="rank 0 of this process group did not appear"):
            _init(store, rank, size, 0.5)
        dist.distributed_c10d._world.group_count = 0  # torch has counted this one, on some ranks


def wrong_arguments(store: dist.Store, rank: int, size: int) -> None:
    _init(store, rank, size)
    with pytest.raises(ValueError, match="wanted 4 tensors, one a rank, got 2"):
        dist.all_gather([torch.ones(1)] * 2, torch.ones(1))
    with pytest.raises(ValueError, match="recvbuf: wanted 4 elements"):
        dist.all_gather_into_tensor(torch.ones(3), torch.ones(1))
    with pytest.raises(ValueError, match="wanted a first dimension that 4 ranks divide, got 6"):
        dist.all_to_all_single(torch.ones(6), torch.ones(6))
    with pytest.raises(ValueError, match="bor is not defined on float32"):
        dist.all_reduce(torch.ones(1), dist.ReduceOp.BOR)
    with pytest.raises(TypeError, match="wanted one dtype"):
        dist.all_gather_into_tensor(torch.ones(4), torch.ones(1, dtype=torch.float64))
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size
    _end()
