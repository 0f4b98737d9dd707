"""A member of a store without a connection, and what a store tells its members of their number."""

from __future__ import annotations

from hetcoll.rendezvous.protocol.wire import U32, Op, Status


class Heard:
    """A member that notes what it is told."""

    def __init__(self, name: str, **ranks: int) -> None:
        self.name, self.ranks = name, {group.encode(): rank for group, rank in ranks.items()}
        self.told: list[tuple[Op, bytes]] = []

    def send(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> None:
        self.told.append((op, body))


def count(processes: int, elsewhere: int = 0, silent: int = 0) -> bytes:
    """Of the first ones so many are on other hosts than the store, and so many fell silent."""
    return b"".join(map(U32.pack, (processes, elsewhere, silent)))
