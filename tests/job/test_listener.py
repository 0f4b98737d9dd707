"""The data plane's connections: made all at once, proven, and named when they fail."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import netns
import pytest
from interrupting import interrupt_at

from hetcoll.config.env import Config, InterfaceFilter
from hetcoll.config.interfaces import Interface, are_unlike, choose_interfaces, interface_rates
from hetcoll.errors import AuthenticationError, ClosedError, InitError
from hetcoll.links.connector import choose_source, order_addresses
from hetcoll.links.descriptors import host_identity
from hetcoll.links.edges import ADMITTED, CONFIRMED, Address, EdgeKey, Request, pack_addresses, unpack_addresses
from hetcoll.links.listener import Listener
from hetcoll.rendezvous.connections import auth
from hetcoll.rendezvous.connections.sockets import receive_exactly, unpace

SECRET = b"s" * 32
COMM = b"c" * 16


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def requests_of(rank: int, listeners: list[Listener], channels: int, stripes: int) -> list[Request]:
    return [
        Request(EdgeKey(COMM, min(rank, peer), max(rank, peer), channel, stripe), listener.addresses)
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


def check_pairs(ends: Sequence[dict[EdgeKey, socket.socket]]) -> None:
    """Two ranks: what goes in at one end comes out at the other, for each key."""
    assert ends[0].keys() == ends[1].keys()
    for key, sock in ends[0].items():
        sock.send(key.encode())
    for key, sock in ends[1].items():
        sock.setblocking(True)
        assert sock.recv(100) == key.encode()
        sock.close()
        ends[0][key].close()


@pytest.mark.calm
@pytest.mark.parametrize("first", [0, 1])
def test_neither_end_waits_until_the_other_asks(first: int) -> None:
    listeners = [Listener(Config(), SECRET, loopback=True) for _ in range(2)]
    ends = [{}, {}]
    for rank in (first, 1 - first):
        started = time.monotonic()
        ends[rank] = listeners[rank].ensure(rank, requests_of(rank, listeners, 2, 3), soon())
        assert time.monotonic() - started < 2
    check_pairs(ends)
    for listener in listeners:
        listener.close()


def test_of_two_connections_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends connect at the same time, many times over."""
    monkeypatch.setattr("hetcoll.links.listener._GRACE", 0.0)
    listeners = [Listener(Config(), SECRET, loopback=True) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for channel in range(30):
            every = [requests_of(rank, listeners, 30, 4) for rank in range(2)]
            some = [[each for each in row if each.key.channel == channel] for row in every]
            jobs = [pool.submit(listeners[rank].ensure, rank, some[rank], soon()) for rank in range(2)]
            check_pairs([job.result(20) for job in jobs])
    assert not any(listener._arrived for listener in listeners)
    for listener in listeners:
        listener.close()


def test_ctrl_c_as_a_descriptor_is_watched_leaves_none() -> None:
    before = len(os.listdir("/proc/self/fd"))
    interrupted = 0
    with ExitStack() as stack:
        one, other = map(stack.enter_context, socket.socketpair())
        for count in range(1, 5):
            listener = Listener(Config(), SECRET, loopback=True)
            try:
                interrupt_at(count)
                listener.watch(one.fileno(), lambda: None)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.setprofile(None)
            listener.close()
        other.close()
    assert interrupted >= 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_addresses_survive_the_exchange() -> None:
    listener = Listener(Config(), SECRET)
    assert unpack_addresses(pack_addresses(listener.addresses)) == listener.addresses
    listener.close()


def test_another_secret_is_refused_by_name() -> None:
    ours, theirs = Listener(Config(), SECRET, loopback=True), Listener(Config(), b"x" * 32, loopback=True)
    with pytest.raises(AuthenticationError, match=r"rank 3 at 127\.0\.0\.1:\d+: it refused our proof"):
        ours.connect_many([Request(EdgeKey(COMM, 1, 3), theirs.addresses)], soon())
    ours.close()
    theirs.close()


def test_who_is_gone_is_named_at_once_and_who_never_comes_at_the_deadline() -> None:
    ours, gone = Listener(Config(), SECRET, loopback=True), Listener(Config(), SECRET, loopback=True)
    gone.close()
    started = time.monotonic()
    with pytest.raises(InitError, match=r"rank 3 at 127\.0\.0\.1:\d+: connection refused"):
        ours.connect_many([Request(EdgeKey(COMM, 1, 3), gone.addresses)], soon(60))
    assert time.monotonic() - started < 5
    with pytest.raises(InitError, match=r"ranks 0, 2 did not connect in time"):
        ours.take([EdgeKey(COMM, 0, 1), EdgeKey(COMM, 2, 1)], soon(0.1))
    ours.close()


def test_a_connection_that_proves_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetcoll.rendezvous.connections.acceptor.HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr("hetcoll.rendezvous.connections.acceptor.MAX_PENDING", 3)
    ours, theirs = Listener(Config(), SECRET, loopback=True), Listener(Config(), SECRET, loopback=True)
    silent = [socket.create_connection(theirs.addresses[0][:2]) for _ in range(10)]
    silent[0].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(200))
    key = EdgeKey(COMM, 0, 1)
    made = ours.connect_many([Request(key, theirs.addresses)], soon())  # waits for its turn behind them
    taken = theirs.take([key], soon())
    for sock in silent:
        sock.settimeout(10)
        try:
            while sock.recv(1000):
                pass
        except ConnectionResetError:
            pass
    for sock in (*silent, made[key], taken[key]):
        sock.close()
    ours.close()
    theirs.close()


def claim_edge(listener: Listener, key: EdgeKey, *, hurried: bool, admitted: bool) -> socket.socket:
    """A connector that has sent its claim, and with `admitted` heard the answer, and goes no further."""
    sock = socket.create_connection(listener.addresses[0][:2], 10)
    sock.setblocking(False)
    greeting = receive_exactly(sock, auth.GREETING.size, soon())
    sock.sendall(auth.Response(SECRET, greeting, key.encode(hurried=hurried)).claim)
    if admitted:
        assert receive_exactly(sock, auth.VERDICT.size + 1, soon())[-1:] == ADMITTED
    return sock


@pytest.mark.parametrize("admitted", [False, True])
def test_a_connection_that_was_given_up_is_no_link(admitted: bool) -> None:
    """A listener that was held up reads claims of connectors that have long tried again."""
    ours, theirs = Listener(Config(), SECRET, loopback=True), Listener(Config(), SECRET, loopback=True)
    key = EdgeKey(COMM, 0, 1)
    claim_edge(theirs, key, hurried=False, admitted=admitted).close()
    with pytest.raises(InitError, match="rank 0 did not connect in time"):
        theirs.take([key], soon(0.5))
    made = ours.connect_many([Request(key, theirs.addresses)], soon())
    check_pairs([made, theirs.take([key], soon())])
    for listener in (ours, theirs):
        listener.close()


@pytest.mark.parametrize("confirms", [False, True])
def test_the_end_that_was_to_connect_waits_for_the_word_of_the_one_in_a_hurry(confirms: bool) -> None:
    ours, theirs = Listener(Config(), SECRET, loopback=True), Listener(Config(), SECRET, loopback=True)
    key = EdgeKey(COMM, 0, 1)
    hurried = claim_edge(ours, key, hurried=True, admitted=True)
    asked = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        ensuring = pool.submit(ours.ensure, 0, [Request(key, theirs.addresses)], soon(), asked.set)
        assert asked.wait(10)
        assert not ensuring.done()
        if confirms:
            hurried.sendall(CONFIRMED)
            check_pairs([ensuring.result(15), {key: hurried}])
        else:
            hurried.close()
            check_pairs([ensuring.result(15), theirs.take([key], soon())])
    for listener in (ours, theirs):
        listener.close()


def test_a_claim_for_another_edge_does_not_verify() -> None:
    """The proof covers the key: a claim whose key was changed on the way is refused."""
    challenge = auth.Challenge(SECRET, auth.Service.DATA)
    claim = auth.Response(SECRET, challenge.greeting, EdgeKey(COMM, 0, 1).encode()).claim
    assert challenge.judge(claim).proven
    for place in range(len(claim)):
        assert not challenge.judge(claim[:place] + bytes([claim[place] ^ 1]) + claim[place + 1 :]).proven
    assert not auth.Challenge(SECRET, auth.Service.DATA).judge(claim).proven  # nor does an old proof


def test_another_process_at_a_published_address_is_noticed() -> None:
    """Two hosts may have the same address (a bridge to their guests): the listener's token tells them apart."""
    ours, wrong, right = (Listener(Config(), SECRET, loopback=True) for _ in range(3))
    stale = wrong.addresses[0]._replace(token=right.addresses[0].token)
    key = EdgeKey(COMM, 0, 1)
    made = ours.connect_many([Request(key, (stale, right.addresses[0]._replace(interface="other")))], soon())
    right.take([key], soon())[key].close()
    made[key].close()
    with pytest.raises(InitError, match="another process listens there"):
        ours.connect_many([Request(key, (stale,))], soon(0.3))
    for listener in (ours, wrong, right):
        listener.close()


def test_stripes_use_the_addresses_in_turn() -> None:
    addresses = [Address(f"10.0.{i}.1", 1000 + i, f"eth{i}", b"") for i in range(3)]
    addresses.append(Address("fd00::1", 1003, "eth1", b""))
    assert [order_addresses(addresses, stripe)[0] for stripe in range(4)] == [*addresses[:3], addresses[0]]
    assert order_addresses(addresses, 1) == [addresses[1], addresses[2], addresses[0], addresses[3]]


def test_stripes_leave_by_the_interface_of_the_same_network() -> None:
    local = [
        Interface(f"eth{i}", f"10.0.{i}.9", ipaddress.ip_network(f"10.0.{i}.0/24"), loopback=False) for i in range(2)
    ]
    assert [choose_source("10.0.1.1", local, stripe) for stripe in (0, 1)] == ["10.0.1.9", "10.0.1.9"]
    assert [choose_source("192.168.7.1", local, stripe) for stripe in (0, 1)] == ["10.0.0.9", "10.0.1.9"]
    assert choose_source("10.0.1.9", local, 0) is None  # our own
    assert choose_source("127.0.0.1", local, 0) is None
    assert choose_source("10.0.0.1", local[:1], 0) is None  # there is no choice
    assert choose_source("fd00::1", local, 0) is None


def control(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_only_other_hosts_are_sent_to_at_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []  # whoever begins with BBR is paced for ever
    for name in ("listen", "connect_ex"):
        method = getattr(socket.socket, name)

        def spy(sock: socket.socket, *args: object, method: Callable[..., object] = method) -> object:
            if threading.current_thread().name.startswith(
                "host"
            ):  # not of other tests' clients, which look for their stores
                begun.append(control(sock))
            return method(sock, *args)

        monkeypatch.setattr(socket.socket, name, spy)
    listeners: list[Listener] = []

    def listen() -> None:
        try:
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("bbr")
        except OSError as error:
            pytest.skip(f"BBR: {error.strerror}")
        listeners.append(Listener(Config(), SECRET))

    with netns.network(2) as net, ExitStack() as stack:
        hosts = [net.hosts[0], net.hosts[0], net.hosts[1]]
        pools = [stack.enter_context(ThreadPoolExecutor(1, "host", netns.enter, (host,))) for host in hosts]
        for pool in pools:
            pool.submit(listen).result(20)
            stack.callback(listeners[-1].close)
        jobs = [
            pool.submit(listeners[rank].ensure, rank, requests_of(rank, listeners, 1, 2), soon())
            for rank, pool in enumerate(pools)
        ]
        for job in jobs:
            for key, sock in job.result(20).items():
                assert control(sock) == ("bbr" if 2 in (key.src, key.dst) else "reno")
                sock.close()
        assert set(begun) == {"reno"}


def test_a_host_that_allows_no_reno_is_told_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    class Restricted(socket.socket):
        def getsockopt(self, *args: int) -> bytes:  # type: ignore[override]
            return b"bbr".ljust(args[2], b"\0")

        def setsockopt(self, *args: object) -> None:
            raise PermissionError(1, "Operation not permitted")

    with Restricted() as sock:
        unpace(sock)
    assert "tcp_allowed_congestion_control" in caplog.text


def test_waiting_can_be_ended_from_outside() -> None:
    class LostError(Exception):
        pass

    def check() -> None:
        raise LostError

    listener = Listener(Config(), SECRET, loopback=True)
    with pytest.raises(LostError):
        listener.take([EdgeKey(COMM, 0, 1)], soon(60), check)
    with pytest.raises(LostError):
        listener.connect_many([Request(EdgeKey(COMM, 1, 2), listener.addresses)], soon(60), check)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.take, [EdgeKey(COMM, 0, 1)], soon(60))
        listener.close()
        with pytest.raises(ClosedError):
            waiting.result(5)


def test_nothing_is_left_behind() -> None:
    Listener(Config(), SECRET).close()
    fds, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    ours, theirs = Listener(Config(), SECRET), Listener(Config(), SECRET)
    keys = [EdgeKey(COMM, 0, 1, channel) for channel in range(20)]
    made = ours.connect_many([Request(key, theirs.addresses) for key in keys], soon())
    theirs.take(keys[:1], soon())[keys[0]].close()
    for sock in made.values():
        sock.close()
    with pytest.raises(InitError):
        ours.ensure(0, [Request(keys[0], theirs.addresses), Request(EdgeKey(COMM, 9, 0), ())], soon(0.2))
    for listener in (ours, theirs) * 2:
        listener.close()
    assert threading.active_count() == threads
    assert set(os.listdir("/proc/self/fd")) == fds


def test_the_rate_of_interfaces_is_what_the_system_says_of_all(tmp_path: Path) -> None:
    says = {"eth0": "10000\n", "eth1": "2500\n", "tap0": "-1\n", "old0": "4294967295\n", "off0": "0\n"}
    for name, told in says.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(told)
    (tmp_path / "lo/speed").mkdir(parents=True)  # where the kernel says no number, reading fails
    assert interface_rates(["eth0"], str(tmp_path)) == [10_000]
    assert interface_rates(["eth0", "eth1"], str(tmp_path)) == [10_000, 2500]
    for unknown in ("tap0", "old0", "off0", "lo", "gone0"):
        assert interface_rates(["eth0", unknown], str(tmp_path)) == []


def test_stripes_have_the_rates_of_their_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Listener.__new__(Listener)
    one.addresses = tuple(Address(host, 1, name, b"") for host, name in (("1", "a"), ("::1", "a"), ("2", "b")))
    rates = {"a": 1000, "b": 200}
    monkeypatch.setattr("hetcoll.links.listener.interface_rates", lambda names: [rates[name] for name in names])
    assert [one.rates(stripes) for stripes in (1, 2, 5)] == [[1000], [1000, 200], [1000, 200]]
    assert [are_unlike(each) for each in ([], [1000], [1000, 600], [200, 1000], [1000, 500])] == [0, 0, 0, 1, 1]


def test_interfaces_are_chosen_by_name() -> None:
    assert {each.name for each in choose_interfaces(InterfaceFilter.parse("=lo"))} == {"lo"}
    assert {each.name for each in choose_interfaces(InterfaceFilter(), loopback=True)} == {"lo"}
    with pytest.raises(InitError, match="HETCOLL_SOCKET_IFNAME: wanted an interface of 'nosuch' that is up, got lo"):
        Listener(Config(socket_ifname=InterfaceFilter.parse("nosuch")), SECRET)
    outside = choose_interfaces(InterfaceFilter())
    assert outside
    assert all(each.loopback for each in outside) or not any(each.loopback for each in outside)


def test_a_hosts_identity() -> None:
    assert host_identity() == host_identity()
    assert host_identity("node-7") == "node-7"
    assert "net:[" in host_identity()
