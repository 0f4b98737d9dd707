"""What agents are given and give: NIXL's configuration, and handles of descriptors and transfers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ... import ArgumentError, Communicator, HetcollError, Work
from .descriptors import Descriptors, Rows

SELF = ("", "NIXL_INIT_AGENT")
"""What programs call the agent itself."""

_BACKENDS = ("HETCOLL", "UCX")  # the second is what programs ask for without a wish


def check_backends(names: Sequence[str]) -> None:
    if not isinstance(names, Iterable):
        raise ArgumentError(f"backends: wanted a list of names, got {names!r}")
    if unknown := [name for name in names if name not in _BACKENDS]:
        raise ArgumentError(f"backends: wanted {' or '.join(_BACKENDS)}, got {unknown}: hetcoll has no storage")


def check_name(name: str) -> str:
    if not isinstance(name, str) or name in SELF:
        raise ArgumentError(f"agent_name: wanted a name, got {name!r}")
    return name


def as_text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def as_bytes(message: bytes | str, name: str = "notif_msg") -> bytes:
    if not isinstance(message, bytes | bytearray | str):
        raise ArgumentError(f"{name}: wanted bytes, got {message!r}")
    return message.encode() if isinstance(message, str) else bytes(message)


class Agent(Protocol):
    def check_xfer_state(self, handle: nixl_xfer_handle) -> str: ...


class nixl_agent_config:  # noqa: N801  # as there
    """As NIXL's; threads, ports and telemetry say nothing here. `comm`: the communicator whose ranks are the agents."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = 0,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: Any = None,
        *,
        comm: Communicator | None = None,
    ) -> None:
        for name, asked in (("enable_listen_thread", enable_listen_thread), ("capture_telemetry", capture_telemetry)):
            if asked:
                raise ArgumentError(f"{name}: wanted False, since hetcoll's agents have none, got {asked!r}")
        check_backends(backends)
        self.backends, self.comm = list(backends), comm


class nixl_prepped_dlist_handle:  # noqa: N801  # as there
    """Descriptors of one agent, checked once: those here, of a rank's own memory, or a peer's."""

    def __init__(self, peer: int | None, descs: Descriptors, regions: Rows, offsets: Rows) -> None:
        self.peer, self.descs, self.regions, self.offsets = peer, descs, regions, offsets

    def release(self) -> None:
        """Nothing is held."""


class nixl_xfer_handle:  # noqa: N801  # as there
    """A transfer, which may be posted again when it is over. `error` says why its state is ERR."""

    def __init__(self, agent: Agent, gets: bool, peer: int, parts: list[tuple[int, int, Rows]], notif: bytes) -> None:
        self._agent, self._gets, self._peer, self._parts, self._notif = agent, gets, peer, parts, notif
        self._works: list[Work] | None = None
        self._told = self._over = False
        self.error: HetcollError | None = None

    def release(self) -> None:
        """ArgumentError while it is in flight: its memory may still be read or written."""
        if self._works is not None and self._agent.check_xfer_state(self) == "PROC":
            raise ArgumentError("release: wanted a transfer that is over, got one in flight, which cannot be cancelled")


def check_sides(local: nixl_prepped_dlist_handle, remote: nixl_prepped_dlist_handle) -> int:
    """The other agent's rank."""
    ours = isinstance(local, nixl_prepped_dlist_handle) and local.peer is None
    if not ours or not isinstance(remote, nixl_prepped_dlist_handle) or remote.peer is None:
        raise ArgumentError("local_xfer_side, remote_xfer_side: wanted one of NIXL_INIT_AGENT and one of an agent")
    return remote.peer


def check_handle(handle: nixl_xfer_handle) -> nixl_xfer_handle:
    if not isinstance(handle, nixl_xfer_handle):
        raise ArgumentError(f"handle: wanted one of make_prepped_xfer or initialize_xfer, got {handle!r}")
    return handle


def comm_of(config: nixl_agent_config | None) -> Communicator | None:
    if config is not None and not isinstance(config, nixl_agent_config):
        raise ArgumentError(f"nixl_conf: wanted hetcoll.serving.nixl's nixl_agent_config, got {config!r}")
    return None if config is None else config.comm
