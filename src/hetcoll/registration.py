"""Memory that the user announced with `Communicator.register`."""

from __future__ import annotations

from typing import Self

from .buffers import Buffer


class Registration:
    """Keeps the memory alive and announced until `close`. A context manager."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer: Buffer | None = buffer

    @property
    def nbytes(self) -> int:
        """Bytes announced; 0 after `close`."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def close(self) -> None:
        """Take the announcement back. More than once is fine."""
        self._buffer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
