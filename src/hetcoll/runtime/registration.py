"""Memory that the user announced with `Communicator.register`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ..buffers import Buffer

if TYPE_CHECKING:
    from ..links.verbs.memory import Lease


class Registration:
    """Keeps the memory alive and announced until `close`. A context manager."""

    def __init__(self, buffer: Buffer, lease: Lease | None = None) -> None:
        self._buffer: Buffer | None = buffer
        self._lease = lease

    @property
    def nbytes(self) -> int:
        """Bytes announced; 0 after `close`."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def close(self) -> None:
        """Take the announcement back. More than once is fine.

        ArgumentError while an operation in flight uses the memory; then it stays announced.
        """
        if self._lease is not None:
            self._lease.close()
        self._buffer = self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
