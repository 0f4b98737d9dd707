"""Messages with tags match by them, on four ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist


def _filled(value: float, count: int = 3) -> torch.Tensor:
    return torch.full((count,), float(value))


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def tags_out_of_order() -> None:
    """Receives in another order than the sends, tag 0 among them, of sizes that no buffer holds."""
    n, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % n, (rank - 1) % n
    for count in (3, 0, 1_000_003):
        works = [dist.isend(_filled(tag + rank / 4, count), right, tag=tag) for tag in (1, 0, 2, 7)]
        got = {tag: torch.empty(count) for tag in (7, 2, 0, 1)}
        works += [dist.irecv(x, left, tag=tag) for tag, x in got.items()]
        _wait(works[::-1])
        for tag, x in got.items():
            assert (x == tag + left / 4).all(), (tag, x)


def one_after_the_other() -> None:
    """The receiver waits for the last message first, which is of another type."""
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(_filled(1.5, 100_000), 1, tag=1), dist.isend(torch.arange(4), 1, tag=2)]
        _wait(works)
    if rank == 1:
        x, y = torch.empty(100_000), torch.empty(4, dtype=torch.int64)
        assert dist.recv(y, 0, tag=2) == 0
        assert y.tolist() == [0, 1, 2, 3]
        dist.recv(x, 0, tag=1)
        assert (x == 1.5).all()
    dist.barrier()


def in_order_within_a_tag() -> None:
    rank = dist.get_rank()
    if rank == 2:
        _wait([dist.isend(_filled(i), 3, tag=4 + i % 2) for i in range(20)])
    if rank == 3:
        got = [torch.empty(3) for _ in range(20)]
        works = [dist.irecv(got[i], 2, tag=5) for i in range(1, 20, 2)]
        works += [dist.irecv(got[i], 2, tag=4) for i in range(0, 20, 2)]
        _wait(works)
        assert [x[0].item() for x in got] == list(range(20))
    dist.barrier()


def batches_with_tags() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % n, (rank - 1) % n
    got = [torch.empty(3) for _ in range(4)]
    own = [torch.empty(3) for _ in range(2)]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, _filled(tag + rank / 4), right, tag=tag) for tag in range(4)]
        + [dist.P2POp(dist.irecv, got[tag], left, tag=tag) for tag in (2, 0, 3, 1)]
        + [dist.P2POp(dist.isend, _filled(tag), rank, tag=tag) for tag in (0, 1)]
        + [dist.P2POp(dist.irecv, own[tag], rank, tag=tag) for tag in (1, 0)]
    )
    _wait([*works])
    assert [x[0].item() for x in got] == [tag + left / 4 for tag in range(4)]
    assert [x[0].item() for x in own] == [0, 1]


def tags_from_any_source() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0:
        for tag in (2, 0, 1):
            got = set()
            for _ in range(n - 1):
                x = torch.empty(3)
                source = dist.recv(x, tag=tag)
                assert x[0].item() == 10 * source + tag
                got.add(source)
            assert got == {1, 2, 3}
    else:
        _wait([dist.isend(_filled(10 * rank + tag), 0, tag=tag) for tag in (1, 2, 0)])
    dist.barrier()


def a_receive_that_waits_holds_nothing_up() -> None:
    rank = dist.get_rank()
    x = torch.empty(3)
    work = dist.irecv(x, 0, tag=9) if rank == 1 else None
    y = torch.ones(2)
    dist.all_reduce(y)
    assert y[0].item() == 4
    if rank == 0:
        dist.send(_filled(1), 1)
        dist.send(_filled(9), 1, tag=9)
    if rank == 1:
        z = torch.empty(3)
        dist.recv(z, 0)
        assert work is not None
        work.wait()
        assert work._source_rank() == 0
        assert (z[0].item(), x[0].item()) == (1, 9)
    dist.barrier()


def tags_that_cannot_be() -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    with pytest.raises(ValueError, match="tag: wanted 0 or more, got -1"):
        world.send([_filled(1)], (rank + 1) % 4, -1)
    on_gpu = SimpleNamespace(is_cpu=False, device="cuda:0")
    assert world._matched(on_gpu, 0) == 0
    with pytest.raises(ValueError, match="wanted 0 for a tensor on cuda:0, got 3: a GPU's messages match in the order"):
        world._matched(on_gpu, 3)
    configs = dist.distributed_c10d._world.pg_backend_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(configs, world, "cpu:gloo,cuda:nccl")
        assert world._matched(on_gpu, 3) == 0  # who asks for NCCL gets its order
