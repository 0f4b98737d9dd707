"""How the processes of a job find rank 0's store.

Rank 0 starts it; the others find it in one of three ways, by what the launcher told them:

* a master address and port (HETCOLL_MASTER, torchrun, ``hetcoll run``, srun's first host): rank 0 takes the first free
  port of PORTS from the master port on, and the others look at all of them for the store of their job. torchrun's agent
  may own the master port itself;
* mpirun on one host: an abstract Unix socket whose name every rank can work out;
* mpirun on several hosts: a broadcast through mpi4py.

With HETCOLL_SECRET every rank makes the job's key from it, and no stranger gets further than its first 104 bytes.
Without it the key is random and rank 0's store hands it to whoever asks for this job: over the Unix socket to processes
of the same user only; over TCP to anyone who can reach the port and knows how the job is named. That keeps jobs from
mixing and stray connections out; it does not keep out somebody on the same network who means harm.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import socket
import time
from collections.abc import Iterable

from ..config.env import Config, Launch, environment
from ..errors import AuthenticationError, InitError
from .auth import GREETING, VERDICT, Response, Service, Verb, greeting_context
from .descriptors import peer_is_us
from .door import BACKLOG
from .interfaces import choose_interfaces
from .probe import Search
from .sockets import receive_exactly, send_all, spell_address, spell_error
from .unique_id import UniqueId, hosted_here, job_secret
from .wire import HEADER, unpack

PORTS = 33  # the master port and the next 32
_RETRY = 0.02  # seconds between attempts to reach rank 0's Unix socket
_MPI_MESSAGE = 4096  # bytes broadcast through MPI

_found: dict[Launch, UniqueId] = {}


def get_unique_id(config: Config | None = None, *, loopback: bool = False) -> UniqueId:
    """Start a job's store in this process and return what its ranks need to join: see `Communicator.init`.

    It listens at the chosen interfaces (HETCOLL_SOCKET_IFNAME) and at loopback, or with `loopback` only there, until
    this process ends; waiting costs no CPU. The job's key is made from HETCOLL_SECRET, or random where there is none.
    """
    config = environment().config if config is None else config
    return _start_store(bind_all(_own_hosts(config, loopback), 0), config)


def bootstrap(launch: Launch, config: Config) -> UniqueId:
    """The unique id of the job that `launch` describes; every rank of the job calls this.

    Rank 0 starts the store, which lives until its process ends; a second call in a process gives the same id. InitError
    when rank 0 does not appear within HETCOLL_INIT_TIMEOUT, or when the launcher does not say where it is;
    AuthenticationError when this process has no HETCOLL_SECRET and rank 0 has one.
    """
    known = _found.get(launch)
    if known is not None and (launch.rank != 0 or hosted_here(known.job_id)):
        return known
    deadline = time.monotonic() + config.init_timeout
    master = config.master or launch.master
    if launch.size == 1:
        found = get_unique_id(config, loopback=True)
    elif master is not None:
        found = _by_master(launch, config, master, deadline)
    elif launch.launcher in ("openmpi", "hydra"):
        found = _by_unix_socket(launch, config, deadline) if launch.one_host else _by_mpi(launch, config, deadline)
    else:
        raise InitError(
            f"{launch.launcher} set rank {launch.rank} of {launch.size}, but not where rank 0 is: wanted MASTER_ADDR "
            "and MASTER_PORT, or HETCOLL_MASTER=host:port"
        )
    _found[launch] = found
    return found


# By address.


def _by_master(launch: Launch, config: Config, master: tuple[str, int], deadline: float) -> UniqueId:
    key = _key(launch.job, launch.size)
    ports = range(master[1] + launch.agent_store, min(master[1] + PORTS, 65536))
    if launch.rank == 0:
        return _start_store(_bind_first_free(master[0], ports, launch.one_host), config, key)
    endpoints = [(master[0], port) for port in ports]
    return _ask(Search(Service.STORE, lambda context: context[16:] == key, endpoints), config, deadline)


def _bind_first_free(host: str, ports: Iterable[int], one_host: bool) -> list[socket.socket]:
    """Listen where the others will look. Where all ranks are on this host that is only what the master's name means
    here, most often loopback; else all interfaces, because the name may stand for another address elsewhere."""
    hosts = _resolve_local(host) if one_host else []
    problem = InitError("there is no port to try")
    for port in ports:
        try:
            return bind_all(hosts, port) if hosts else [_bind_everywhere(port)]
        except InitError as error:
            problem = error
    raise InitError(f"rank 0 found no free port beside the master port: {problem}")


def _resolve_local(host: str) -> list[str]:
    """The addresses of `host` that are this host's."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InitError(f"MASTER_ADDR {host!r}: {spell_error(error)}") from error
    local = []
    for family, _, _, _, address in answers:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            if _can_bind(sock, address):
                local.append(str(address[0]))
    return local


def _can_bind(sock: socket.socket, address: tuple[object, ...]) -> bool:
    try:
        sock.bind(address)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


def _bind_everywhere(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=BACKLOG)
    except OSError as error:
        raise InitError(f"listening at port {port}: {spell_error(error)}") from error


def _ask(search: Search, config: Config, deadline: float) -> UniqueId:
    """The unique id of the store that `search` finds, worked out from the secret or asked for."""
    while True:
        found = search.run(deadline)
        with found.sock as sock:
            job_id = found.context[:16]
            if config.secret is not None:
                return UniqueId((found.address,), job_id, job_secret(config.secret, job_id))
            try:
                told = _fetch(sock, found.greeting, found.context, deadline)
                return UniqueId((found.address,), told.job_id, told.secret)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise InitError(f"the store at {spell_address(found.address)}: {spell_error(error)}") from error
        search = Search(search.service, search.matches, search.endpoints)


def _fetch(sock: socket.socket, greeting: bytes, context: bytes, deadline: float) -> UniqueId:
    response = Response(b"", greeting, context, Verb.FETCH)
    send_all(sock, response.claim, deadline)
    try:
        response.check(receive_exactly(sock, VERDICT.size, deadline))
    except AuthenticationError:
        raise AuthenticationError("rank 0 has a HETCOLL_SECRET and this process has none") from None
    length = HEADER.unpack(receive_exactly(sock, HEADER.size, deadline))[3]
    return UniqueId.from_bytes(unpack(receive_exactly(sock, length, deadline))[0])


# On one host.


def _by_unix_socket(launch: Launch, config: Config, deadline: float) -> UniqueId:
    key = _key(launch.job or f"{launch.launcher} {launcher_pid()}", launch.size)
    name = f"\0hetcoll-{os.getuid()}-{key.hex()}"
    if launch.rank == 0:
        announcer = _listen_locally(name)
        try:
            return _start_store([*bind_all(_own_hosts(config, True), 0), announcer], config, key)
        except BaseException:
            announcer.close()
            raise
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                sock.connect(name)
                return _fetch_locally(sock, key, deadline)
            except OSError as error:
                if time.monotonic() + _RETRY >= deadline:
                    text = f"rank 0 did not announce its store on this host: {spell_error(error)}"
                    raise InitError(f"{text} within {config.init_timeout:g} s") from error
        time.sleep(_RETRY)


def _listen_locally(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise InitError(f"rank 0 cannot announce its store: {spell_error(error)}") from error
    return sock


def _fetch_locally(sock: socket.socket, key: bytes, deadline: float) -> UniqueId:
    if not peer_is_us(sock):
        raise AuthenticationError("the process that announces rank 0's store runs as another user")
    sock.setblocking(False)
    greeting = receive_exactly(sock, GREETING.size, deadline)
    context = greeting_context(greeting, Service.STORE)
    if context is None or context[16:] != key:
        raise ConnectionResetError("what announces itself is not this job's store")
    return _fetch(sock, greeting, context, deadline)


def launcher_pid() -> int:
    """The nearest ancestor that is an MPI's process manager; our parent where there is none."""
    managers = ("hydra_pmi_proxy", "hydra_bstrap_proxy", "pmi_proxy", "mpiexec.hydra", "mpiexec", "mpirun", "prterun")
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                stat = file.read()
        except OSError:  # it has just ended
            break
        if stat[stat.index("(") + 1 : stat.rindex(")")] in (name[:15] for name in managers):
            return pid
        pid = int(stat[stat.rindex(")") + 2 :].split()[1])
    return os.getppid()


# Through MPI.


def _by_mpi(launch: Launch, config: Config, deadline: float) -> UniqueId:
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise InitError(
            f"{launch.launcher} started {launch.size} ranks on several hosts and does not say where rank 0 is: wanted "
            f"HETCOLL_MASTER=host:port in the environment of every rank, or mpi4py ({error})"
        ) from error
    world, message = mpi.COMM_WORLD, bytearray(_MPI_MESSAGE)
    if launch.rank == 0:
        data = get_unique_id(config).to_bytes()
        message[: len(data) + 4] = len(data).to_bytes(4, "little") + data
    request = world.Ibcast(message, root=0)
    while not request.Test():
        if time.monotonic() >= deadline:
            raise InitError(f"the broadcast through MPI did not end within {config.init_timeout:g} s")
        time.sleep(0.001)
    return UniqueId.from_bytes(bytes(message[4 : 4 + int.from_bytes(message[:4], "little")]))


# Starting the store.


def _key(job: str, size: int) -> bytes:
    """16 bytes by which the ranks of one launch know their store."""
    return hashlib.sha256(f"hetcoll launch {size} {job}".encode()).digest()[:16]


def _own_hosts(config: Config, loopback: bool) -> list[str]:
    """Addresses to listen at: loopback's, and those of the chosen interfaces unless `loopback`."""
    interfaces = choose_interfaces(config.socket_ifname, loopback=True)
    if not loopback:
        interfaces = [*choose_interfaces(config.socket_ifname), *interfaces]
    return list(dict.fromkeys(interface.host for interface in interfaces))


def bind_all(hosts: Iterable[str], port: int) -> list[socket.socket]:
    """A listening socket at each of the addresses `hosts`, at `port` (0: any). InitError where that is taken; then
    none is left open."""
    listeners: list[socket.socket] = []
    host = ""
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listeners.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise InitError(f"listening at {spell_address((host, port))}: {spell_error(error)}") from error
    return listeners


def _start_store(listeners: list[socket.socket], config: Config, key: bytes | None = None) -> UniqueId:
    """A store behind `listeners`. With the `key` of a launch, and without HETCOLL_SECRET, it hands out the id."""
    addresses: list[tuple[str, int]] = []
    for listener in listeners:
        if listener.family == socket.AF_UNIX:
            continue
        host, port = listener.getsockname()[:2]
        hosts = _own_hosts(config, False) if host in ("::", "0.0.0.0") else [host]
        addresses += [(each, port) for each in hosts]
    if not addresses:
        raise InitError("no network interface is up: wanted one to listen at")
    job_id = os.urandom(16)
    unique_id = UniqueId(tuple(addresses), job_id, job_secret(config.secret, job_id))
    context = job_id + (key or bytes(16))
    open_fetch = key is not None and config.secret is None
    from .store import StoreServer  # only rank 0 needs it, and imports count

    told = unique_id.to_bytes()
    StoreServer(listeners, unique_id.secret, context, told, open_fetch=open_fetch, linger=config.linger)
    return unique_id
