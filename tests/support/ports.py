"""Ports for ranks that are told where to meet."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A port that is free, and stays so: the kernel gives it to no socket that asks for any port."""
    given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port := random.randrange(10_000, given_from)))
            except OSError:
                continue
            return port
