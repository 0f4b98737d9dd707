"""How ranks find rank 0's store, whatever started them and whatever else listens there."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import netns
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meeting import meet, torch_style
from patience import DEADLINE
from ports import free_port

import hetcoll
from hetcoll import _native, job
from hetcoll.communicator import Communicator
from hetcoll.config.env import Config, Environment, Launch
from hetcoll.errors import ArgumentError, AuthenticationError, BufferTypeError, InitError
from hetcoll.rendezvous import bootstrap as rendezvous
from hetcoll.rendezvous.bootstrap import bootstrap, get_unique_id
from hetcoll.rendezvous.connections import probe
from hetcoll.rendezvous.connections.sockets import close_hard
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.rendezvous.protocol.unique_id import UniqueId

pytestmark = pytest.mark.usefixtures("clean_slate")


ids = st.builds(
    UniqueId,
    st.lists(st.tuples(st.text(max_size=60), st.integers(0, 65535)), max_size=20).map(tuple),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=32, max_size=32),
)


@given(ids)
def test_a_unique_id_survives_bytes_and_text(unique_id: UniqueId) -> None:
    assert UniqueId.from_bytes(unique_id.to_bytes()) == unique_id
    assert UniqueId.parse(str(unique_id)) == unique_id
    assert str(unique_id).isprintable()
    assert unique_id.secret.hex() not in repr(unique_id)
    assert repr(unique_id.secret) not in repr(unique_id)


@given(ids, st.data())
def test_a_cut_unique_id_is_refused(unique_id: UniqueId, data: st.DataObject) -> None:
    whole = unique_id.to_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ArgumentError, match="unique id: wanted"):
        UniqueId.from_bytes(whole[:cut])
    with pytest.raises(ArgumentError, match="unique id: wanted"):
        UniqueId.from_bytes(whole + b"x")
    for wrong in (None, 5, "text"):
        with pytest.raises(ArgumentError, match="unique id: wanted the bytes of to_bytes, got"):
            UniqueId.from_bytes(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "nonsense", "é", "AAAA" * 20, None, 5, b"bytes"])
def test_text_that_is_no_unique_id_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="unique id: wanted"):
        UniqueId.parse(text)


def test_ranks_meet_at_the_master_port() -> None:
    assert meet(torch_style(3, free_port()), [Config()] * 3) == [[b"0", b"1", b"2"]] * 3


@pytest.mark.parametrize(
    ("alone", "host", "secret", "said"),
    [
        (True, "localhost", None, 0),
        (False, "localhost", None, 1),  # a name may be another address elsewhere
        (False, "127.0.0.1", None, 0),
        (False, "localhost", b"sesame", 0),
    ],
)
def test_who_gives_the_key_to_the_network_is_told_once(
    alone: bool, host: str, secret: bytes | None, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    rendezvous._warn_of_open_port.cache_clear()
    for _ in range(2):  # two jobs
        found = torch_style(2, free_port())
        master = (host, found[0].master[1]) if found[0].master else None
        launches = [launch._replace(local_size=2 if alone else 1, master=master) for launch in found]
        assert meet(launches, [Config(secret=secret)] * 2) == [[b"0", b"1"]] * 2
    assert caplog.text.count("rank 0 gives the job's key to anyone who reaches its port") == said


def test_a_shared_secret_is_enough() -> None:
    launches, config = torch_style(2, free_port()), Config(secret=b"sesame", init_timeout=10)
    assert meet(launches, [config] * 2) == [[b"0", b"1"]] * 2


def test_without_the_secret_nobody_gets_in() -> None:
    launches = torch_style(2, free_port())
    bootstrap(launches[0], Config(secret=b"sesame"))
    with pytest.raises(AuthenticationError, match="rank 0 has a HETCOLL_SECRET and this process has none"):
        bootstrap(launches[1], Config())
    with pytest.raises(AuthenticationError, match="different secrets"):
        bootstrap(launches[1], Config(secret=b"guess", init_timeout=2))


def test_where_there_is_one_port_a_wrong_secret_is_told_at_once() -> None:
    launches = torch_style(2, free_port(), job="")
    bootstrap(launches[0], Config(secret=b"sesame"))
    with pytest.raises(AuthenticationError, match="different secrets"):
        bootstrap(launches[1], Config(secret=b"guess", init_timeout=100))
    with pytest.raises(AuthenticationError, match="rank 0 has a HETCOLL_SECRET and this process has none"):
        bootstrap(launches[1], Config(init_timeout=100))


def test_what_the_system_refuses_is_an_init_error(monkeypatch: pytest.MonkeyPatch) -> None:
    unique_id = get_unique_id(Config(), loopback=True)
    for refusal in (OSError(24, "Too many open files"), _native.Fault("doorbell: bind: Address already in use")):

        def refuse(*args: object, refusal: OSError = refusal) -> None:
            raise refusal

        monkeypatch.setattr(Communicator, "__init__", refuse)
        with pytest.raises(InitError, match=r"did not come together on this rank: .*(open files|bind)") as caught:
            Communicator.init(1, 0, unique_id, timeout=10)
        assert caught.value.__cause__ is refusal


def test_what_is_no_config_makes_no_unique_id() -> None:
    for wrong in (5, "sesame", {}):
        with pytest.raises(BufferTypeError, match=f"config: wanted a Config, or None .*, got {wrong!r}"):
            hetcoll.get_unique_id(wrong)  # type: ignore[arg-type]


def test_a_second_call_in_a_process_gives_the_same_store() -> None:
    launch = torch_style(2, free_port())[0]
    assert bootstrap(launch, Config()) is bootstrap(launch, Config())


def test_a_late_rank_0_is_waited_for() -> None:
    launches = torch_style(2, free_port())
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(bootstrap, launches[1], Config())
        time.sleep(0.3)  # so that its first attempts are refused
        late = bootstrap(launches[0], Config())
        assert early.result(10).job_id == late.job_id


def test_the_error_says_where_rank_0_was_looked_for() -> None:
    port = free_port()
    refused = r"not found within \d\.\d s: 127.0.0.1:{}.* and {} more: connection refused"
    with pytest.raises(InitError, match=refused.format(port, r"\d+")):  # 30, unless somebody else listens at some
        bootstrap(torch_style(2, port)[1], Config(init_timeout=2.0))  # time to try them all
    no_answer = rf"127.0.0.1:{port}\b[^;]*: no answer"  # maybe not there alone
    with socket.create_server(("127.0.0.1", port)), pytest.raises(InitError, match=no_answer):
        bootstrap(torch_style(2, port)[1], Config(init_timeout=0.5))
    launch = Launch(1, 2, None, None, ("no-such-host.invalid", port), "torchrun", "j")
    with pytest.raises(InitError, match=r"no-such-host\.invalid: "):
        bootstrap(launch, Config(init_timeout=0.3))


def test_the_timeout_that_init_is_given_is_that_of_looking_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(Config(init_timeout=30), torch_style(2, free_port())[1])
    monkeypatch.setattr(job, "environment", lambda: environment)
    with pytest.raises(InitError, match=r"not found within \d\.\d s: "):
        hetcoll.init(timeout=2.0)


def test_nobody_takes_itself_for_rank_0() -> None:
    """Who connects to a port that nobody listens at, and was given that very port to connect from, is connected with
    itself (RFC 9293, 3.5, simultaneous open): it would wait for a greeting, and rank 0 could not have the port."""

    def search() -> None:
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40000")
        bootstrap(torch_style(2, 40000)[1], Config(init_timeout=0.5))

    with (
        netns.network(1) as net,
        ThreadPoolExecutor(1, initializer=netns.enter, initargs=(net.hosts[0],)) as pool,
        pytest.raises(InitError, match=r"127\.0\.0\.1:40000, .*: connection refused$"),
    ):
        pool.submit(search).result(20)


@pytest.mark.parametrize("given", ["40000 40000", "1024 65535"])
def test_a_free_port_of_the_tests_is_given_to_nobody_else(given: str) -> None:
    """Whatever ports the kernel gives to those that ask for any."""

    def look() -> None:
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(given)
        port = free_port()
        first, last = map(int, given.split())
        assert first <= port <= last
        with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{port} {port}")
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", 0))
        with pytest.raises(OSError, match="annot assign"):
            socket.create_connection(("127.0.0.1", port), 5)

    with netns.network(1) as net, ThreadPoolExecutor(1, initializer=netns.enter, initargs=(net.hosts[0],)) as pool:
        pool.submit(look).result(20)


def test_a_job_of_one_needs_nothing() -> None:
    assert meet([Launch()], [Config()]) == [[b"0"]]


def test_waiting_costs_no_cpu() -> None:
    client = ControlClient(get_unique_id(Config()), 0, 1, 10)
    threads = [t.native_id for t in threading.enumerate() if t.name in ("hetcoll-store", "hetcoll-control")]

    def switches() -> list[str]:
        rows = [Path(f"/proc/self/task/{thread}/status").read_text().splitlines() for thread in threads]
        return [line for row in rows for line in row if "ctxt_switches" in line]

    client.exchange(WORLD, b"t", b"")
    time.sleep(0.1)  # the store goes back to sleep after its reply
    before = switches()
    time.sleep(0.5)
    assert len(threads) == 2
    assert switches() == before
    client.close()


def greet_late(listener: socket.socket, asked: threading.Event) -> None:
    """A listener that takes connections and says nothing until it has been asked for something else."""
    with listener.accept()[0]:
        asked.wait(20)


@pytest.mark.parametrize("first", ["works", "refuses", "says nothing"])
def test_of_several_addresses_of_a_store_one_is_connected_to(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "GREETS", 0.05 if first == "says nothing" else DEADLINE)
    connected: list[int] = []
    begin = socket.socket.connect_ex

    def count(sock: socket.socket, address: tuple[str, int]) -> int:
        if threading.current_thread() is ours:
            connected.append(address[1])
        return begin(sock, address)

    ours = threading.current_thread()  # another test's client may look for its store
    monkeypatch.setattr(socket.socket, "connect_ex", count)
    unique_id = get_unique_id(Config(linger=0), loopback=True)
    there, asked = unique_id.addresses[0], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        other_port = other.getsockname()[1]
        if first == "works":
            addresses = (there, ("127.0.0.1", other_port))
        elif first == "says nothing":
            pool.submit(greet_late, other, asked)
            addresses = (("127.0.0.1", other_port), there)
        else:
            other.close()
            addresses = (("127.0.0.1", other_port), there)
        sock, found = probe.connect_store(
            UniqueId(addresses, unique_id.job_id, unique_id.secret), time.monotonic() + 10
        )
        sock.close()
        asked.set()
    assert found == there
    if first == "refuses":  # it is tried again while the other one takes its time
        assert connected[0] == other_port
        assert connected.count(there[1]) == 1
    else:
        assert connected == [port for _, port in addresses[: 1 if first == "works" else 2]]


@pytest.mark.parametrize("first", ["is reset", "says nothing"])
def test_a_connection_that_was_made_says_nothing_of_who_does_not_listen(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset before it was seen, as that of a firewall, and a store that has no time: of what has listened before only
    what refuses is gone at once."""
    if first == "says nothing":
        monkeypatch.setattr(probe, "HANDSHAKE_SECONDS", 0.05)
    unique_id = get_unique_id(Config(linger=0), loopback=True)
    attempts: list[object] = []
    begin = socket.socket.connect_ex
    with socket.create_server(("127.0.0.1", 0)) as other:

        def connect(sock: socket.socket, address: tuple[str, int]) -> int:
            if threading.current_thread() is not ours:  # another test's client, which looks for its store
                return begin(sock, address)
            attempts.append(address)
            if len(attempts) > 1:
                monkeypatch.setattr(probe, "HANDSHAKE_SECONDS", DEADLINE)
                return begin(sock, address)
            code = begin(sock, other.getsockname())
            if first == "is reset":
                close_hard(other.accept()[0])
            return code

        ours = threading.current_thread()
        monkeypatch.setattr(socket.socket, "connect_ex", connect)
        sock, _ = probe.connect_store(
            replace(unique_id, addresses=unique_id.addresses[:1]), time.monotonic() + 10, there=True
        )
    sock.close()
    assert len(attempts) == 2
