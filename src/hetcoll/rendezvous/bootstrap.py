"""How the processes of a job find rank 0's store.

Rank 0 starts it; the others find it in one of three ways, by what the launcher told them:

* a master address and port (HETCOLL_MASTER, torchrun, ``hetcoll run``, srun's first host). Where the launcher named the
  job, rank 0 takes the first free port of PORTS from the master port on, and the others look at all of them for the
  store of a job of that name and size that knows the secret. torchrun's agent may own the master port itself. A job
  without a name, started by hand, has that one port: only the port tells it from another, so a taken one is an error;
* mpirun on one host: an abstract Unix socket whose name every rank can work out;
* mpirun on several hosts: a broadcast through mpi4py.

Two processes that say that they are rank 0 of one job are an error on both sides: the second one asks the store of the
first to join as rank 0, which the store refuses and tells all who wait in it (`groups`).

With HETCOLL_SECRET every rank makes the job's key from it, and no stranger gets further than its first 104 bytes.
Without it the key is random and rank 0's store hands it to whoever asks for this job: over the Unix socket to processes
of the same user only; over TCP to anyone who can reach the port and knows how the job is named. That keeps jobs from
mixing and stray connections out; it does not keep out somebody on the same network who means harm.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib
import logging
import os
import socket
import struct
import time
from collections.abc import Sequence

from ..config.env import Config, Launch, environment
from ..config.interfaces import own_hosts
from ..errors import ArgumentError, BufferTypeError, HetcollError, InitError
from .connections.announcing import announce, fetch_locally, find_announced, listen_locally, read_id
from .connections.auth import HANDSHAKE_SECONDS, Response, Service, Verb
from .connections.probe import Search
from .connections.sockets import BACKLOG, bind_all, resolve, spell_address, spell_error, spells_loopback
from .control import ControlClient
from .protocol.unique_id import UniqueId, hosted_here, job_secret

log = logging.getLogger("hetcoll.bootstrap")

PORTS = 33  # the master port and the next 32
_RETRY = 0.02  # seconds between attempts to reach rank 0's Unix socket
_MPI_MESSAGE = 4096  # bytes broadcast through MPI
_GLANCE = 1.0  # seconds that rank 0 looks who has the port that it wants

_found: dict[Launch, UniqueId] = {}


def get_unique_id(config: Config | None = None, *, loopback: bool = False) -> UniqueId:
    """Start a job's store in this process and return what its ranks need to join: see `Communicator.init`.

    It listens at the chosen interfaces (HETCOLL_SOCKET_IFNAME) and at loopback, or with `loopback` only there, until
    this process ends; waiting costs no CPU. The job's key is made from HETCOLL_SECRET, or random where there is none.
    """
    config = environment().config if config is None else config
    if not isinstance(config, Config):
        raise BufferTypeError(f"config: wanted a Config, or None for the environment's, got {config!r}")
    return _start_store(bind_all(own_hosts(config.socket_ifname, loopback=loopback), 0), config)


def bootstrap(launch: Launch, config: Config) -> UniqueId:
    """The unique id of the job that `launch` describes; every rank of the job calls this.

    Rank 0 starts the store, which lives until its process ends; a second call in a process gives the same id. InitError
    when rank 0 does not appear within HETCOLL_INIT_TIMEOUT, when the launcher does not say where it is, or on rank 0
    when somebody else has its port; AuthenticationError when this process has no HETCOLL_SECRET and rank 0 has one, or
    what greets as rank 0 cannot prove the secret.
    """
    known = _found.get(launch)
    if known is not None and not launch.joins and (not launch.hosts or hosted_here(known.job_id)):
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
    if config.secret is None and config.tls:
        raise ArgumentError(
            "HETCOLL_TLS: wanted HETCOLL_SECRET or HETCOLL_SECRET_FILE on all ranks: without it rank 0 gives the job's"
            " key to whoever asks"
        )
    # A job without a name has one port, where a wrong number of ranks is to be named: its size is not in the key.
    key = _key(launch.job, launch.size if launch.job else 0)
    first = master[1] + launch.agent_store
    ports = range(first, min(master[1] + PORTS, 65536) if launch.job else first + 1)
    endpoints = [(master[0], port) for port in ports]
    if launch.hosts:
        listeners, taken = _bind_first_free(endpoints, launch.one_host)
        try:
            if taken:
                _check_alone(launch, config, key, taken, deadline)
            if not listeners:
                raise InitError(_spell_taken(launch, taken))
            if config.secret is None and not all(spells_loopback(each.getsockname()[0]) for each in listeners):
                _warn_of_open_port()
            return _start_store(listeners, config, key)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
    return find_store(endpoints, config, deadline, key)


@functools.cache  # once is enough
def _warn_of_open_port() -> None:
    log.warning(
        "rank 0 gives the job's key to anyone who reaches its port: on a network that others share, set HETCOLL_SECRET "
        "or HETCOLL_SECRET_FILE for all ranks"
    )


def _bind_first_free(
    endpoints: Sequence[tuple[str, int]], one_host: bool
) -> tuple[list[socket.socket], list[tuple[str, int]]]:
    """Listen at the first of the ports, where the others will look, that is free; and which were taken.

    Where all ranks are on this host that is only what the master's name means here, most often loopback; else all
    interfaces, because the name may stand for another address elsewhere. Loopback's address does not."""
    here = bool(endpoints) and (one_host or spells_loopback(endpoints[0][0]))
    hosts = _resolve_local(endpoints[0][0]) if here else []
    taken: list[tuple[str, int]] = []
    for host, port in endpoints:
        try:
            return (bind_all(hosts, port) if hosts else [_bind_everywhere(port)]), taken
        except InitError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
            taken.append((host, port))
    return [], taken


def _check_alone(launch: Launch, config: Config, key: bytes, taken: Sequence[tuple[str, int]], deadline: float) -> None:
    """InitError where this job has another rank 0, at one of the ports that were `taken`, which hears of it as well."""
    try:
        other = find_store(taken, config, min(deadline, time.monotonic() + _GLANCE), key)
    except InitError:  # somebody else's; what they are is not for us to say
        return
    try:
        ControlClient(other, 0, launch.size, HANDSHAKE_SECONDS).close()
        reason = "it listens there"
    except HetcollError as error:
        reason = str(error)
    raise InitError(f"{_spell_taken(launch, taken)} What has it says that it is rank 0 of this job too: {reason}")


def _spell_taken(launch: Launch, taken: Sequence[tuple[str, int]]) -> str:
    """What to do about ports that somebody else has."""
    if not taken:
        return "rank 0 has no port to listen at: the master port is the last one"
    port = spell_address(taken[0]) + (f" to {taken[-1][1]}" if len(taken) > 1 else "")
    end = "end what listens there (ss -ltnp shows it: another job, or an earlier run that hangs)"
    return (
        f"rank 0 cannot listen at {port}: address already in use (EADDRINUSE). Either {end}, or give all ranks of this "
        "job another MASTER_PORT, or HETCOLL_MASTER=host:port."
    )


def _resolve_local(host: str) -> list[str]:
    """The addresses of `host` that are this host's."""
    try:
        answers = resolve(host)
    except OSError as error:
        raise InitError(f"MASTER_ADDR {host!r}: {spell_error(error)}") from error
    local = []
    for family, address in answers:
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


def find_store(
    endpoints: Sequence[tuple[str, int]], config: Config, deadline: float, key: bytes | None = None
) -> UniqueId:
    """The unique id of the store with this `key` at one of `endpoints`, worked out from the secret or asked for; None:
    of any that is there by now."""

    def respond(greeting: bytes, context: bytes) -> Response:
        if config.secret is None:
            return Response(b"", greeting, context, Verb.FETCH)
        return Response(job_secret(config.secret, context[:16]), greeting)

    # Who has a secret goes on after a stranger that knows none; who has none would have nothing to go by.
    there = key is None
    settled = there or config.secret is None or len(endpoints) == 1
    while True:
        search = Search(Service.STORE, lambda c: key in (None, c[16:]), endpoints, respond, settled, there=there)
        found = search.run(deadline)
        job_id = found.context[:16]
        with found.sock as sock:
            if config.secret is not None:
                return UniqueId((found.address,), job_id, job_secret(config.secret, job_id))
            try:
                told = read_id(sock, min(deadline, time.monotonic() + HANDSHAKE_SECONDS))
                return UniqueId((found.address,), told.job_id, told.secret)
            except (OSError, HetcollError, struct.error, IndexError) as error:
                if time.monotonic() + _RETRY >= deadline:
                    raise InitError(f"the store at {spell_address(found.address)}: {spell_error(error)}") from error
        time.sleep(_RETRY)


# On one host.


def _by_unix_socket(launch: Launch, config: Config, deadline: float) -> UniqueId:
    key = _key(launch.job or f"{launch.launcher} {launcher_pid()}", launch.size)
    name = f"\0hetcoll-{os.getuid()}-{key.hex()}"
    if launch.hosts:
        announcer = listen_locally(name)
        try:
            return _start_store([*bind_all(own_hosts(config.socket_ifname, loopback=True), 0), announcer], config, key)
        except BaseException:
            announcer.close()
            raise
    while True:
        for each in find_announced(name):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.setblocking(False)  # connecting to one whose queue is full fails at once
                try:
                    sock.connect(each)
                    return fetch_locally(sock, deadline, key)
                except OSError as error:
                    problem = error
        if time.monotonic() + _RETRY >= deadline:
            text = f"rank 0 did not announce its store on this host: {spell_error(problem)}"
            raise InitError(f"{text} within {config.init_timeout:g} s") from problem
        time.sleep(_RETRY)


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
    if launch.hosts:
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
    """16 bytes by which the ranks of one launch know their store. `size` 0: that of any."""
    return hashlib.sha256(f"hetcoll launch {size} {job}".encode()).digest()[:16]


def _start_store(listeners: list[socket.socket], config: Config, key: bytes | None = None) -> UniqueId:
    """A store behind `listeners`. With the `key` of a launch, and without HETCOLL_SECRET, it hands out the id."""
    addresses: list[tuple[str, int]] = []
    for listener in listeners:
        if listener.family == socket.AF_UNIX:
            continue
        host, port = listener.getsockname()[:2]
        hosts = own_hosts(config.socket_ifname) if host in ("::", "0.0.0.0") else [host]
        addresses += [(each, port) for each in hosts]
    if not addresses:
        raise InitError("no network interface is up: wanted one to listen at")
    job_id = os.urandom(16)
    unique_id = UniqueId(tuple(addresses), job_id, job_secret(config.secret, job_id))
    context = job_id + (key or bytes(16))
    open_fetch = key is not None and config.secret is None
    from .store.server import StoreServer  # only rank 0 needs it, and imports count

    told = unique_id.to_bytes()
    listeners = [*listeners, *announce(job_id)]
    StoreServer(listeners, unique_id.secret, context, told, open_fetch=open_fetch, linger=config.linger, tls=config.tls)
    return unique_id
