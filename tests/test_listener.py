"""The data plane's connections: made all at once, proven, and named when they fail."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetcoll.descriptors import new_name, receive_fd, share_fd
from hetcoll.edges import EdgeKey, Request, pack_addresses, unpack_addresses
from hetcoll.env import Config
from hetcoll.errors import AuthenticationError, InitError
from hetcoll.listener import Listener

SECRET = b"s" * 32
COMM = b"c" * 16


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def requests_of(rank: int, listeners: list[Listener], channels: int, stripes: int) -> list[Request]:
    return [
        Request(EdgeKey(COMM, 0, min(rank, peer), max(rank, peer), channel, stripe), listener.addresses)
        for peer, listener in enumerate(listeners)
        if peer != rank
        for channel in range(channels)
        for stripe in range(stripes)
    ]


def test_every_edge_joins_the_two_ranks_that_asked_for_it() -> None:
    threads = threading.active_count()
    listeners = [Listener(Config(), SECRET, loopback=rank % 2 == 0) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(listeners[r].ensure, r, requests_of(r, listeners, 2, 3), soon()) for r in range(4)]
        ends = [job.result(20) for job in jobs]
    for rank in range(4):
        assert len(ends[rank]) == 3 * 2 * 3
        for key, sock in ends[rank].items():
            sock.send(b"%d" % rank + key.encode())
    for rank in range(4):
        for key, sock in ends[rank].items():
            sock.setblocking(True)
            assert sock.recv(100) == b"%d" % (key.src + key.dst - rank) + key.encode()
    for sock in [sock for each in ends for sock in each.values()]:
        sock.close()
    for listener in listeners:
        listener.close()
    assert threading.active_count() == threads


def test_addresses_survive_the_exchange() -> None:
    listener = Listener(Config(), SECRET)
    assert unpack_addresses(pack_addresses(listener.addresses)) == listener.addresses
    listener.close()


def test_another_secret_is_refused_by_name() -> None:
    ours, theirs = Listener(Config(), SECRET, loopback=True), Listener(Config(), b"x" * 32, loopback=True)
    with pytest.raises(AuthenticationError, match=r"rank 3 at 127\.0\.0\.1:\d+: it refused our proof"):
        ours.connect_many([Request(EdgeKey(COMM, 0, 1, 3), theirs.addresses)], soon())
    ours.close()
    theirs.close()


def test_who_is_gone_is_named_at_once_and_who_never_comes_at_the_deadline() -> None:
    ours, gone = Listener(Config(), SECRET, loopback=True), Listener(Config(), SECRET, loopback=True)
    gone.close()
    started = time.monotonic()
    with pytest.raises(InitError, match=r"rank 3 at 127\.0\.0\.1:\d+: connection refused"):
        ours.connect_many([Request(EdgeKey(COMM, 0, 1, 3), gone.addresses)], soon(60))
    assert time.monotonic() - started < 5
    with pytest.raises(InitError, match=r"ranks 0, 2 did not connect in time"):
        ours.take([EdgeKey(COMM, 0, 0, 1), EdgeKey(COMM, 0, 2, 1)], soon(0.1))
    ours.close()


def test_a_descriptor_reaches_the_ranks_of_this_host() -> None:
    name, memory = new_name(), os.memfd_create("test")
    os.write(memory, b"shared")
    with ThreadPoolExecutor(3) as pool:
        peers = [pool.submit(receive_fd, name, rank, SECRET, 10) for rank in (1, 2)]
        pool.submit(share_fd, name, memory, [1, 2], SECRET, 10).result(15)
        for fd in (peer.result(5) for peer in peers):
            assert os.pread(fd, 10, 0) == b"shared"
            assert not os.get_inheritable(fd)
            os.close(fd)
    os.close(memory)


def test_descriptors_stay_from_strangers_and_absent_ranks_are_named() -> None:
    name, memory = new_name(), os.memfd_create("test")
    with ThreadPoolExecutor(1) as pool:
        sharing = pool.submit(share_fd, name, memory, [1, 4], SECRET, 0.5)
        with pytest.raises(AuthenticationError):
            receive_fd(name, 1, b"x" * 32, 5)
        with pytest.raises(InitError, match="ranks 1, 4 of this host"):
            sharing.result(10)
    with pytest.raises(InitError, match="nobody offers it"):
        receive_fd(name, 1, SECRET, 0.1)
    os.close(memory)
