"""Strangers, impostors and silence at a job's store: what they cost, and that they do not get in."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from members import in_parallel, join_all

from hetcoll.errors import AuthenticationError
from hetcoll.rendezvous.connections import auth, probe
from hetcoll.rendezvous.connections.acceptor import Acceptor
from hetcoll.rendezvous.connections.sockets import receive_exactly
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.rendezvous.protocol.unique_id import UniqueId


def test_strangers_cost_little_and_do_not_get_in(unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, garbage, and more connections than are looked at at a time: the job comes together all the same."""
    address = unique_id.addresses[-1]
    silent = [socket.create_connection(address) for _ in range(auth.MAX_PENDING - 10)]
    talkative = [socket.create_connection(address) for _ in range(9)]
    for sock in talkative:
        sock.sendall(os.urandom(5000))
    clients, _ = join_all(unique_id, 2)
    for sock in talkative:
        sock.settimeout(10)
        try:
            while sock.recv(1000):  # its greeting, our refusal, the end
                pass
        except ConnectionResetError:
            continue
    for sock in (*silent, *talkative):
        sock.close()
    for client in clients:
        client.close()


@contextmanager
def crowd(address: tuple[str, int], count: int) -> Iterator[None]:
    """So many idle connections of a stranger, all of them there, who comes back whenever one is turned away."""
    selector, ended = selectors.DefaultSelector(), threading.Event()
    socks: set[socket.socket] = set()

    def come() -> None:
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        sock.setblocking(False)
        sock.connect_ex(address)
        socks.add(sock)
        selector.register(sock, selectors.EVENT_READ)

    def come_back() -> None:
        while not ended.is_set():
            for key, _ in selector.select(0.05):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                with suppress(OSError):
                    if sock.recv(1000):
                        continue
                selector.unregister(sock)
                socks.discard(sock)
                sock.close()
                come()

    for _ in range(count):
        come()
    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)
        selector.close()
        for sock in socks:
            sock.close()


def test_idle_strangers_do_not_keep_ranks_out_however_many_and_however_long(unique_id: UniqueId) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    unique_id = replace(unique_id, addresses=unique_id.addresses[-1:])
    with crowd(unique_id.addresses[0], 1500):
        clients = in_parallel(
            [lambda rank=rank: ControlClient(unique_id, rank, 8, 20, None) for rank in range(8)]  # type: ignore[misc]
        )
        for client in clients:
            client.close()


def test_a_claim_that_lies_there_counts_however_late_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that gets no processor for a while turns nobody away who has answered."""
    monkeypatch.setattr("hetcoll.rendezvous.connections.acceptor.HANDSHAKE_SECONDS", 0.05)
    admitted: list[str] = []
    server = socket.create_server(("127.0.0.1", 0))
    with selectors.DefaultSelector() as selector, socket.create_connection(server.getsockname()) as sock:

        def admit(guest: socket.socket, name: str, context: bytes) -> None:
            admitted.append(name)
            guest.close()

        acceptor = Acceptor(selector, [server], bytes(32), auth.Service.STORE, b"", admit)
        acceptor.prepare()
        for key, _ in selector.select(10):
            key.data(key)
        sock.setblocking(False)
        greeting = receive_exactly(sock, auth.GREETING.size, time.monotonic() + 10)
        sock.sendall(auth.Response(bytes(32), greeting).claim)
        time.sleep(0.1)
        acceptor.prepare()
        assert len(admitted) == 1
        acceptor.close()


def test_a_silent_connection_is_closed_after_its_time(unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetcoll.rendezvous.connections.acceptor.HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr("hetcoll.rendezvous.connections.acceptor.MAX_PENDING", 4)
    silent = [socket.create_connection(unique_id.addresses[-1]) for _ in range(20)]
    client = ControlClient(unique_id, 0, 1, 10)  # waits for its turn behind them
    for sock in silent:
        sock.settimeout(10)
        assert len(sock.recv(1000)) == auth.GREETING.size
        assert sock.recv(1000) == b""
        sock.close()
    client.close()


def test_another_secret_is_refused(unique_id: UniqueId) -> None:
    stranger = UniqueId(unique_id.addresses, unique_id.job_id, bytes(32))
    with pytest.raises(AuthenticationError, match="different secrets"):
        ControlClient(stranger, 0, 1, 10)


def test_a_store_that_does_not_know_the_secret_is_refused(unique_id: UniqueId) -> None:
    """A listener that accepts every proof, and cannot give its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept_anything() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(auth.Challenge(bytes(32), auth.Service.STORE, unique_id.job_id).greeting)
                sock.recv(auth.CLAIM.size)
                sock.sendall(auth.VERDICT.pack(1, bytes(32)))
                sock.recv(1)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(accept_anything)
            impostor = UniqueId((server.getsockname(),), unique_id.job_id, unique_id.secret)
            with pytest.raises(AuthenticationError, match="could not prove that it knows"):
                ControlClient(impostor, 0, 1, 10)


@pytest.mark.parametrize("garbage", [b"\xff" * 16, b"\3" + bytes(15), b"\1\0\0\0\5\0\0\0" + bytes(8) + b"\xff\0\0\0x"])
def test_a_member_that_talks_nonsense_hurts_nobody_else(unique_id: UniqueId, garbage: bytes) -> None:
    sock, _ = probe.connect_store(unique_id, time.monotonic() + 10)
    sock.sendall(garbage)
    client = ControlClient(unique_id, 0, 1, 10)
    assert client.exchange(WORLD, b"t", b"x") == [b"x"]
    sock.close()
    client.close()
