"""How ranks find rank 0's store, whatever started them and whatever else listens there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import netns
import pytest
from hypothesis import given
from hypothesis import strategies as st
from installed import find_mpi4py, find_program
from patience import DEADLINE
from ports import free_port

from hetcoll import _native
from hetcoll.communicator import Communicator
from hetcoll.config.env import Config, Launch
from hetcoll.errors import ArgumentError, AuthenticationError, InitError
from hetcoll.rendezvous import bootstrap as rendezvous
from hetcoll.rendezvous.bootstrap import bootstrap, get_unique_id
from hetcoll.rendezvous.connections import auth, probe
from hetcoll.rendezvous.connections.sockets import close_hard
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.store import server as store

SCRIPT = """
import os
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.config.env import environment
from hetcoll.rendezvous.bootstrap import bootstrap

launch, config = environment().launch, environment().config
client = ControlClient(bootstrap(launch, config), launch.rank, launch.size, config.init_timeout)
ranks = client.exchange(WORLD, b"ranks", str(launch.rank).encode())
os.write(1, f"{launch.launcher} {launch.rank} sees {b' '.join(ranks).decode()}\\n".encode())  # untorn
client.close()
"""


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Each test is a process of its own, as far as stores go."""
    yield
    for server in list(store._hosted.values()):
        server.close()
    rendezvous._found.clear()


def meet(launches: list[Launch], configs: list[Config]) -> list[list[bytes]]:
    """Every rank finds the store and joins; what each got from an exchange."""

    def one(launch: Launch, config: Config) -> list[bytes]:
        client = ControlClient(bootstrap(launch, config), launch.rank, launch.size, config.init_timeout)
        try:
            return client.exchange(WORLD, b"ranks", b"%d" % launch.rank)
        finally:
            client.exchange(WORLD, b"end", b"")
            client.close()

    with ThreadPoolExecutor(len(launches)) as pool:
        return [job.result(30) for job in [pool.submit(one, *each) for each in zip(launches, configs, strict=True)]]


def torch_style(size: int, port: int, job: str = "j", **changes: object) -> list[Launch]:
    """`job` "": started by hand."""
    return [Launch(r, size, r, size, ("127.0.0.1", port), "torchrun", job, **changes) for r in range(size)]  # type: ignore[arg-type]


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


@pytest.mark.parametrize("text", ["", "nonsense", "é", "AAAA" * 20])
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


@pytest.mark.parametrize("secret", [None, b"sesame"])
def test_a_taken_port_is_an_error_of_a_job_started_by_hand(secret: bytes | None) -> None:
    port = free_port()
    launches, config = torch_style(2, port, job=""), Config(secret=secret, init_timeout=1)
    with (
        foreign_service(port),
        pytest.raises(InitError, match=rf"127\.0\.0\.1:{port}: address already in use .*another MASTER_PORT"),
    ):
        bootstrap(launches[0], config)
    assert meet(launches, [config] * 2) == [[b"0", b"1"]] * 2


def by_hand(rank: int, size: int, port: int, **variables: str) -> str:
    """The last line of the errors of a rank in a process of its own, started as people do, that does not get in."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HETCOLL_", "MASTER_"))}
    env |= {"PYTHONPATH": str(Path(rendezvous.__file__).parents[2]), "RANK": str(rank), "WORLD_SIZE": str(size)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HETCOLL_INIT_TIMEOUT": "20"} | variables
    done = subprocess.run(
        [sys.executable, "-c", "import hetcoll; hetcoll.init()"],
        env=env,
        capture_output=True,
        timeout=DEADLINE,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr.strip().rpartition("\n")[2]


@contextmanager
def forming(port: int, size: int, **settings: object) -> Iterator[list[Future[list[bytes]]]]:
    """All ranks but the last of a job that was started by hand, waiting for that; what becomes of their exchange."""
    launches, config = torch_style(size, port, job=""), Config(**settings)  # type: ignore[arg-type]
    clients = [ControlClient(bootstrap(each, config), each.rank, size, 20) for each in launches[:-1]]
    with ThreadPoolExecutor(size) as pool:
        yield [pool.submit(client.exchange, WORLD, b"introduce", b"") for client in clients]
        for client in clients:
            client.close()


@pytest.mark.parametrize("variables", [{}, {"HETCOLL_SECRET": "sesame"}])
@pytest.mark.parametrize(
    ("rank", "size", "clash"),
    [
        (0, 3, "two processes say that they are rank 0: "),
        (1, 3, "two processes say that they are rank 1: "),
        (0, 4, "says that the job has 4 ranks; ranks 0-1 said 3"),
        (3, 4, "says that the job has 4 ranks; ranks 0-1 said 3"),
    ],
)
def test_a_second_job_at_one_port_is_an_error_on_every_rank(
    variables: dict[str, str], rank: int, size: int, clash: str
) -> None:
    port, secret = free_port(), variables.get("HETCOLL_SECRET", "").encode() or None
    with forming(port, 3, secret=secret) as first:
        error = by_hand(rank, size, port, **variables)
        assert clash in error
        assert "two jobs started with the same MASTER_ADDR and MASTER_PORT" in error
        assert ("address already in use (EADDRINUSE)" in error) == (rank == 0)
        for one in first:
            with pytest.raises(InitError, match=clash):
                one.result(20)


def test_a_second_rank_0_is_known_before_the_first_has_joined() -> None:
    port = free_port()
    launches = torch_style(2, port, job="")
    unique_id = bootstrap(launches[0], Config())
    assert "two processes say that they are rank 0: the one that hosts the job's store" in by_hand(0, 2, port)
    for rank in range(2):
        with pytest.raises(InitError, match="two processes say that they are rank 0"):
            ControlClient(unique_id, rank, 2, 20)


def test_a_job_that_stands_is_not_ended_by_one_that_comes_to_its_port(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    launches = torch_style(2, port, job="")
    unique_id = bootstrap(launches[0], Config())
    with ThreadPoolExecutor(2) as pool:
        clients = list(pool.map(lambda rank: ControlClient(unique_id, rank, 2, 20), range(2)))
        for tag in (b"first", b"second"):
            met = [pool.submit(client.exchange, WORLD, tag, b"") for client in clients]
            assert [each.result(20) for each in met] == [[b"", b""]] * 2
            for rank in range(2):
                assert f"two processes say that they are rank {rank}" in by_hand(rank, 2, port)
                assert f"two processes say that they are rank {rank}" in caplog.text
        for client in clients:
            client.close()


def test_a_named_job_finds_no_second_rank_0_either() -> None:
    """An earlier run that hangs with the name of this one: neither mixed with nor silently avoided."""
    port = free_port()
    launch = torch_style(2, port)[0]
    bootstrap(launch, Config())
    rendezvous._found.clear()  # another process
    with pytest.raises(InitError, match=rf"127\.0\.0\.1:{port}: address already in use .* is rank 0 of this job too"):
        bootstrap(launch, Config())


def test_what_the_system_refuses_is_an_init_error(monkeypatch: pytest.MonkeyPatch) -> None:
    unique_id = get_unique_id(Config(), loopback=True)
    for refusal in (OSError(24, "Too many open files"), _native.Fault("doorbell: bind: Address already in use")):

        def refuse(*args: object, refusal: OSError = refusal) -> None:
            raise refusal

        monkeypatch.setattr(Communicator, "__init__", refuse)
        with pytest.raises(InitError, match=r"did not come together on this rank: .*(open files|bind)") as caught:
            Communicator.init(1, 0, unique_id, timeout=10)
        assert caught.value.__cause__ is refusal


@contextmanager
def impostor(port: int) -> Iterator[threading.Event]:
    """Repeats the greeting that this job's store would send, and answers no claim as it should."""
    key = rendezvous._key("j", 3)
    with foreign_service(port, auth.Challenge(bytes(32), auth.Service.STORE, os.urandom(16) + key).greeting) as (
        _,
        met,
    ):
        yield met


def test_a_job_with_a_secret_goes_on_after_an_impostor() -> None:
    port = free_port()
    with impostor(port) as met:
        config = Config(secret=b"sesame", init_timeout=40)
        assert meet(torch_style(3, port), [config] * 3) == [[b"0", b"1", b"2"]] * 3
        assert met.wait(5)


def test_a_second_call_in_a_process_gives_the_same_store() -> None:
    launch = torch_style(2, free_port())[0]
    assert bootstrap(launch, Config()) is bootstrap(launch, Config())


@contextmanager
def foreign_service(port: int, greeting: bytes = b"") -> Iterator[tuple[list[bytes], threading.Event]]:
    """Something else that listens at a port; what its connections sent it."""
    heard: list[bytes] = []
    reached = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                reached.set()
                with sock:
                    sock.settimeout(0.5)
                    try:
                        sock.sendall(greeting)
                        while data := sock.recv(1000):
                            heard.append(data)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard, reached
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", bytes(200)])
def test_a_foreign_service_at_the_master_port_is_passed_over_without_a_word(greeting: bytes) -> None:
    port = free_port()
    with foreign_service(port, greeting) as (heard, reached):
        assert meet(torch_style(3, port), [Config(init_timeout=20)] * 3) == [[b"0", b"1", b"2"]] * 3
        assert reached.wait(5)  # it was looked at
    assert not any(heard)


def test_the_port_of_torchruns_agent_is_not_touched() -> None:
    port = free_port()
    with foreign_service(port) as (_, reached):
        assert meet(torch_style(2, port, agent_store=True), [Config()] * 2) == [[b"0", b"1"]] * 2
    assert not reached.is_set()


def test_two_jobs_at_the_same_ports_do_not_mix() -> None:
    port = free_port()
    launches = [*torch_style(2, port, "one"), *torch_style(2, port, "two"), *torch_style(3, port, "one")]
    assert meet(launches, [Config(init_timeout=20)] * 7) == [[b"0", b"1"]] * 4 + [[b"0", b"1", b"2"]] * 3


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


def test_mpi_ranks_of_one_host_need_no_address() -> None:
    launches = [Launch(r, 3, r, 3, None, "openmpi", f"openmpi test-{os.getpid()}") for r in range(3)]
    assert meet(launches, [Config()] * 3) == [[b"0", b"1", b"2"]] * 3


@contextmanager
def squatter(name: str) -> Iterator[None]:
    """A process of another user that listens at an abstract name before the ranks do."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end[1])
        os.setresuid(65534, 65534, 65534)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(name)
        sock.listen()
        os.write(ready[1], b"r")
        os.read(end[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"r"
        yield
    finally:
        for fd in (*ready, *end):
            os.close(fd)
        os.waitpid(child, 0)


def test_mpi_ranks_of_one_host_go_on_after_another_user_who_took_their_name() -> None:
    job = f"openmpi squatted-{os.getpid()}"
    launches = [Launch(r, 3, r, 3, None, "openmpi", job) for r in range(3)]
    with squatter(f"\0hetcoll-{os.getuid()}-{rendezvous._key(job, 3).hex()}"):
        assert meet(launches, [Config(init_timeout=20)] * 3) == [[b"0", b"1", b"2"]] * 3


def test_mpi_ranks_of_one_host_that_have_no_rank_0() -> None:
    launch = Launch(1, 3, 1, 3, None, "openmpi", f"openmpi absent-{os.getpid()}")
    with pytest.raises(InitError, match="rank 0 did not announce its store on this host"):
        bootstrap(launch, Config(init_timeout=0.2))


def test_mpi_on_several_hosts_needs_mpi4py_or_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(InitError, match="HETCOLL_MASTER=host:port"):
        bootstrap(Launch(1, 4, 1, 2, None, "hydra"), Config(init_timeout=5))
    port = free_port()
    launches = [Launch(r, 2, 0, 1, None, "hydra") for r in range(2)]
    assert meet(launches, [Config(master=("127.0.0.1", port))] * 2) == [[b"0", b"1"]] * 2


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


def run_ranks(command: list[str], tmp_path: Path, **variables: str) -> list[str]:
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    source = str(Path(rendezvous.__file__).parents[2])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HETCOLL_", "MASTER_"))}
    done = subprocess.run(
        [*command, str(script)],
        env=env | {"PYTHONPATH": source} | variables,
        capture_output=True,
        timeout=DEADLINE,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if " sees " in line)


def test_open_mpi_itself(tmp_path: Path) -> None:
    mpirun = find_program("mpirun", "openmpi", lambda version: "Open MPI" in version)
    command = [mpirun, "--allow-run-as-root", "-n", "3", "--map-by", ":OVERSUBSCRIBE", sys.executable]
    assert run_ranks(command, tmp_path) == [f"openmpi {rank} sees 0 1 2" for rank in range(3)]


def test_mpich_itself_also_through_a_shell(tmp_path: Path) -> None:
    mpirun = find_program("mpirun", "mpich", lambda version: "HYDRA" in version)
    expected = [f"hydra {rank} sees 0 1 2" for rank in range(3)]
    assert run_ranks([mpirun, "-n", "3", sys.executable], tmp_path) == expected
    shell = [mpirun, "-n", "3", "sh", "-c", f"{sys.executable} $0; true"]
    assert run_ranks(shell, tmp_path) == expected


def test_intel_mpi_itself(tmp_path: Path) -> None:
    mpirun = find_program("mpirun", "impi", lambda version: "Intel" in version)
    home = Path(mpirun).parents[1]
    variables = {"I_MPI_ROOT": str(home), "I_MPI_FABRICS": "shm", "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    found = run_ranks([mpirun, "-n", "3", sys.executable], tmp_path, **variables)
    assert found == [f"hydra {rank} sees 0 1 2" for rank in range(3)]


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_a_broadcast_through_mpi4py(tmp_path: Path, name: str) -> None:
    """What ranks on several hosts do: each is told that it is alone on its host."""
    mpirun = find_program("mpirun", name, lambda version: ("Open MPI" in version) == (name == "openmpi"))
    python = find_mpi4py(mpirun)
    options = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"] if name == "openmpi" else []
    alone = "import os, sys; os.environ |= {'OMPI_COMM_WORLD_LOCAL_SIZE': '1', 'MPI_LOCALNRANKS': '1'}; "
    script = [python, "-c", alone + "exec(open(sys.argv[1]).read())"]
    launcher = "openmpi" if name == "openmpi" else "hydra"
    found = run_ranks([mpirun, *options, "-n", "3", *script], tmp_path)
    assert found == [f"{launcher} {rank} sees 0 1 2" for rank in range(3)]


def test_torchrun_itself(tmp_path: Path) -> None:
    torchrun = find_program("torchrun", "gloo")
    # It may be another Python's, which must not find this one's packages.
    launcher = ["env", "-u", "PYTHONPATH", torchrun]
    command = [*launcher, "--standalone", "--nproc-per-node", "3", "--no-python", sys.executable]
    assert run_ranks(command, tmp_path) == [f"torchrun {rank} sees 0 1 2" for rank in range(3)]


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
        connected.append(address[1])
        return begin(sock, address)

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
    assert connected == [port for _, port in addresses[: 1 if first == "works" else 2]]


def test_a_reset_before_the_connection_was_seen_says_nothing_of_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a firewall. What has listened before and refuses is gone."""
    unique_id = get_unique_id(Config(linger=0), loopback=True)
    attempts: list[object] = []
    begin = socket.socket.connect_ex
    with socket.create_server(("127.0.0.1", 0)) as other:

        def connect(sock: socket.socket, address: tuple[str, int]) -> int:
            attempts.append(address)
            if len(attempts) > 1:
                return begin(sock, address)
            code = begin(sock, other.getsockname())
            close_hard(other.accept()[0])
            return code

        monkeypatch.setattr(socket.socket, "connect_ex", connect)
        sock, _ = probe.connect_store(
            replace(unique_id, addresses=unique_id.addresses[:1]), time.monotonic() + 10, there=True
        )
    sock.close()
    assert len(attempts) == 2
