"""Ports for ranks that are told where to meet."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """A port that is free, and stays so while this process lives: a socket has it, on which nobody listens. The kernel
    gives it to none that asks for any port, and lets others listen there by its number (SO_REUSEADDR)."""
    _held.append(sock := socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", 0))
    port: int = sock.getsockname()[1]
    return port
