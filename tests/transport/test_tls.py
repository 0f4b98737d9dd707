"""HETCOLL_TLS: what goes over TCP is encrypted, behind the listener's greeting."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from losing import found, lose, works
from patience import DEADLINE
from ports import free_port
from ranks import RankError, Ranks
from thorough import parametrize

import hetcoll
import hetcoll._native as _native
from hetcoll.config import env
from hetcoll.config.env import Config, read_config
from hetcoll.config.process import configure
from hetcoll.errors import ArgumentError, AuthenticationError, CommunicationError, InitError
from hetcoll.links.edges import EdgeKey, Request
from hetcoll.links.listener import Listener
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.connections.probe import connect_store
from hetcoll.rendezvous.connections.secure import Socket
from hetcoll.rendezvous.connections.sockets import receive_exactly, send_all

Launch = Callable[..., Ranks]
ON = {"HETCOLL_TLS": "1", "HETCOLL_TRANSPORT": "tcp"}
SECRET, COMM = b"s" * 32, b"c" * 16
may_look = pytest.mark.skipif(os.geteuid() != 0, reason="it takes CAP_NET_RAW to look at packets")
may_reset = pytest.mark.skipif(os.geteuid() != 0, reason="it takes CAP_NET_ADMIN to reset a connection")


def everything(comm: hetcoll.Communicator) -> int:
    """Sums of many sizes, messages, a window and a part; how many connections were made again."""
    n, me = comm.size, comm.rank
    right, left = (me + 1) % n, (me - 1) % n
    for count in (1, 500, 40_000, 400_000):
        x = np.arange(count, dtype=np.float32) % 97 + me
        works = [comm.allreduce(x.copy(), async_op=True) for _ in range(2)]
        comm.allreduce(x)
        assert (x == n * (np.arange(count) % 97) + sum(range(n))).all(), count
        for work in works:
            work.wait()
        sent, came = np.full(count, me + 1, np.int64), np.zeros(count, np.int64)
        with comm.group():
            comm.send(sent, right)
            comm.recv(came, left)
        sent[:] = -1
        assert (came == left + 1).all(), count
    memory = np.zeros(1000, np.float32)
    with comm.window(memory) as window, comm.split(me % 2) as part:
        window.put(np.full(1000, me, np.float32), right)
        comm.barrier()
        assert (memory == left).all()
        part.barrier()
    comm.barrier()
    return comm.counters()["tcp_reconnects"]


@parametrize("size", [3, 2], first=1)
def test_everything_is_as_ever(launch: Launch, size: int) -> None:
    assert launch(size, **ON).run(everything) == [0] * size


@may_reset
def test_connections_that_are_reset_are_made_again(launch: Launch) -> None:
    settings = {"HETCOLL_FAULT": "reset=250000,seed=3", "HETCOLL_SOCKET_STRIPES": "2"}
    assert sum(launch(3, **ON, **settings).run(everything)) > 2


def spoiled(comm: hetcoll.Communicator) -> str:
    """What a sum over a link that spoils a byte says; nothing: it is right."""
    x = np.full(40_000, comm.rank + 1, np.float32)
    try:
        comm.allreduce(x, timeout=20)
        comm.barrier(timeout=20)  # who had all that it needed hears of it here
    except CommunicationError as error:
        return str(error)
    assert (x == sum(range(comm.size + 1))).all()
    return ""


def test_a_record_that_is_changed_is_an_error_that_names_the_edge(launch: Launch) -> None:
    told = launch(2, **ON, HETCOLL_FAULT="corrupt=5000,rank=1").run(spoiled)
    assert "TCP receive: what came was changed on the way, so it cannot be decrypted (TLS)" in told[0], told
    assert "rank 1" in told[0], told
    assert told[1], told


def test_where_all_is_kept_it_comes_again(launch: Launch) -> None:
    ranks = launch(2, **ON, HETCOLL_FAULT="corrupt=5000,rank=1", HETCOLL_INTEGRITY="all")
    assert ranks.run(spoiled) == ["", ""]
    assert sum(ranks.run(everything)) > 0


def lose_one(comm: hetcoll.Communicator) -> int:
    """Rank 0 dies, and with it the store: the others go on with another one."""
    lose(comm, 0)
    comm = comm.shrink()
    works(comm)
    return comm.size


def test_another_store_is_encrypted_too(launch: Launch) -> None:
    ranks = launch(3, **ON)
    ranks.start(lose_one)
    assert set(found(ranks, 0).values()) == {2}


def add_up(comm: hetcoll.Communicator, word: bytes, times: int) -> None:
    data = np.frombuffer(word * times, np.uint8).copy()
    if comm.rank == 0:
        comm.send(data, 1)
    else:
        came = np.zeros_like(data)
        comm.recv(came, 0)
        assert came.tobytes() == word * times
    comm.broadcast_object(word, 0)


@contextlib.contextmanager
def wire(*words: bytes) -> Iterator[Callable[[], set[bytes]]]:
    """Asked, it says which of these went over loopback so far. It loses what finds no room while others send much."""
    seen: set[bytes] = set()
    wanted, over = [*words], threading.Event()
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sock,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end,
    ):
        sock.bind(("lo", 0))
        sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        sock.settimeout(0.05)
        end.bind(("127.0.0.1", 0))

        def look() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    packet = sock.recv(1 << 17)
                    seen.update(word for word in wanted if word in packet)

        def so_far() -> set[bytes]:
            last = os.urandom(32)  # who has seen this has looked at all that went before
            wanted.append(last)
            while last not in seen and thread.is_alive():
                end.sendto(last, end.getsockname())
                time.sleep(0.01)
            return seen.intersection(words)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield so_far
        finally:
            over.set()
            thread.join()


@may_look
@pytest.mark.parametrize("tls", ["0", "1"])
def test_who_looks_at_the_network_reads_nothing(launch: Launch, tls: str) -> None:
    """Neither what messages carry, nor what the store is told."""
    word, greeting = os.urandom(32), b"HCC1"
    open_words, end = {greeting, *([word] if tls == "0" else [])}, time.monotonic() + DEADLINE
    with wire(word, greeting) as seen:
        while not open_words <= seen() and time.monotonic() < end:
            launch(2, HETCOLL_TRANSPORT="tcp", HETCOLL_TLS=tls, HETCOLL_SECRET="ours").run(add_up, word, 2000)
        assert seen() == open_words


def test_settings_differ(launch: Launch) -> None:
    with pytest.raises(RankError, match=r"InitError.*HETCOLL_TLS"):
        launch(2, HETCOLL_TLS=("1", "0")).run(everything)


def test_nobody_hands_out_the_key_of_a_job_that_is_encrypted(launch: Launch) -> None:
    ranks = launch(2, join=False, HETCOLL_TLS="1")
    with pytest.raises(RankError, match="HETCOLL_TLS: wanted HETCOLL_SECRET or HETCOLL_SECRET_FILE") as caught:
        ranks.run(by_hand, free_port())
    assert str(caught.value).count("ArgumentError: ") == 2


def by_hand(job: object, port: int) -> None:
    os.environ.update(RANK=str(job.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # type: ignore[attr-defined]
    env.environment.cache_clear()
    hetcoll.init(timeout=30)


def test_rdma_is_refused() -> None:
    with pytest.raises(ArgumentError, match="HETCOLL_TLS: wanted another HETCOLL_TRANSPORT than verbs"):
        read_config({"HETCOLL_TLS": "1", "HETCOLL_TRANSPORT": "verbs"})


def test_there_is_no_openssl(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RuntimeError("wanted OpenSSL 1.1.1 or newer")

    monkeypatch.setattr(_native, "tls_library", none)
    with pytest.raises(InitError, match=r"HETCOLL_TLS: wanted OpenSSL 1\.1\.1"):
        configure(Config(tls=True))
    configure(Config())


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    config = Config(secret=b"ours", tls=True)
    unique_id = get_unique_id(config, loopback=True)
    sock, _ = connect_store(unique_id, time.monotonic() + 10)
    sock.close()
    with pytest.raises(AuthenticationError, match="different secrets"):
        connect_store(replace(unique_id, secret=bytes(32)), time.monotonic() + 10)


def test_a_socket_that_is_closed_says_nothing_over_another() -> None:
    """Whose descriptor has the same number."""
    unique_id = get_unique_id(Config(secret=b"ours", tls=True), loopback=True)
    sock, _ = connect_store(unique_id, time.monotonic() + 10)
    here, there = socket.socketpair()
    with here, there:
        number = sock.fileno()
        sock.close()
        os.dup2(here.fileno(), number)
        try:
            with pytest.raises(OSError, match="Bad file descriptor"):
                sock.send(b"what another socket is to carry")
            with pytest.raises(BlockingIOError):
                there.recv(1, socket.MSG_DONTWAIT)
        finally:
            os.close(number)


def pairs(*, tls: bool) -> tuple[Listener, Listener]:
    return tuple(Listener(Config(tls=tls), SECRET, loopback=True) for _ in range(2))  # type: ignore[return-value]


def test_the_handshake_of_links() -> None:
    """Both ends of a connection say whole what they are told to, in any pieces."""
    here, there = pairs(tls=True)
    with contextlib.closing(here), contextlib.closing(there):
        key = EdgeKey(COMM, 0, 1, 0, 0)
        made = here.connect_many([Request(key, there.addresses)], time.monotonic() + 10)[key]
        came = there.take([key], time.monotonic() + 10)[key]
        with made, came:
            assert isinstance(made, Socket)
            assert isinstance(came, Socket)
            data = os.urandom(3 << 20)
            thread = threading.Thread(target=send_all, args=(made, data, time.monotonic() + 20))
            thread.start()
            assert receive_exactly(came, 1, time.monotonic() + 20) == data[:1]
            assert receive_exactly(came, len(data) - 1, time.monotonic() + 20) == data[1:]
            thread.join()
            assert came.sendmsg([b"one", b"", b"two"]) == 6
            assert receive_exactly(made, 6, time.monotonic() + 10) == b"onetwo"
            made.close()
            with pytest.raises(ConnectionResetError):
                receive_exactly(came, 1, time.monotonic() + 10)


def test_a_listener_that_is_told_a_wrong_secret() -> None:
    here, there = Listener(Config(tls=True), bytes(32), loopback=True), pairs(tls=True)[0]
    requests = [Request(EdgeKey(COMM, 0, 1, 0, 0), there.addresses)]
    with (
        contextlib.closing(here),
        contextlib.closing(there),
        pytest.raises(AuthenticationError, match="different secrets"),
    ):
        here.connect_many(requests, time.monotonic() + 10)


def test_garbage_for_a_handshake() -> None:
    """Turned away, and the listener serves the next one."""
    here, there = pairs(tls=True)
    with contextlib.closing(here), contextlib.closing(there):
        place = there.addresses[0]
        for word in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(200), b"\x16\x03\x01\xff\xff" + bytes(300)):
            with socket.create_connection((place.host, place.port), 10) as stranger:
                stranger.sendall(word)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(1000):
                        pass
        key = EdgeKey(COMM, 0, 1, 0, 0)
        here.connect_many([Request(key, there.addresses)], time.monotonic() + 10)[key].close()


PROGRAM = """
import hetcoll, numpy as np
with hetcoll.init() as comm:
    x = np.ones(3)
    comm.allreduce(x)
    assert (x == comm.size).all()
"""


@pytest.mark.thorough
def test_a_large_job_goes_through_relays() -> None:
    command = [sys.executable, "-m", "hetcoll", "run", "-n", "34", "--", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, **ON}, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
