"""How the processes of a job find rank 0's store."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable

from .door import BACKLOG
from .env import Config, environment
from .errors import InitError
from .interfaces import choose_interfaces
from .sockets import spell_address, spell_error
from .store import StoreServer
from .unique_id import UniqueId, job_secret


def get_unique_id(config: Config | None = None) -> UniqueId:
    """Start a store in this process and return what others need to join it, by `Communicator.init` or `ControlClient`.

    It listens at the chosen interfaces (HETCOLL_SOCKET_IFNAME) and at loopback until this process ends; waiting costs
    no CPU. The key of the job is made from HETCOLL_SECRET, or random where there is none.
    """
    config = environment().config if config is None else config
    job_id = secrets.token_bytes(16)
    interfaces = choose_interfaces(config.socket_ifname)
    interfaces += [each for each in choose_interfaces(config.socket_ifname, loopback=True) if each not in interfaces]
    listeners = bind_all((each.host for each in interfaces), 0)
    addresses = tuple(listener.getsockname()[:2] for listener in listeners)
    unique_id = UniqueId(addresses, job_id, job_secret(config.secret, job_id))
    StoreServer(listeners, unique_id.secret, job_id.ljust(32, b"\0"))
    return unique_id


def bind_all(hosts: Iterable[str], port: int) -> list[socket.socket]:
    """A listening socket at each of the addresses `hosts`, all of them at `port` (0: any). InitError where none is
    free; then none is left open."""
    listeners: list[socket.socket] = []
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listeners.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise InitError(f"listening at {spell_address((host, port))}: {spell_error(error)}") from error
    return listeners
