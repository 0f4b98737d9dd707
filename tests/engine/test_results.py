"""Calls without an array for the result return a new one like the input."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from installed import import_torch
from ranks import Ranks

import hetcoll
from hetcoll.runtime.results import like


def _results(comm: hetcoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    for _ in range(2):  # the second time over the fast path
        for dtype in (np.float32, np.int64, np.bool_):
            x = np.full((2, 3), rank % 2, dtype)
            every = comm.allgather(x)
            assert every.dtype == dtype
            assert every.shape == (size, 2, 3)
            assert all((every[r] == dtype(r % 2)).all() for r in range(size))
        assert comm.allgather(np.array(rank)).tolist() == list(range(size))
        part = comm.reduce_scatter(np.arange(size * 4.0).reshape(size, 2, 2))
        assert part.tolist() == (size * np.arange(size * 4.0).reshape(size, 2, 2)[rank]).tolist()
        assert comm.reduce_scatter(np.arange(size), op="max").shape == ()
        got = comm.alltoall(np.arange(2 * size) + 100 * rank)
        assert got.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
        counts = [r + 1 for r in range(size)]
        got = comm.alltoall(np.full(sum(counts), rank), sendcounts=counts, recvcounts=[rank + 1] * size, timeout=20.0)
        assert got.tolist() == [r for r in range(size) for _ in range(rank + 1)]
        every = comm.allgatherv(np.full(counts[rank], rank), counts=deque(counts))
        assert every.tolist() == [r for r in range(size) for _ in range(counts[r])]
        assert comm.allgatherv(np.zeros(0), counts=[0] * size).shape == (0,)
        part = comm.reduce_scatterv(np.arange(sum(counts)), counts=counts)
        assert part.tolist() == [size * i for i in range(sum(counts))][sum(counts[:rank]) :][: counts[rank]]
        for root in range(size):
            given = comm.gather(np.full((2, 3), rank, np.float32), root=root)
            if rank != root:
                assert isinstance(given, hetcoll.Work)
                continue
            assert given.dtype == np.float32
            assert given.tolist() == [[[r] * 3] * 2 for r in range(size)]


def _refuse(comm: hetcoll.Communicator) -> None:
    x = np.ones(comm.size)
    for wrong, error, words in (
        (lambda: comm.reduce_scatter(np.ones((comm.size + 1, 2))), hetcoll.ArgumentError, "leading axis of 3"),
        (lambda: comm.reduce_scatter(np.ones(())), hetcoll.ArgumentError, "leading axis of 3"),
        (lambda: comm.alltoall(np.ones(4)), hetcoll.ArgumentError, "wanted a multiple of 3 elements, got 4"),
        (lambda: comm.alltoall(x, sendcounts=[1] * 3), hetcoll.ArgumentError, "wanted both or neither"),
        (lambda: comm.alltoall(x, sendcounts=[1] * 3, recvcounts=["a"]), hetcoll.BufferTypeError, "wanted a whole"),
        (
            lambda: comm.allgather(b"bytes"),
            hetcoll.BufferTypeError,
            "since none like a bytes can be made",
        ),
        (lambda: comm.allgather([1, 2]), hetcoll.BufferTypeError, "sendbuf: wanted an array"),
        (lambda: comm.allgatherv(x), hetcoll.ArgumentError, "counts: wanted 3 counts"),
        (lambda: comm.allgatherv(x, counts=(1 for _ in range(3))), hetcoll.BufferTypeError, "one a rank, got <gen"),
        (lambda: comm.reduce_scatterv(x, counts=iter([1] * 3)), hetcoll.BufferTypeError, "one a rank, got <list_it"),
        (lambda: comm.allgatherv(x, counts={1, 2, 3}), hetcoll.BufferTypeError, "one a rank, got {1, 2, 3}"),
        (lambda: comm.allgatherv(x, counts={0: 1, 1: 1, 2: 1}), hetcoll.BufferTypeError, "one a rank, got {0: 1"),
        (lambda: comm.allgatherv(x, counts=["a"]), hetcoll.BufferTypeError, "wanted a whole"),
        (lambda: comm.reduce_scatterv(x, counts=4), hetcoll.BufferTypeError, "wanted 3 counts, one a rank, got 4"),
        (lambda: comm.gather(x, root=3), hetcoll.ArgumentError, r"wanted a rank in \[0, 3\)"),
        (lambda: comm.gather(x, root=comm.rank, async_op=True), hetcoll.ArgumentError, "an array with async_op=True"),
        (lambda: comm.gather([1], root=comm.rank), hetcoll.BufferTypeError, "sendbuf: wanted an array"),
        (
            lambda: comm.allgather(x, async_op=True),
            hetcoll.ArgumentError,
            "recvbuf: wanted an array with async_op=True",
        ),
    ):
        with pytest.raises(error, match=words):
            wrong()
    comm.barrier()


def test_results_are_returned(pool: Callable[..., Ranks]) -> None:
    pool(3).run(_results)


def test_what_has_no_result_like_it(pool: Callable[..., Ranks]) -> None:
    pool(3).run(_refuse)


def test_a_rank_alone_has_results_too() -> None:
    with hetcoll.init() as comm:
        for _ in range(2):
            x, y = np.arange(3.0), np.empty(3)
            comm.gather(x, y)  # the fast path knows a call that looks like the next one
            found = comm.gather(x)
            assert isinstance(found, np.ndarray)
            assert found.tolist() == [x.tolist()]


def test_tensors_have_tensors_like_them() -> None:
    torch = import_torch()
    for kind in (torch.bfloat16, torch.int64):
        made = like(torch.ones(3, dtype=kind), (2, 3))
        assert (made.dtype, tuple(made.shape), made.device.type) == (kind, (2, 3), "cpu")
