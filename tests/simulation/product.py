"""The control plane, loaded so that it sees the simulated system. Only in a process of its own: it stays so."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, MutableMapping
from types import ModuleType
from typing import Any

import hetcoll

from . import sockets, threads
from .kernel import World, process


class Standin(ModuleType):
    """What one of our modules has, and the rest of the real one."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        self.__dict__.update(vars(sys.modules[name]) | names)


class OfProcess(MutableMapping[Any, Any]):
    """A table of a module, of which each simulated process has its own."""

    @property
    def _table(self) -> dict[Any, Any]:
        return process().state.setdefault(id(self), {})

    def __getitem__(self, key: Any) -> Any:
        return self._table[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._table[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._table[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _urandom(count: int) -> bytes:
    return World.kernel.random.randbytes(count)


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: each for name, each in vars(module).items() if not name.startswith("_")}


def load() -> None:
    """Import the product again, over the stand-ins. What it needs of others was imported with the first one."""
    assert os.environ.get("PYTHONHASHSEED") == "0", "the order of sets is a decision, too"
    native = sys.modules["hetcoll._native"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "hetcoll"]:
        del sys.modules[name]
    sys.modules["hetcoll._native"] = native
    times = {name: getattr(threads, name) for name in ("monotonic", "monotonic_ns", "sleep")}
    stand_ins = [
        Standin("time", **times),
        Standin("threading", **_public(threads)),
        Standin("socket", **_public(sockets)),
        Standin("select", **_public(sockets)),
        Standin("selectors", **_public(sockets)),
        Standin("os", getpid=lambda: process().pid, urandom=_urandom, register_at_fork=lambda **_: None),
        Standin("atexit", register=lambda _: None),
    ]
    real = {each.__name__: sys.modules[each.__name__] for each in stand_ins}
    sys.modules.update({each.__name__: each for each in stand_ins})
    try:
        for name in ("control", "bootstrap", "session", "decisions", "relay", "store.server"):
            importlib.import_module(f"hetcoll.rendezvous.{name}")
        importlib.import_module("hetcoll.health.diagnosis")
    finally:
        sys.modules.update(real)
    _give_each_process_its_own()


def _give_each_process_its_own() -> None:
    from hetcoll import lifetime
    from hetcoll.rendezvous import bootstrap, succession
    from hetcoll.rendezvous.connections import members
    from hetcoll.rendezvous.protocol import unique_id
    from hetcoll.rendezvous.store import server

    unique_id.HOSTED = server.HOSTED = OfProcess()  # type: ignore[assignment]
    server._hosted = OfProcess()  # type: ignore[assignment]
    bootstrap._found = OfProcess()  # type: ignore[assignment]
    lifetime._open = OfProcess()  # type: ignore[assignment]
    lifetime._watch_multiprocessing = lambda: None  # of the real process
    bootstrap.own_hosts = succession.own_hosts = lambda *_, **__: [process().host.address]  # type: ignore[assignment]
    # A set of connections has the order of their hashes, which would be that of addresses in memory.
    members.Connection.__hash__ = lambda self: self.__dict__.setdefault("_hash", next(World.kernel.numbers))  # type: ignore[method-assign,assignment]
    members.Connection.__eq__ = lambda self, other: self is other  # type: ignore[method-assign,assignment]


assert hetcoll  # the first import, of all that it needs
