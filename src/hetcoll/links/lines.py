"""What two processes say to each other over a socket before they have links: lines of JSON."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from ..rendezvous.connections.sockets import send_all, spell_error

if TYPE_CHECKING:
    import socket

_MOST = 4096  # bytes of a line
_SECONDS = 10.0  # to send one


class Lines:
    """Of a socket that does not block. ConnectionError where it has ended, with the reason."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._came = sock, b""

    def fileno(self) -> int:
        """For poll(2)."""
        return self._sock.fileno()

    def say(self, *words: Any) -> None:
        try:
            send_all(self._sock, json.dumps(words).encode() + b"\n", time.monotonic() + _SECONDS)
        except OSError as error:
            raise ConnectionError(spell_error(error)) from None

    def hear(self) -> list[list[Any]]:
        """What has come since the last time; does not wait."""
        try:
            part = self._sock.recv(_MOST)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionError(spell_error(error)) from None
        if not part or len(self._came) > _MOST:
            raise ConnectionError("it has closed the connection")
        *lines, self._came = (self._came + part).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._sock.close()
